"""First report about a fault, from the records of a freeze: what happened, the first value on any
rank that was not finite, the steps before, and the ranks that are missing; and its sentences for
the terminal and for pages. Pure.

Clocks of ranks on several hosts differ, and a frozen tree has no merged order. So the first bad
value of an iteration is the one with the earliest time. If an output is not finite, gradients are
left out, because no output is computed from a gradient of its own iteration.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rankdump._analysis.reader.job_sentences import format_dropped
from rankdump._core.black_box import RankCallCounts, StandingCall, find_standing_calls
from rankdump._core.freeze_record import (
    AbsentRanks,
    FreezeRecord,
    FrozenCause,
    FrozenRank,
    FrozenStep,
    NonfiniteTensor,
    describe_absence,
    join_missing_ranks,
)
from rankdump._core.scope_names import format_scope_name
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.status import SessionState
from rankdump._core.units import format_count

MAX_STEPS = 12
"""Largest number of steps in a report."""
MAX_NOTES = 32
"""Largest number of watch-rule notes in a report; the latest ones are kept."""
MAX_AFTER = 2
"""Largest number of these steps that are after the step with the fault."""


@dataclass(frozen=True, slots=True)
class FirstBadValue:
    """The earliest tensor that has NaN or infinities."""

    rank: int
    iteration: int
    tensor: NonfiniteTensor
    source: str = ""
    """`file:line` of the script, if a rank has reported it; else empty."""
    full_tensors: int = 0
    """Number of full tensors in the tree that belong to the same step of the rank."""


@dataclass(frozen=True, slots=True)
class StepSummary:
    """Summary of one iteration over all ranks."""

    iteration: int
    ranks: int
    unfinished: int
    """Number of ranks that had not ended the iteration."""
    loss: str
    """Loss of the lowest rank that has one; empty if none has."""
    gradient_norm: str
    """Largest gradient norm of the ranks; NaN if the norm of any rank is NaN; empty
    without norms.
    """
    largest: str
    """Largest magnitude of a finite element; empty without finite elements."""
    nonfinite: int
    """Number of tensors with NaN or infinities."""
    skipped: int
    """Number of tensors that were not measured, because of the overhead budget."""


@dataclass(frozen=True, slots=True)
class StepNote:
    """Note of a watch rule."""

    iteration: int
    rank: int
    text: str
    """The note as a sentence."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The last step of a rank."""

    rank: int
    host: str
    iteration: int
    state: SessionState
    ended_by: str
    unfinished: bool
    stacks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FaultReport:
    """First report about the fault in one frozen tree."""

    root: str
    job_id: str
    attempt: int
    iteration: int
    world_size: int
    cause: FrozenCause
    later_causes: tuple[FrozenCause, ...]
    first_bad_value: FirstBadValue | None
    steps: tuple[StepSummary, ...]
    absent: tuple[AbsentRanks, ...]
    ends: tuple[RankEnd, ...]
    dropped_steps: int
    """Number of steps that agents had dropped before the freeze because they were short
    of memory.
    """
    standing_calls: tuple[StandingCall, ...] = ()
    """Collectives in which ranks may be waiting; the one that the others wait for is first."""
    notes: tuple[StepNote, ...] = ()
    """Notes of watch rules, the oldest first."""
    dropped_tensors: int = 0
    """Number of full tensors that agents had dropped before the freeze because they were short of
    memory.
    """


def describe_bad_value(found: FirstBadValue, name: str) -> str:
    """Return a sentence about the first bad value; `name` is the name of its operator."""
    tensor = found.tensor
    counts = ((tensor.nans, "NaN"), (tensor.infinities, "infinite"))
    parts = ", ".join(f"{count:,} {word}" for count, word in counts if count)
    return (
        f"first value that is not finite: rank {found.rank}, iteration {found.iteration}: "
        f"{tensor.side} {tensor.slot} of {name} ({parts})"
    )


def make_fault_report(root: str, records: Sequence[FreezeRecord]) -> FaultReport:
    """Return the report of a tree from the records of its agents, of which there is at
    least one.
    """
    first = min(records, key=lambda record: record.frozen_us)
    # The texts of a cause may differ in the record of an agent that received it in a message.
    causes = {each.identity: each for record in records for each in record.causes}
    causes = {first.causes[0].identity: first.causes[0]} | causes
    hosts = [(record.host, rank) for record in records for rank in record.ranks]
    hosts.sort(key=lambda pair: pair[1].rank)
    ranks = [rank for _, rank in hosts]
    cause, *later = causes.values()
    later.sort(key=lambda each: each.at_us)
    bad = _find_first_bad(ranks, [cause, *later])
    until = (first.iteration if bad is None else min(bad.iteration, first.iteration)) + MAX_AFTER
    return FaultReport(
        root=root,
        job_id=first.job_id,
        attempt=first.attempt,
        iteration=first.iteration,
        world_size=first.world_size,
        cause=cause,
        later_causes=tuple(later),
        first_bad_value=bad,
        steps=_summarize_steps(ranks, until),
        absent=tuple(_list_absent(records)),
        ends=tuple(_make_end(host, rank) for host, rank in hosts if rank.steps),
        dropped_steps=sum(rank.dropped_steps for rank in ranks),
        notes=_list_notes(ranks),
        standing_calls=tuple(find_standing_calls(list(_iterate_calls(ranks)))),
        dropped_tensors=sum(rank.dropped_tensors for rank in ranks),
    )


def _iterate_calls(ranks: Iterable[FrozenRank]) -> Iterator[RankCallCounts]:
    for rank in ranks:
        if rank.steps:
            last = rank.steps[-1]
            waits = last.unfinished and rank.state is SessionState.OPEN
            yield RankCallCounts(rank.rank, last.ended_us, waits, last.calls)


def _find_first_bad(
    ranks: Iterable[FrozenRank], causes: Sequence[FrozenCause]
) -> FirstBadValue | None:
    found = [
        FirstBadValue(rank.rank, step.iteration, tensor, full_tensors=step.full_tensors)
        for rank in ranks
        for step in rank.steps
        if (tensor := step.first_nonfinite) is not None
    ]
    if not found:
        return None
    first = min(found, key=_find_order)
    place = first.rank, first.iteration, first.tensor.op_name
    about = (each for each in causes if (each.rank, each.iteration, each.op_name) == place)
    return replace(first, source=next((each.source for each in about if each.source), ""))


def _find_order(bad: FirstBadValue) -> tuple[int, bool, int, int]:
    is_gradient = bad.tensor.op_name.startswith(GRADIENTS_PREFIX)
    return bad.iteration, is_gradient, bad.tensor.at_us, bad.rank


def _summarize_steps(ranks: Iterable[FrozenRank], until: int) -> tuple[StepSummary, ...]:
    """Return the summaries of the last steps up to an iteration."""
    by_iteration: defaultdict[int, list[FrozenStep]] = defaultdict(list)
    for rank in ranks:
        for step in rank.steps:
            by_iteration[step.iteration].append(step)
    last = sorted(each for each in by_iteration if each <= until)[-MAX_STEPS:]
    return tuple(_summarize_step(iteration, by_iteration[iteration]) for iteration in last)


def _summarize_step(iteration: int, steps: Sequence[FrozenStep]) -> StepSummary:
    losses = (step.numbers["loss"] for step in steps if "loss" in step.numbers)
    return StepSummary(
        iteration=iteration,
        ranks=len(steps),
        unfinished=sum(step.unfinished for step in steps),
        loss=next(losses, ""),
        gradient_norm=_find_largest(step.gradient_norm for step in steps),
        largest=_find_largest(step.largest for step in steps),
        nonfinite=sum(step.nonfinite for step in steps),
        skipped=sum(step.skipped for step in steps),
    )


def _list_notes(ranks: Iterable[FrozenRank]) -> tuple[StepNote, ...]:
    notes = [
        StepNote(step.iteration, rank.rank, text)
        for rank in ranks
        for step in rank.steps
        for text in step.notes
    ]
    return tuple(sorted(notes, key=lambda note: note.iteration)[-MAX_NOTES:])


def _find_largest(texts: Iterable[str]) -> str:
    known = [text for text in texts if text]
    return max(known, key=lambda text: (math.isnan(float(text)), float(text)), default="")


def _list_absent(records: Sequence[FreezeRecord]) -> Iterable[AbsentRanks]:
    """Yield the ranks that have no step, without a list of all ranks, because there may be
    millions.
    """
    present = {rank.rank for record in records for rank in record.ranks}
    reasons = {
        each.rank: each for record in records for each in record.missing if each.rank not in present
    }
    yield from join_missing_ranks(reasons.values())
    unknown, size, after = _explain_unknown_ranks(records), records[0].world_size, -1
    for rank in (*sorted(present | reasons.keys()), size):
        if after + 1 < min(rank, size):
            yield AbsentRanks(after + 1, min(rank, size) - 1, unknown)
        after = rank


def _explain_unknown_ranks(records: Sequence[FreezeRecord]) -> str:
    """Return why there may be no information about ranks that no record names."""
    hosts = ", ".join(dict.fromkeys(record.host for record in records))
    others = max(record.frozen_agents for record in records) - len(records)
    if others > 0:
        who = "another agent has" if others == 1 else f"{others} other agents have"
        where = f"{who} frozen the job, on another disk or not written yet"
    else:
        where = "on a host that was not frozen"
    return f"no session on {hosts}: {where}, or never started"


def _make_end(host: str, rank: FrozenRank) -> RankEnd:
    last = rank.steps[-1]
    return RankEnd(
        rank.rank, host, last.iteration, rank.state, rank.ended_by, last.unfinished, last.stacks
    )


def describe_fault(cause: FrozenCause) -> str:
    """Return a sentence about a cause, with its rank, operator and line of the script."""
    who = f"rank {cause.rank}, " if cause.rank is not None else ""
    where = f"; {cause.side} {cause.slot} of {format_scope_name(cause.op_name)}"
    line = f"; {cause.source}" if cause.source else ""
    about = where if cause.op_name else ""
    return f"{cause.kind.value}, {who}iteration {cause.iteration}: {cause.text}{about}{line}"


def iter_bad_value_lines(found: FirstBadValue, root: str) -> Iterator[str]:
    """Yield lines about the first value that is not finite."""
    yield describe_bad_value(found, format_scope_name(found.tensor.op_name))
    clean = format_count(found.tensor.finite_before, "tensor")
    yield f"  clean before it on that rank in that iteration: {clean}"
    if found.source:
        yield f"  {found.source}"
    if found.full_tensors:
        count = format_count(found.full_tensors, "tensor")
        where = f"--rank {found.rank} --iteration {found.iteration}"
        yield f"  {count} of that iteration in full: rankdump ls {root} {where}"


def iter_rank_lines(report: FaultReport, hint: str = "") -> Iterator[str]:
    """Yield sentences about ranks that are lost, had not ended or are missing, and about dropped
    steps and tensors; `hint` says where the stacks of these ranks are.
    """
    for end in report.ends:
        if end.state is SessionState.LOST:
            how = f" ({end.ended_by})" if end.ended_by else ""
            yield f"rank {end.rank} is lost{how}; its last step is iteration {end.iteration}"
        elif end.unfinished:
            count = len(end.stacks)
            stacks = f" ({format_count(count, 'stack')}{hint})" if count else ""
            yield f"rank {end.rank} had not ended iteration {end.iteration}{stacks}"
    yield from map(describe_absence, report.absent)
    dropped = format_dropped(report.dropped_steps, report.dropped_tensors)
    if dropped:
        yield f"{dropped} had been dropped because the agent's memory was short"

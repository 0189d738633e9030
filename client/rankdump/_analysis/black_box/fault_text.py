"""Sentences about a fault, for the terminal and for pages. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rankdump._analysis.black_box.fault_report import (
    FaultReport,
    FirstBadValue,
    RankEnd,
    describe_bad_value,
)
from rankdump._core.freeze_record import FrozenCause, describe_absence
from rankdump._core.scope_names import format_scope_name
from rankdump._core.status import SessionState
from rankdump._core.units import format_count


def describe_fault(cause: FrozenCause) -> str:
    """Return a sentence about a cause, with its rank, operator and line of the script."""
    who = f"rank {cause.rank}, " if cause.rank is not None else ""
    where = f"; {cause.side} {cause.slot} of {format_scope_name(cause.op_name)}"
    line = f"; {cause.source}" if cause.source else ""
    about = where if cause.op_name else ""
    return f"{cause.kind.value}, {who}iteration {cause.iteration}: {cause.text}{about}{line}"


def iter_bad_value_lines(found: FirstBadValue, root: str) -> Iterator[str]:
    """Yield the lines about the first value that is not finite."""
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
    """Yield sentences about ranks that are lost, had not ended or are missing, and about what had
    been dropped; `hint` says where their stacks are.
    """
    for end in report.ends:
        if end.state is SessionState.LOST:
            how = f" ({end.ended_by})" if end.ended_by else ""
            yield f"rank {end.rank} is lost{how}; its last step is iteration {end.iteration}"
        elif end.unfinished:
            stacks = _mention_stacks(end, hint)
            yield f"rank {end.rank} had not ended iteration {end.iteration}{stacks}"
    yield from map(describe_absence, report.absent)
    counts = ((report.dropped_steps, "step"), (report.dropped_tensors, "full tensor"))
    dropped = [format_count(count, f"older {what}") for count, what in counts if count]
    if dropped:
        yield f"{' and '.join(dropped)} had been dropped because the agent's memory was short"


def _mention_stacks(end: RankEnd, hint: str) -> str:
    return f" ({format_count(len(end.stacks), 'stack')}{hint})" if end.stacks else ""

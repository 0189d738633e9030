"""Summary of a run at its end: warnings, remarks, and the reason if nothing was dumped, in the
terms of the user's configuration format. Pure: no clock, no disk, no network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rankdump._core.events import UNSEEN_REASON_TEXTS
from rankdump._core.plan import DumpPlan
from rankdump._core.selection import decide_device
from rankdump._recorder.iteration_state import IterationCounters, IterationState
from rankdump._recorder.record_filter import (
    EXCLUSION_KINDS,
    MODEL_KIND,
    RecordFilter,
    UnmatchedEntry,
)


@dataclass(frozen=True, slots=True)
class DialectTerms:
    """Names of configuration keys in a dialect; the defaults are those of `data_dump.json`."""

    operators: str = "kernels"
    sides: str = "input_output"
    iterations: str = "iteration"
    lists: str = "the plan"
    """Place of the lists that select operators, or operators of a model."""


_MAX_NAMED_MODELS = 5
_CANN_TERMS = {"sides": "dump_mode", "iterations": "dump_step"}
_TERMS_BY_DIALECT = {
    "acl": DialectTerms(operators="dump_list", lists="dump_list", **_CANN_TERMS),
    "tf": DialectTerms(operators="dump_layer", lists="dump_layer", **_CANN_TERMS),
}


def select_dialect_terms(plan: DumpPlan) -> DialectTerms:
    """Return the terms of a plan's dialect."""
    return _TERMS_BY_DIALECT.get(plan.dialect, DialectTerms())


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Counts and states of a rank's run that explain an empty dump."""

    device: int
    iterations_seen: int
    iterations_armed: int
    last_iteration: int
    operators_seen: bool
    tensors_kept: int
    tensors_lost: int = 0
    operators_selected: bool = True
    left_out: bool = False
    """Whether the plan excluded a tensor of a selected operator."""
    marked: bool = False
    switched: bool = False
    """Whether the script used `dump_start` or `dump_stop`."""
    refused: bool = False
    """Whether the agent rejected the rank, so that an empty dump is not due to the plan."""
    unseen_collectives: Mapping[str, int] = field(default_factory=dict[str, int])
    """Collectives that are not in the execution order, by reason; 0 if the number is unknown."""
    models: Sequence[str] = ()
    """Models of which operators ran, where the plan names models."""


@dataclass(frozen=True, slots=True)
class EmptyDumpCause:
    """Reason why nothing was dumped."""

    reason: str
    fault: bool = True
    """Whether this is a fault; False if the plan records only failures, and none occurred."""


def explain_empty_dump(plan: DumpPlan, run: RunFacts) -> EmptyDumpCause | None:
    """Return why a run dumped nothing; None if it dumped something."""
    if run.tensors_kept:
        return None
    if run.refused:
        return EmptyDumpCause("the agent rejected this rank")
    if plan.selection.iterations.spans == ():
        return None
    early = _explain_no_iteration(plan, run)
    if early:
        return EmptyDumpCause(early)
    if not run.operators_seen:
        return EmptyDumpCause(
            "no operator was observed: call rankdump.attach(model) with the model that runs"
        )
    if not run.operators_selected:
        return EmptyDumpCause(_explain_no_match(plan, run))
    if run.tensors_lost:
        return EmptyDumpCause(
            f"every one of the {run.tensors_lost} tensors that the plan selects was lost"
        )
    if run.left_out:
        words = "the plan excludes every tensor of the operators that it selects"
        return EmptyDumpCause(words, fault=False)
    if plan.selection.trigger == "overflow":
        return EmptyDumpCause("no overflow occurred: every output was finite", fault=False)
    if plan.selection.trigger == "exception":
        words = (
            "no operator was observed to raise; errors in computing gradients are not traced to one"
        )
        return EmptyDumpCause(words, fault=False)
    return EmptyDumpCause("the operators that the plan selects had no tensor with elements")


def _explain_no_iteration(plan: DumpPlan, run: RunFacts) -> str:
    device = decide_device(plan, run.device)
    if not device.accepted:
        return device.reason
    if not run.iterations_seen:
        return "no iteration ran"
    if run.iterations_armed:
        return ""
    if run.switched:
        return "dump_stop() was called, and no dump_start() after it"
    ran = f"the {run.iterations_seen} iterations that ran, up to {run.last_iteration}"
    key = select_dialect_terms(plan).iterations
    return f'{key} "{plan.selection.iterations.text}" selects none of {ran}'


def _explain_no_match(plan: DumpPlan, run: RunFacts) -> str:
    words, marked = select_dialect_terms(plan), plan.selection.operators.marked
    if marked and not run.marked:
        return "dump_mode 2 dumps what set_dump() marks, but set_dump() marked nothing"
    chosen = "set_dump()" if marked else words.operators
    return f"{chosen} and {words.sides} match no operator that ran"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Messages about a run at its end."""

    warnings: tuple[str, ...]
    """Messages that need the user's attention."""
    remarks: tuple[str, ...]
    """Messages about expected results."""
    notes: tuple[str, ...]
    """All messages, as they are sent to the agent."""


def make_run_facts(
    device: int,
    iteration_state: IterationState,
    selection: RecordFilter,
    counters: IterationCounters,
    *,
    refused: bool,
    unseen_collectives: Mapping[str, int],
) -> RunFacts:
    """Return the facts of a run."""
    return RunFacts(
        device=device,
        iterations_seen=iteration_state.iterations_seen,
        iterations_armed=iteration_state.iterations_armed,
        last_iteration=iteration_state.iteration,
        operators_seen=selection.has_decided,
        tensors_kept=counters.kept_tensors,
        tensors_lost=sum(counters.losses_by_reason.values()),
        operators_selected=selection.has_selected,
        left_out=selection.has_excluded,
        marked=selection.has_marks,
        switched=iteration_state.switched,
        refused=refused,
        unseen_collectives=unseen_collectives,
        models=tuple(selection.models),
    )


def summarize_run(
    plan: DumpPlan,
    run: RunFacts,
    unmatched: Sequence[UnmatchedEntry],
    *,
    retired_in: int | None,
    overhead: str = "",
    unmatched_rules: Sequence[str] = (),
    rule_notes: Sequence[str] = (),
    replay_notes: Sequence[str] = (),
) -> RunSummary:
    """Return the messages about a run, given the entries of lists that no operator matched.

    `overhead` says what was kept of how many iterations if the plan limits the overhead.
    `unmatched_rules` has a sentence for each watch rule that matches no tensor. `rule_notes` and
    `replay_notes` were logged when they were made, so they only go to the agent.
    """
    # If no operator was seen, an unmatched entry is no fault of the entry.
    could_match = run.operators_seen and not run.refused
    entries = unmatched if could_match else ()
    unused = [_describe_unused(plan, entry, run.models) for entry in entries]
    unused += unmatched_rules
    warnings, remarks, notes = list(unused), list[str](), [*unused, *rule_notes, *replay_notes]
    cause = explain_empty_dump(plan, run)
    if cause is not None:
        notes.insert(0, cause.reason)
        if cause.fault:
            warnings.insert(0, f"nothing was dumped: {cause.reason}")
        else:
            remarks.append(cause.reason)
    if run.unseen_collectives:
        unseen = describe_unseen(run.unseen_collectives)
        warnings.append(unseen)
        notes.append(unseen)
    if retired_in is not None:
        limit = plan.selection.overflow_limit
        reached = (
            f"overflow_number {limit} was reached: nothing is dumped after iteration {retired_in}"
        )
        remarks.append(reached)
        notes.append(reached)
    if overhead:
        remarks.append(overhead)
        notes.append(overhead)
    return RunSummary(tuple(warnings), tuple(remarks), tuple(notes))


def describe_unseen(counts: Mapping[str, int]) -> str:
    """Return a sentence about the collectives that are not in the execution order."""
    parts = [
        f"{f'{count} collectives' if count else 'collectives'} ({UNSEEN_REASON_TEXTS[reason]})"
        for reason, count in sorted(counts.items())
    ]
    return f"not in the execution order: {', '.join(parts)}"


def _describe_unused(plan: DumpPlan, entry: UnmatchedEntry, models: Sequence[str]) -> str:
    """Return a message about an unmatched entry in the terms of the dialect.

    `Unused Kernel in json` is MindSpore's own warning (`DumpJsonParser::PrintUnusedKernel`).
    """
    text = entry.text
    if entry.kind == "kernels" and not entry.model:
        return f"no operator that ran matches an entry of kernels: Unused Kernel in json: {text}"
    lists = select_dialect_terms(plan).lists
    if entry.kind == MODEL_KIND:
        ran = ", ".join(models[:_MAX_NAMED_MODELS])
        return f"{lists} names model_name {text}, of which no operator ran; models that ran: {ran}"
    model = f" of model {entry.model}" if entry.model else ""
    who = "selected tensor" if entry.kind in EXCLUSION_KINDS else "operator"
    return f"{lists} names {entry.kind} {text}{model}, which no {who} matched"

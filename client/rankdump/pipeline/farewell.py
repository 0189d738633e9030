"""What a rank has to say of a run at its end. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankdump.accounts import Accounts
from rankdump.contract.plan import DumpPlan
from rankdump.filter import Filter, Unmatched
from rankdump.pipeline.cause import Run, why_nothing
from rankdump.pipeline.course import Course
from rankdump.pipeline.wording import wording_of


@dataclass(frozen=True, slots=True)
class Farewell:
    """Sentences about the run."""

    warnings: tuple[str, ...]
    """What the user has to know."""
    remarks: tuple[str, ...]
    """What is as it should be."""
    notes: tuple[str, ...]
    """All of it, as the agent keeps it."""


def run_of(
    device: int, course: Course, selection: Filter, accounts: Accounts, *, refused: bool
) -> Run:
    """Return what came of a run."""
    return Run(
        device=device,
        iterations_seen=course.seen,
        iterations_armed=course.armed_seen,
        last_iteration=course.iteration,
        operators_seen=selection.asked,
        tensors_kept=accounts.kept,
        tensors_lost=sum(accounts.losses.values()),
        operators_selected=selection.selected,
        left_out=selection.left_out,
        marked=selection.marked,
        switched=course.switched,
        refused=refused,
    )


def farewell_of(
    plan: DumpPlan, run: Run, unmatched: Sequence[Unmatched], *, retired_in: int | None
) -> Farewell:
    """Return what there is to say, given the entries of lists that matched nothing."""
    # As long as no operator was asked for, an entry had no chance to match.
    asked = run.operators_seen and not run.refused
    unused = [_unused(plan, entry) for entry in unmatched] if asked else []
    warnings, remarks, notes = list(unused), list[str](), list(unused)
    cause = why_nothing(plan, run)
    if cause is not None:
        notes.insert(0, cause.reason)
        if cause.fault:
            warnings.insert(0, f"nothing was dumped: {cause.reason}")
        else:
            remarks.append(cause.reason)
    if retired_in is not None:
        limit = plan.selection.overflow_limit
        reached = (
            f"overflow_number {limit} was reached: nothing is kept after iteration {retired_in}"
        )
        remarks.append(reached)
        notes.append(reached)
    return Farewell(tuple(warnings), tuple(remarks), tuple(notes))


def _unused(plan: DumpPlan, entry: Unmatched) -> str:
    """Return a sentence with the words that the dialect has for it (mindspore-dump.md 9.2)."""
    text = entry.text
    if entry.kind == "kernels" and not entry.model:
        return f"no operator that ran matches an entry of kernels: Unused Kernel in json: {text}"
    model = f" of model {entry.model}" if entry.model else ""
    return f"{wording_of(plan).lists} names {entry.kind} {text}{model}, which no operator matched"

"""Why a run dumped nothing. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.plan import DumpPlan
from rankdump.contract.selection import device_verdict
from rankdump.pipeline.wording import wording_of


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank's run amounted to, for explaining an empty dump."""

    device: int
    iterations_seen: int
    iterations_armed: int
    last_iteration: int
    operators_seen: bool
    tensors_kept: int
    tensors_lost: int = 0
    operators_selected: bool = True
    left_out: bool = False
    """The plan left a tensor out of an operator that it selects."""
    marked: bool = False
    switched: bool = False
    """The script used `dump_start` or `dump_stop`."""
    refused: bool = False
    """The agent refused the rank: what did not happen after that says nothing of the plan."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why nothing was dumped."""

    reason: str
    fault: bool = True
    """False when an empty dump is what the plan hopes for."""


def why_nothing(plan: DumpPlan, run: Run) -> Cause | None:
    """Return why a run dumped nothing; None when it did dump something."""
    if run.tensors_kept:
        return None
    if run.refused:
        return Cause("the agent refused this rank")
    early = _never_armed(plan, run)
    if early:
        return Cause(early)
    if not run.operators_seen:
        return Cause("no operator was observed: is the model that runs the one given to attach()?")
    if not run.operators_selected:
        return Cause(_selected_nothing(plan, run))
    if run.tensors_lost:
        return Cause(f"every one of the {run.tensors_lost} tensors that the plan selects was lost")
    if run.left_out:
        words = "every tensor of the operators that the plan selects is left out by it"
        return Cause(words, fault=False)
    if plan.selection.trigger == "overflow":
        return Cause("no overflow occurred: every output was finite", fault=False)
    if plan.selection.trigger == "exception":
        words = "no operator was seen to raise; errors in computing gradients are not traced to one"
        return Cause(words, fault=False)
    return Cause("what the plan selects handed over no tensor with elements")


def _never_armed(plan: DumpPlan, run: Run) -> str:
    device = device_verdict(plan, run.device)
    if not device.accepted:
        return device.reason
    if not run.iterations_seen:
        return "no iteration ran"
    if run.iterations_armed:
        return ""
    if run.switched:
        return "dump_stop() was called, and no dump_start() after it"
    ran = f"the {run.iterations_seen} that ran, up to {run.last_iteration}"
    key = wording_of(plan).iterations
    return f'{key} "{plan.selection.iterations.text}" selects none of {ran}'


def _selected_nothing(plan: DumpPlan, run: Run) -> str:
    words, marked = wording_of(plan), plan.selection.operators.marked
    if marked and not run.marked:
        return "dump_mode 2 keeps what set_dump() marks, and it marked nothing"
    chosen = "set_dump()" if marked else words.operators
    return f"{chosen} and {words.sides} match no operator that ran"

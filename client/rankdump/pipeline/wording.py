"""What the user's configuration calls the things that a plan says. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rankdump.contract.plan import DumpPlan


@dataclass(frozen=True, slots=True)
class Wording:
    """The keys of a dialect; by default those of a `data_dump.json`."""

    operators: str = "kernels"
    sides: str = "input_output"
    iterations: str = "iteration"
    lists: str = "the plan"
    """Where an operator is named together with what else it is chosen by, such as a model."""


_CANN = {"sides": "dump_mode", "iterations": "dump_step"}
_WORDINGS = {
    "acl": Wording(operators="dump_list", lists="dump_list", **_CANN),
    "tf": Wording(operators="dump_layer", lists="dump_layer", **_CANN),
}


def wording_of(plan: DumpPlan) -> Wording:
    """Return the words that the author of a plan knows."""
    return _WORDINGS.get(plan.dialect, Wording())

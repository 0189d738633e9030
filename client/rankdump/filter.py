"""Room 2: whether a tensor is kept, and why a run kept none.

Pure: no clock, no disk, no socket; cached per operator.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan
from rankdump.contract.selection import (
    Verdict,
    device_verdict,
    operator_verdict,
    side_verdict,
)
from rankdump.values import Decision

KEEP = Decision(True)
# Call numbers make names; a loop without steps must not grow the cache for ever.
_CACHED_NAMES = 1 << 16


class Filter:
    """A plan's selection of operators and sides, asked by name."""

    def __init__(self, plan: DumpPlan) -> None:
        self._plan = plan
        self.decide = lru_cache(maxsize=_CACHED_NAMES)(self._decide)

    @property
    def asked(self) -> bool:
        """Whether any operator was asked for."""
        return self.decide.cache_info().misses > 0

    def _decide(self, op_name: str, side: Side) -> Decision:
        """Decide on the tensors on one side of an operator."""
        verdict = side_verdict(self._plan, side)
        if verdict.accepted:
            verdict = operator_verdict(self._plan.selection.operators, _matched_name(op_name))
        return _decision(verdict)


def size_decision(byte_count: int) -> Decision:
    """Decide on a tensor by its size: MindSpore writes nothing for one without elements."""
    return KEEP if byte_count else Decision(False, "it has no elements")


def _matched_name(op_name: str) -> str:
    # A gradient or a recomputed call is selected together with the operator it belongs to.
    for scope in ("Gradients/", "Recompute/"):
        if op_name.startswith(scope):
            return op_name[len(scope) :]
    return op_name


def _decision(verdict: Verdict) -> Decision:
    return KEEP if verdict.accepted else Decision(False, verdict.reason)


@dataclass(frozen=True, slots=True)
class Run:
    """What a rank's run amounted to, for explaining an empty dump."""

    device: int
    iterations_seen: int
    iterations_armed: int
    last_iteration: int
    operators_seen: bool
    tensors_kept: int


def why_nothing(plan: DumpPlan, run: Run) -> str:
    """Return why a run dumped nothing; empty when it did dump something."""
    if run.tensors_kept:
        return ""
    device = device_verdict(plan, run.device)
    if not device.accepted:
        return device.reason
    if not run.iterations_seen:
        return "no iteration ran"
    if not run.iterations_armed:
        ran = f"the {run.iterations_seen} that ran, up to {run.last_iteration}"
        return f'iteration "{plan.selection.iterations.text}" selects none of {ran}'
    if not run.operators_seen:
        return "no operator was observed: is the model that runs the one given to attach()?"
    return "kernels and input_output match no operator that ran"

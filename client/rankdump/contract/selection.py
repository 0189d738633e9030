"""Whether a plan selects a device, an iteration or an operator, and why not. Pure.

Rank and agent ask the same questions here: the rank to save the work, the agent to have the
last word.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan, Operators


@dataclass(frozen=True, slots=True)
class Verdict:
    """A decision and its reason; the reason is empty only when the answer is yes."""

    accepted: bool
    reason: str = ""


YES = Verdict(True)


def device_verdict(plan: DumpPlan, device: int) -> Verdict:
    """Decide on a rank by its local device id."""
    devices = plan.selection.devices
    if devices is None or device in devices:
        return YES
    listed = ", ".join(map(str, devices))
    return Verdict(False, f"support_device [{listed}] excludes this rank's device {device}")


def iteration_verdict(plan: DumpPlan, iteration: int) -> Verdict:
    """Decide on an iteration, counted from 0."""
    if iteration in plan.selection.iterations:
        return YES
    text = plan.selection.iterations.text
    return Verdict(False, f'iteration "{text}" does not include {iteration}')


def side_verdict(plan: DumpPlan, side: Side) -> Verdict:
    """Decide on inputs or outputs as a whole."""
    wanted = plan.selection.inputs if side is Side.INPUT else plan.selection.outputs
    return YES if wanted else Verdict(False, f"input_output leaves {side.value}s out")


def operator_verdict(operators: Operators, op_name: str) -> Verdict:
    """Decide on an operator by its full scope name; a parameter's name is its own.

    The order of the tests and the meaning of each class are MindSpore's (MatchKernel). A gradient
    or a recomputed call is selected by its own name, and together with its operator.
    """
    if operators.everything or operators.marked:
        # What a script marked is known in its own process alone.
        return YES
    either = (op_name, matched_name(op_name))
    if any(re.fullmatch(pattern, name) for pattern in operators.patterns for name in either):
        return YES
    if any(name in operators.names for name in either):
        return YES
    kind = type_in(op_name).lower()
    if any(wanted.lower() in kind for wanted in operators.types):
        return YES
    return Verdict(False, "kernels do not name it")


def matched_name(op_name: str) -> str:
    """Return the name of the operator that a gradient or a recomputed call belongs to."""
    for scope in ("Gradients/", "Recompute/"):
        if op_name.startswith(scope):
            return op_name[len(scope) :]
    return op_name


def type_in(op_name: str) -> str:
    """Return the type inside a scope name: after the last `/`, up to the last `-`."""
    last = op_name.rpartition("/")[2]
    head, dash, _ = last.rpartition("-")
    return head if dash else last

"""Whether a plan selects a device, an iteration or an operator, and why not. Pure.

Rank and agent ask the same questions here: the rank to save the work, the agent to have the
last word.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankdump.contract.key import Side, sanitised
from rankdump.contract.plan import DumpPlan, Excluded, Operators, Watched

GRADIENTS = "Gradients/"
"""In front of the name of what belongs to a backward."""
_RECOMPUTED = "Recompute/"
_NETWORK = "Default/network-"
_TO = "_To_"
_MOST_SPLITS = 64
"""A name with more ways to be two is none of ours."""


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

    What a script marked, and where its program stands, is known in its own process alone.
    """
    if operators.everything or operators.marked or operators.ranges:
        return YES
    return listed_verdict(operators, op_name)


def listed_verdict(operators: Operators, op_name: str) -> Verdict:
    """Decide on an operator by the lists alone.

    The order of the tests and the meaning of each class are MindSpore's (MatchKernel). A gradient
    or a recomputed call is selected by its own name, and together with its operator; expressions
    look at its own name alone.
    """
    if any(re.fullmatch(pattern, op_name) for pattern in operators.patterns):
        return YES
    either = (op_name, matched_name(op_name))
    if named_in(operators.names, *either) if operators.spelt else _within(operators.names, either):
        return YES
    kind = type_in(op_name).lower()
    if any(wanted.lower() in kind for wanted in operators.types):
        return YES
    return Verdict(False, "kernels do not name it")


def exclusion_verdict(
    operators: Operators, op_type: str, op_name: str, side: Side, slot: int
) -> Verdict:
    """Decide on one tensor of a selected operator; a gradient goes with its operator."""
    if not operators.excludes:
        return YES
    position = f"{side.value}{slot}"
    by_type = any(_at(each, position) for each in operators.without_types if each.name == op_type)
    names = [each.name for each in operators.without_names if _at(each, position)]
    if by_type or named_in(names, op_name, matched_name(op_name)):
        return Verdict(False, f"{position} of it is excluded")
    return YES


def watch_verdict(watched: Watched, op_name: str) -> Verdict:
    """Decide on a watched operator's outputs, also by the name that `watch_name` gave them."""
    if named_in(watched.nodes, op_name):
        return YES
    parts = op_name.split(_TO, _MOST_SPLITS)
    for at in range(1, len(parts)):
        layer, node = _TO.join(parts[:at]), _TO.join(parts[at:])
        of_layer = not watched.layers or named_in(watched.layers, layer)
        if of_layer and named_in(watched.nodes, node):
            return YES
    return Verdict(False, "it is not watched")


def watch_name(layer: str, node: str) -> str:
    """Return the name of a watched operator's outputs, read again after a layer."""
    return f"{layer}{_TO}{node}"


def named_in(entries: Collection[str], *op_names: str) -> bool:
    """Return whether any entry means one of the operators, spelt in any way."""
    return bool(entries) and any(_within(entries, spellings(name)) for name in op_names)


@lru_cache(maxsize=1 << 12)
def spellings(op_name: str) -> tuple[str, ...]:
    """Return what an operator may be called: by its full scope name first, and as files spell it.

    One of a network also by the scope of its module, with or without `Default/`, and by its path:

    >>> spellings("Default/network-Net/layer1-Sequential/0-Conv2d/Conv2d-op0")[3:]
    ('network-Net/layer1-Sequential/0-Conv2d', 'layer1.0')
    """
    found = [op_name, sanitised(op_name)]
    if op_name.startswith(_NETWORK) and "/" in op_name[len(_NETWORK) :]:
        whole = op_name.rpartition("/")[0]
        scope = whole.removeprefix("Default/")
        path = [component.rpartition("-")[0] for component in scope.split("/")[1:]]
        found += [whole, scope]
        if path and all(path):
            found.append(".".join(path))
    return tuple(found)


def matched_name(op_name: str) -> str:
    """Return the name of the operator that a gradient or a recomputed call belongs to."""
    for scope in (GRADIENTS, _RECOMPUTED):
        if op_name.startswith(scope):
            return op_name[len(scope) :]
    return op_name


def type_in(op_name: str) -> str:
    """Return the type inside a scope name: after the last `/`, up to the last `-`."""
    last = op_name.rpartition("/")[2]
    head, dash, _ = last.rpartition("-")
    return head if dash else last


def _within(entries: Collection[str], names: Sequence[str]) -> bool:
    return any(name in entries for name in names)


def _at(excluded: Excluded, position: str) -> bool:
    return not excluded.positions or position in excluded.positions

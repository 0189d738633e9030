"""Decisions on a plan: whether it selects a device, an iteration, an operator or a tensor, and if
not, why; and the grammar of `iteration` (MindSpore 2.3, Dump guide): `all`, or numbers and ranges
joined by `|`. Pure.

Rank and agent make the same decisions here: those of the rank save work, those of the agent are
final. In the text of `iteration` only the characters are checked; a segment that no iteration can
match is accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from rankdump._core.plan import (
    DumpPlan,
    IterationSelection,
    OperatorSelection,
    TensorExclusion,
    WatchedOperators,
)
from rankdump._core.record import TensorSide, sanitize_name

GRADIENTS_PREFIX = "Gradients/"
"""Prefix of the names of operators and tensors of a backward pass."""
OPTIMIZER_PREFIX = "Optimizer/"
"""Prefix of the names of optimizer states."""
OPTIMIZER_STATE_TYPE = "OptimizerState"
"""Operator type of optimizer states, which their names do not contain."""
RECOMPUTED_PREFIX = "Recompute/"
"""Prefix of the name of a call that activation checkpointing repeats."""
_NETWORK_PREFIX = "Default/network-"
_WATCH_SEPARATOR = "_To_"
_MAX_SPLITS = 64
"""Maximum number of ways to split a watched name that are tried; names made by `make_watch_name`
have fewer.
"""


@dataclass(frozen=True, slots=True)
class SelectionVerdict:
    """A decision and its reason; the reason may be empty only if the decision is yes."""

    accepted: bool
    reason: str = ""


ACCEPTED_VERDICT = SelectionVerdict(True)


def decide_device(plan: DumpPlan, device: int) -> SelectionVerdict:
    """Decide whether a rank is selected, by its local device id."""
    devices = plan.selection.devices
    if devices is None or device in devices:
        return ACCEPTED_VERDICT
    listed = ", ".join(map(str, devices))
    return SelectionVerdict(
        False, f"support_device [{listed}] excludes this rank's device {device}"
    )


def decide_iteration(plan: DumpPlan, iteration: int) -> SelectionVerdict:
    """Decide whether an iteration is selected; iterations are counted from 0."""
    if iteration in plan.selection.iterations:
        return ACCEPTED_VERDICT
    text = plan.selection.iterations.text
    return SelectionVerdict(False, f'iteration "{text}" does not include {iteration}')


def decide_side(plan: DumpPlan, side: TensorSide) -> SelectionVerdict:
    """Decide whether any inputs, or any outputs, are selected."""
    wanted = plan.selection.inputs if side is TensorSide.INPUT else plan.selection.outputs
    return (
        ACCEPTED_VERDICT
        if wanted
        else SelectionVerdict(False, f"input_output excludes tensors of the {side.value} side")
    )


def decide_operator(operators: OperatorSelection, op_name: str) -> SelectionVerdict:
    """Decide whether an operator is selected, by its full scope name; a parameter is selected by
    its own name.

    Marks of a script, and the position in its program, are known only in the script's process.
    """
    if operators.everything or operators.marked or operators.ranges:
        return ACCEPTED_VERDICT
    return decide_listed_operator(operators, op_name)


def decide_listed_operator(operators: OperatorSelection, op_name: str) -> SelectionVerdict:
    """Decide whether the lists alone select an operator.

    The order of the tests and the meaning of each list are MindSpore's (MatchKernel). A gradient or
    a recomputed call is selected by its own name, and also together with its operator; regular
    expressions are matched with its own name only.
    """
    if any(re.fullmatch(pattern, op_name) for pattern in operators.patterns):
        return ACCEPTED_VERDICT
    either = (op_name, strip_scope_prefix(op_name))
    if (
        is_named_in(operators.names, *either)
        if operators.spelt
        else _has_any(operators.names, either)
    ):
        return ACCEPTED_VERDICT
    kinds = [extract_op_type(op_name).lower()]
    if op_name.startswith(OPTIMIZER_PREFIX):
        kinds.append(OPTIMIZER_STATE_TYPE.lower())
    if any(wanted.lower() in kind for wanted in operators.types for kind in kinds):
        return ACCEPTED_VERDICT
    return SelectionVerdict(False, "kernels does not select the operator")


def names_operators(operators: OperatorSelection) -> bool:
    """Return whether operators are selected individually: by a list, not as a whole or by a mark.

    Tensors of collectives are kept only then: a plan that selects everything means the operators of
    the network.
    """
    return not (operators.everything or operators.marked)


def decide_exclusion(
    operators: OperatorSelection, op_type: str, op_name: str, side: TensorSide, slot: int
) -> SelectionVerdict:
    """Decide whether a tensor of a selected operator is excluded; a gradient follows
    its operator.
    """
    if not operators.has_exclusions:
        return ACCEPTED_VERDICT
    position = f"{side.value}{slot}"
    by_type = any(
        _is_position_excluded(each, position)
        for each in operators.without_types
        if each.name == op_type
    )
    names = [each.name for each in operators.without_names if _is_position_excluded(each, position)]
    if by_type or is_named_in(names, op_name, strip_scope_prefix(op_name)):
        return SelectionVerdict(False, f"{position} of the operator is excluded")
    return ACCEPTED_VERDICT


def decide_watched_operator(watched: WatchedOperators, op_name: str) -> SelectionVerdict:
    """Decide whether a watched operator's outputs are kept; `op_name` may be a name of
    `make_watch_name`.
    """
    if is_named_in(watched.nodes, op_name):
        return ACCEPTED_VERDICT
    parts = op_name.split(_WATCH_SEPARATOR, _MAX_SPLITS)
    for at in range(1, len(parts)):
        layer, node = _WATCH_SEPARATOR.join(parts[:at]), _WATCH_SEPARATOR.join(parts[at:])
        of_layer = not watched.layers or is_named_in(watched.layers, layer)
        if of_layer and is_named_in(watched.nodes, node):
            return ACCEPTED_VERDICT
    return SelectionVerdict(False, "the operator is not watched")


def make_watch_name(layer: str, node: str) -> str:
    """Return the name of a watched operator's outputs that were read again after a layer."""
    return f"{layer}{_WATCH_SEPARATOR}{node}"


def is_named_in(entries: Collection[str], *op_names: str) -> bool:
    """Return whether any entry names one of the operators, in any of its spellings."""
    return bool(entries) and any(_has_any(entries, list_spellings(name)) for name in op_names)


@lru_cache(maxsize=1 << 12)
def list_spellings(op_name: str) -> tuple[str, ...]:
    """Return the spellings of an operator's name: first its full scope name, then that of files.

    An operator of a network also has the scope of its module, with or without `Default/`, and its
    path:

    >>> list_spellings("Default/network-Net/layer1-Sequential/0-Conv2d/Conv2d-op0")[3:]
    ('network-Net/layer1-Sequential/0-Conv2d', 'layer1.0')
    """
    found = [op_name, sanitize_name(op_name)]
    if op_name.startswith(_NETWORK_PREFIX) and "/" in op_name[len(_NETWORK_PREFIX) :]:
        whole = op_name.rpartition("/")[0]
        scope = whole.removeprefix("Default/")
        path = [component.rpartition("-")[0] for component in scope.split("/")[1:]]
        found += [whole, scope]
        if path and all(path):
            found.append(".".join(path))
    return tuple(found)


def strip_scope_prefix(op_name: str) -> str:
    """Return the name of the operator that a gradient or a recomputed call belongs to."""
    for scope in (GRADIENTS_PREFIX, RECOMPUTED_PREFIX):
        if op_name.startswith(scope):
            return op_name[len(scope) :]
    return op_name


def has_scope_prefix(op_name: str, prefix: str) -> bool:
    """Return whether a name begins with a scope prefix, which may be spelled as in file names.

    >>> has_scope_prefix("Gradients_fc_weight", "Gradients/")
    True
    >>> has_scope_prefix("Gradients_fc.weight", "Gradients/")
    False
    """
    if op_name.startswith(prefix):
        return True
    return op_name.startswith(sanitize_name(prefix)) and op_name == sanitize_name(op_name)


def extract_op_type(op_name: str) -> str:
    """Return the operator type in a scope name: the text after the last `/`, up to the last `-`."""
    last = op_name.rpartition("/")[2]
    head, dash, _ = last.rpartition("-")
    return head if dash else last


def _has_any(entries: Collection[str], names: Sequence[str]) -> bool:
    return any(name in entries for name in names)


def _is_position_excluded(excluded: TensorExclusion, position: str) -> bool:
    return not excluded.positions or position in excluded.positions


_ITERATION_CHARACTERS = re.compile(r"[0-9|-]+")
_SEGMENT_PATTERN = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_MAX_DIGITS = len(str((1 << 64) - 1))


def parse_iterations(text: str) -> IterationSelection | None:
    """Return the iterations that a text selects; None if MindSpore would reject the text."""
    if text == "all":
        return IterationSelection()
    if not _ITERATION_CHARACTERS.fullmatch(text):
        return None
    read = map(_parse_segment, text.split("|"))
    return IterationSelection(text, tuple(span for span in read if isinstance(span, tuple)))


def find_idle_segments(text: str) -> dict[str, str]:
    """Return the segments of an accepted text that match no iteration, each with the reason."""
    if text == "all":
        return {}
    read = ((segment, _parse_segment(segment)) for segment in text.split("|"))
    return {segment: found for segment, found in read if isinstance(found, str)}


def _parse_segment(segment: str) -> tuple[int, int] | str:
    """Return first and last iteration of a segment, or the reason why it matches no iteration."""
    if not segment:
        return "is an empty segment"
    found = _SEGMENT_PATTERN.fullmatch(segment)
    if found is None:
        return "is neither a number nor a range"
    low = parse_uint64(found[1])
    high = low if found[2] is None else parse_uint64(found[2])
    if low is None or high is None:
        return "has a number of more than 64 bits"
    return (low, high) if low <= high else "runs backwards"


def parse_uint64(digits: str) -> int | None:
    """Return the number that digits spell; None if it needs more than 64 bits."""
    significant = digits.lstrip("0") or "0"
    if len(significant) > _MAX_DIGITS:
        return None
    number = int(significant)
    return number if number < 1 << 64 else None

"""Names of operators in MindSpore's style, and the slot of every argument of a call. Pure: no
clock, no disk, no import of torch or mindspore.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, cast

PARAMETER_TYPE = "Parameter"
"""Operator type of weights and of their gradients."""

_GRADIENTS = "Gradients/"

MAX_DEPTH = 32
"""Depth of nesting from which on a container counts as one leaf."""


@dataclass(frozen=True, slots=True)
class OperatorScope:
    """Scope: position of an operator in the network, without the number of its call."""

    path: str
    """Path of the scope, such as `network-Net/conv1-Conv2d`."""
    op_type: str

    def __hash__(self) -> int:
        # Python caches the hash of a string, and no two scopes have the same path.
        return hash(self.path)

    def call_names(self, number: int) -> OperatorCallNames:
        """Return the names of a call."""
        return _make_names(self.path, self.op_type, number)

    def forward_name(self, number: int) -> str:
        """Return the name of a forward call."""
        return self.call_names(number).forward


class OperatorCallNames(NamedTuple):
    """Names of one call of an operator."""

    forward: str
    recomputation: str
    """Name of the call's recomputation within the backward."""
    gradient: str
    """Name of the call's backward."""


# Names are the same in every iteration. The cache is bounded because a training loop that never
# calls `step` makes new names without end.
@lru_cache(maxsize=1 << 14)
def _make_names(path: str, op_type: str, number: int) -> OperatorCallNames:
    forward = f"Default/{path}/{op_type}-op{number}"
    return OperatorCallNames(forward, f"Recompute/{forward}", make_gradient_name(forward))


def make_scope(parts: Sequence[tuple[str, str]]) -> OperatorScope:
    """Return the scope of a module from the pairs (name, class) on the path to it, root first.

    >>> make_scope([("", "Net"), ("conv1", "Conv2d")]).forward_name(0)
    'Default/network-Net/conv1-Conv2d/Conv2d-op0'
    """
    named = [("network", parts[0][1]), *parts[1:]]
    path = "/".join(f"{_clean_component(name)}-{_clean_component(kind)}" for name, kind in named)
    return OperatorScope(path, _clean_component(parts[-1][1]))


def make_gradient_name(op_name: str) -> str:
    """Return the name of the backward of an operator, or of the gradient of a parameter."""
    return f"{_GRADIENTS}{op_name}"


def is_gradient(op_name: str) -> bool:
    """Return whether a name belongs to a backward."""
    return op_name.startswith(_GRADIENTS)


def _clean_component(text: str) -> str:
    # A slash inside a component would look like two components.
    return text.replace("/", "_")


class CallLeaf(NamedTuple):
    """One argument of a call, or one part of its result."""

    slot: int
    """Number of the leaf among all leaves, tensors or not, so that it does not change with the type
    of a value.
    """
    argument: str
    value: object


def list_call_leaves(args: Sequence[object], kwargs: Mapping[str, object]) -> list[CallLeaf]:
    """Return the leaves of a call's arguments: positional arguments first, then keyword
    arguments.
    """
    found: list[CallLeaf] = []
    for index, value in enumerate(args):
        name = _POSITIONAL[index] if index < len(_POSITIONAL) else f"args.{index}"
        _collect_leaves(value, name, found, ())
    for name, value in kwargs.items():
        _collect_leaves(value, f"kwargs.{name}", found, ())
    return found


def list_result_leaves(result: object) -> list[CallLeaf]:
    """Return the leaves of a call's result."""
    if type(result) in _LEAF_TYPES:
        return [CallLeaf(0, "out", result)]
    found: list[CallLeaf] = []
    _collect_leaves(result, "out", found, ())
    return found


_POSITIONAL = tuple(f"args.{index}" for index in range(16))
_LEAF_TYPES: set[type] = {int, float, bool, str, type(None)}
"""Classes whose values have no parts; classes of frameworks are added when they are first seen."""
_MAX_LEAF_TYPES = 1000


def _collect_leaves(
    value: object, argument: str, found: list[CallLeaf], path: tuple[int, ...]
) -> None:
    if type(value) in _LEAF_TYPES or len(path) >= MAX_DEPTH or id(value) in path:
        parts = None
    else:
        parts = list_parts(value)
    if parts is None:
        found.append(CallLeaf(len(found), argument, value))
        return
    for name, part in parts:
        _collect_leaves(part, f"{argument}.{name}", found, (*path, id(value)))


def list_parts(value: object) -> list[tuple[str, object]] | None:
    """Return the named parts of a container; None if the value is a leaf."""
    if type(value) in _LEAF_TYPES:
        return None
    if isinstance(value, (tuple, list)):
        items = cast("Sequence[object]", value)
        fields: Sequence[object] = getattr(items, "_fields", ())
        names = fields if len(fields) == len(items) else range(len(items))
        return [(str(name), item) for name, item in zip(names, items, strict=True)]
    # This test comes before that for Mapping: a ModelOutput is both, and as a mapping it hides
    # fields that are None.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        declared = dataclasses.fields(value)
        return [(field.name, getattr(value, field.name, None)) for field in declared]
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, Any]", value).items()
        return [(_format_key(key, index), part) for index, (key, part) in enumerate(pairs)]
    if len(_LEAF_TYPES) < _MAX_LEAF_TYPES and not isinstance(value, type):
        _LEAF_TYPES.add(type(value))
    return None


def _format_key(key: object, index: int) -> str:
    """Return a text for a key: the key's position if its own text could be expensive or differ
    between runs.
    """
    return str(key) if isinstance(key, (str, int)) else str(index)

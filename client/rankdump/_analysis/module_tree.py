"""Modules of a model as a hierarchy, from the names of its operators, with the worst of what is in
each. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rankdump._core.scope_names import format_scope_name

_OPERATOR = re.compile(r"-op[0-9]+")
_LARGE = 65504.0
"""The largest number of float16: what is above overflows in mixed precision."""


class TensorSeverity(str, Enum):
    """What the statistics of a tensor say."""

    NONFINITE = "nonfinite"
    LARGE = "large"
    """Above the largest number of float16."""
    NONE = "none"
    """Nothing stands out, or nothing is known."""


class OperatorTensor(NamedTuple):
    """One tensor of an operator, over some iterations and ranks."""

    name: str
    op_type: str
    side: str
    slot: int
    dtype: str
    shape: tuple[int, ...]
    layouts: tuple[str, ...]
    norm: float | None
    maximum: float | None
    minimum: float | None
    nonfinite: int
    """Times that it was not finite."""
    times: int
    """How often it was measured: iterations times ranks."""

    @property
    def severity(self) -> TensorSeverity:
        """What its statistics say."""
        if self.nonfinite:
            return TensorSeverity.NONFINITE
        sizes = [abs(each) for each in (self.maximum, self.minimum) if each is not None]
        is_large = bool(sizes) and max(sizes) > _LARGE
        return TensorSeverity.LARGE if is_large else TensorSeverity.NONE


@dataclass(slots=True)
class ModuleNode:
    """A module, or an operator where it has no modules in it."""

    name: str
    path: str
    """Names from the root on, joined by `/`."""
    children: dict[str, ModuleNode] = field(default_factory=dict[str, "ModuleNode"])
    tensors: list[OperatorTensor] = field(default_factory=list[OperatorTensor])
    tensor_count: int = 0
    nonfinite: int = 0
    """Tensors that were not finite at some time."""
    large: int = 0

    @property
    def severity(self) -> TensorSeverity:
        """The worst of its tensors."""
        if self.nonfinite:
            return TensorSeverity.NONFINITE
        return TensorSeverity.LARGE if self.large else TensorSeverity.NONE


def make_module_tree(tensors: Iterable[OperatorTensor]) -> ModuleNode:
    """Return the root of the hierarchy; modules are in the order of their first tensor."""
    root = ModuleNode("", "")
    for tensor in tensors:
        node = root
        _count(node, tensor)
        for part in split_module_path(tensor.name):
            path = f"{node.path}/{part}" if node.path else part
            node = node.children.setdefault(part, ModuleNode(part, path))
            _count(node, tensor)
        node.tensors.append(tensor)
    return root


def split_module_path(name: str) -> list[str]:
    """Return the modules of an operator from the outermost on, and the operator or parameter.

    >>> split_module_path("Default/network-Net/encoder-Encoder/0-Linear/Linear-op0")
    ['encoder', '0', 'Linear-op0']
    >>> split_module_path("Gradients/encoder.0.weight")
    ['Gradients', 'encoder', '0', 'weight']
    """
    *scopes, operator = format_scope_name(name).split("/")
    modules = [part for scope in scopes for part in scope.split(".")]
    # A parameter has the path of its module in its name.
    return [*modules, *([operator] if _OPERATOR.search(operator) else operator.split("."))]


def find_module(root: ModuleNode, path: str) -> ModuleNode | None:
    """Return the module with a path; None when there is none."""
    node = root
    for part in path.split("/") if path else ():
        if part not in node.children:
            return None
        node = node.children[part]
    return node


def _count(node: ModuleNode, tensor: OperatorTensor) -> None:
    node.tensor_count += 1
    node.nonfinite += tensor.severity is TensorSeverity.NONFINITE
    node.large += tensor.severity is TensorSeverity.LARGE

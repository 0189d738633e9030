"""Modules of a model as a hierarchy, built from the names of its operators; each module has the
worst severity of the tensors in it. Pure.
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
"""Largest number of float16; larger values overflow in mixed precision."""


class TensorSeverity(str, Enum):
    """How serious the statistics of a tensor are."""

    NONFINITE = "nonfinite"
    LARGE = "large"
    """The tensor has values above the largest number of float16."""
    NONE = "none"
    """The statistics are inconspicuous, or unknown."""


class OperatorTensor(NamedTuple):
    """One tensor of an operator, summarized over some iterations and ranks."""

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
    """Number of measurements in which the tensor was not finite."""
    times: int
    """Number of measurements: iterations times ranks."""

    @property
    def severity(self) -> TensorSeverity:
        """Severity of the tensor's statistics."""
        if self.nonfinite:
            return TensorSeverity.NONFINITE
        sizes = [abs(each) for each in (self.maximum, self.minimum) if each is not None]
        is_large = bool(sizes) and max(sizes) > _LARGE
        return TensorSeverity.LARGE if is_large else TensorSeverity.NONE


@dataclass(slots=True)
class ModuleNode:
    """A module, or an operator, which has no modules in it."""

    name: str
    path: str
    """Names from the root to this module, joined by `/`."""
    children: dict[str, ModuleNode] = field(default_factory=dict[str, "ModuleNode"])
    tensors: list[OperatorTensor] = field(default_factory=list[OperatorTensor])
    tensor_count: int = 0
    nonfinite: int = 0
    """Number of tensors that were not finite at some time."""
    large: int = 0

    @property
    def severity(self) -> TensorSeverity:
        """Worst severity of the tensors in the module."""
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
    """Return the modules that contain an operator, from the outermost one on, and the operator or
    parameter.

    >>> split_module_path("Default/network-Net/encoder-Encoder/0-Linear/Linear-op0")
    ['encoder', '0', 'Linear-op0']
    >>> split_module_path("Gradients/encoder.0.weight")
    ['Gradients', 'encoder', '0', 'weight']
    """
    *scopes, operator = format_scope_name(name).split("/")
    modules = [part for scope in scopes for part in scope.split(".")]
    # The name of a parameter contains the path of its module.
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

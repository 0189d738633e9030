"""Graph of operators as a framework describes a network, independent of files. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type and extents of one tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """One frame of the stack that an operator was called from."""

    file: str
    line: int
    function: str
    code: str
    """Text of the line, stripped; empty when not available."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator."""

    name: str
    """Full scope name, as in the keys of its tensors."""
    op_type: str
    inputs: tuple[str, ...] = ()
    """Name of the node or parameter that made each input; empty for one from outside."""
    outputs: tuple[TensorType, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    source: tuple[SourceLine, ...] = ()
    """Outermost frame first."""


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """One weight or constant."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """One network."""

    number: int
    nodes: tuple[GraphNode, ...]
    """In the order in which they run, or in which the framework compiled them."""
    parameters: tuple[GraphParameter, ...] = ()
    compiled: bool = False
    """Whether the order is the framework's own; otherwise it is the observed one."""


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Some nodes of a graph; a large graph is sent in several parts, in order."""

    graph: OperatorGraph
    first: bool
    last: bool

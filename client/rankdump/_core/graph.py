"""Graph of operators as a framework describes a network, independent of file formats.
Pure values.
"""

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
    """One frame of the call stack of an operator."""

    file: str
    line: int
    function: str
    code: str
    """Text of the line without surrounding blanks; empty if not available."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One operator of a graph."""

    name: str
    """Full scope name, as in the keys of its tensors."""
    op_type: str
    inputs: tuple[str, ...] = ()
    """For each input the name of the node or parameter that produced it; empty for an input from
    outside the graph.
    """
    outputs: tuple[TensorType, ...] = ()
    attributes: Mapping[str, str] = field(default_factory=dict[str, str])
    source: tuple[SourceLine, ...] = ()
    """Call stack of the operator, outermost frame first."""


@dataclass(frozen=True, slots=True)
class GraphParameter:
    """One weight or constant."""

    name: str
    type: TensorType


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """The graph of one network."""

    number: int
    nodes: tuple[GraphNode, ...]
    """Operators in the order in which they run, or in which the framework compiled them."""
    parameters: tuple[GraphParameter, ...] = ()
    compiled: bool = False
    """Whether the order is that of the framework's compiler; otherwise it is the observed one."""


@dataclass(frozen=True, slots=True)
class GraphPart:
    """Some nodes of a graph; a large graph is sent in several parts, in order."""

    graph: OperatorGraph
    first: bool
    last: bool

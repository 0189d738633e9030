"""Builder of a rank's graphs from descriptions of operators; splits them into parts that fit into
messages. The first description of a name counts. Never reads a tensor, never writes a file.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rankdump._core.graph import GraphNode, GraphParameter, GraphPart, OperatorGraph

MAX_PART_NODES = 500
MAX_PART_CHARACTERS = 1 << 19
"""Limits of a part, well below the limit of a message."""
# A loop without steps makes names of operators for ever.
MAX_NODES = 1 << 16


class _GraphDraft:
    """One graph so far."""

    def __init__(self) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.parameters: dict[str, GraphParameter] = {}
        self.compiled = False
        self.has_changed = False

    def compile(self, nodes: Sequence[GraphNode]) -> None:
        described, self.nodes = self.nodes, {}
        for node in nodes:
            self.nodes.setdefault(node.name, described.get(node.name, node))
        self.compiled = self.has_changed = True

    def add(self, node: GraphNode) -> None:
        before = self.nodes.get(node.name)
        if self.compiled and (before is None or before.outputs or before.source):
            # A compiled graph has the framework's own nodes, which come without outputs and source
            # lines. So another operator is not part of it, and a node that has one of these was
            # described already.
            return
        if self.compiled or before is None:
            self.nodes[node.name] = node
            self.has_changed = True


class GraphBuilder:
    """The graphs of one rank; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[int, _GraphDraft] = {}

    def add(self, graph: int, node: GraphNode) -> bool:
        """Add an operator; return False if the graph has no space for it."""
        with self._lock:
            draft = self._graphs.setdefault(graph, _GraphDraft())
            if len(draft.nodes) >= MAX_NODES and node.name not in draft.nodes:
                return False
            draft.add(node)
            return True

    def add_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Add a weight or constant."""
        with self._lock:
            draft = self._graphs.setdefault(graph, _GraphDraft())
            if parameter.name not in draft.parameters:
                draft.parameters[parameter.name] = parameter
                draft.has_changed = True

    def set_compiled_order(self, graph: int, nodes: Sequence[GraphNode]) -> None:
        """Set the framework's own order of a graph; descriptions of its nodes complete it."""
        with self._lock:
            self._graphs.setdefault(graph, _GraphDraft()).compile(nodes)

    def take_parts(self) -> list[GraphPart]:
        """Return every graph that changed since the last call, whole, in parts."""
        with self._lock:
            changed = [(n, draft) for n, draft in self._graphs.items() if draft.has_changed]
            graphs = [
                OperatorGraph(
                    number=number,
                    nodes=tuple(draft.nodes.values()),
                    parameters=tuple(draft.parameters.values()),
                    compiled=draft.compiled,
                )
                for number, draft in changed
            ]
            for _, draft in changed:
                draft.has_changed = False
        return [part for graph in graphs for part in split_graph(graph)]


def split_graph(graph: OperatorGraph) -> Iterator[GraphPart]:
    """Yield a graph in parts that each fit into a message; a graph without nodes is one part."""
    named, most = graph.parameters, MAX_PART_NODES
    parameters = (named[at : at + most] for at in range(0, len(named), most))
    pieces = list(zip_longest(_split_nodes(graph.nodes), parameters, fillvalue=()))
    for at, (nodes, some) in enumerate(pieces or [((), ())]):
        piece = OperatorGraph(graph.number, nodes, some, graph.compiled)
        yield GraphPart(piece, first=at == 0, last=at >= len(pieces) - 1)


def _split_nodes(nodes: Sequence[GraphNode]) -> Iterator[tuple[GraphNode, ...]]:
    piece: list[GraphNode] = []
    size = 0
    for node in nodes:
        weight = _count_characters(node)
        if piece and (len(piece) == MAX_PART_NODES or size + weight > MAX_PART_CHARACTERS):
            yield tuple(piece)
            piece, size = [], 0
        piece.append(node)
        size += weight
    if piece:
        yield tuple(piece)


def _count_characters(node: GraphNode) -> int:
    """Return the approximate length of a node as text."""
    lines = sum(len(line.file) + len(line.function) + len(line.code) for line in node.source)
    pairs = sum(len(name) + len(text) for name, text in node.attributes.items())
    return len(node.name) + len(node.op_type) + sum(map(len, node.inputs)) + lines + pairs

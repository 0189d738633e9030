"""The edges of a graph by number: every input leads to a node or to a parameter. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from rankdump.contract.graph import Graph, GraphNode, TensorType

Source: TypeAlias = "int | str"
"""Index of a node, or name of a parameter."""


@dataclass(frozen=True, slots=True)
class Linked:
    """A graph whose inputs all have a source."""

    number: int
    nodes: tuple[GraphNode, ...]
    inputs: tuple[tuple[Source, ...], ...]
    """For each node the source of each input."""
    parameters: dict[str, TensorType | None]
    """By name; None for what came from outside, of which nobody told the type."""

    @property
    def ends(self) -> list[int]:
        """Indices of the nodes whose outputs no other node reads."""
        read = {source for sources in self.inputs for source in sources}
        return [index for index in range(len(self.nodes)) if index not in read]

    def types_of(self, source: Source) -> tuple[TensorType, ...]:
        """Return what a source gives; nothing when that is not known."""
        if isinstance(source, int):
            return self.nodes[source].outputs
        kind = self.parameters[source]
        return () if kind is None else (kind,)


def linked(graph: Graph) -> Linked:
    """Return the graph with its edges.

    MindSpore calls what the network itself is given a parameter too, and so does this: slots keep
    their numbers.
    """
    index = {node.name: at for at, node in enumerate(graph.nodes)}
    parameters: dict[str, TensorType | None] = {}
    for parameter in graph.parameters:
        parameters.setdefault(parameter.name, parameter.type)
    inputs: list[tuple[Source, ...]] = []
    for at, node in enumerate(graph.nodes):
        sources: list[Source] = []
        for slot, name in enumerate(node.inputs):
            source = index.get(name, name) if name else f"outside.{at + 1}.{slot}"
            if isinstance(source, str):
                parameters.setdefault(source, None)
            sources.append(source)
        inputs.append(tuple(sources))
    return Linked(graph.number, graph.nodes, tuple(inputs), parameters)

"""Graphs that arrive in parts, put together again. Pure."""

from __future__ import annotations

from dataclasses import replace

from rankdump.contract.graph import Graph, GraphPart
from rankdumpd.agent.values import Ticket


class GraphParts:
    """The parts of one session that wait for their last; not for several threads."""

    def __init__(self) -> None:
        self._waiting: dict[int, Graph] = {}
        self._tickets: dict[int, list[Ticket]] = {}

    def take(self, ticket: Ticket, part: GraphPart) -> Graph | None:
        """Keep a part; return the graph with all of its nodes when it was the last.

        A first part begins the graph anew: it is described again once it has grown.
        """
        number = part.graph.number
        begun = None if part.first else self._waiting.get(number)
        graph = joined(begun, part.graph) if begun else part.graph
        self._tickets.setdefault(number, []).append(ticket)
        self._waiting[number] = graph
        return self._waiting.pop(number) if part.last else None

    def settled(self, number: int) -> list[Ticket]:
        """Forget the parts of a graph that is in the tree; return their tickets."""
        return self._tickets.pop(number, [])


def joined(graph: Graph, more: Graph) -> Graph:
    """Return the nodes and parameters of both, in order."""
    return replace(
        graph,
        nodes=(*graph.nodes, *more.nodes),
        parameters=(*graph.parameters, *more.parameters),
        compiled=graph.compiled or more.compiled,
    )

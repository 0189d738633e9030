"""The order in which a rank ran the operators of each graph, gathered from its events. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from rankdump.contract.events import EventColumns

_Piece = tuple[npt.NDArray[np.uint64], list[str]]


class ProgramOrder:
    """Events of iterations that are still running; each graph's order is asked for once."""

    def __init__(self, written: Iterable[int] = ()) -> None:
        self._written = set(written)
        self._pieces: dict[int, dict[int, list[_Piece]]] = {}

    @property
    def written(self) -> frozenset[int]:
        """Graphs whose order is in the tree."""
        return frozenset(self._written)

    def take(self, events: EventColumns) -> None:
        """Keep a batch of events."""
        columns = events.columns
        pairs = np.stack((columns["iteration"], columns["graph"].astype(np.uint64)), axis=1)
        for iteration, graph in np.unique(pairs, axis=0).tolist():
            pieces = self._pieces.setdefault(iteration, defaultdict(list))[graph]
            if graph in self._written:
                continue
            chosen = np.flatnonzero((pairs[:, 0] == iteration) & (pairs[:, 1] == graph))
            found: list[int] = columns["name"][chosen].tolist()
            names = [str(events.names[index]) for index in found]
            pieces.append((columns["position"][chosen], names))

    def graphs(self, iteration: int) -> frozenset[int]:
        """Return the graphs that ran in an iteration."""
        return frozenset(self._pieces.get(iteration, ()))

    def unwritten(self, iteration: int) -> dict[int, list[str]]:
        """Return the names in program order of each graph that is not in the tree yet."""
        return {
            graph: _in_order(pieces)
            for graph, pieces in self._pieces.get(iteration, {}).items()
            if graph not in self._written and pieces
        }

    def given(self, graph: int) -> None:
        """Note that the framework's own order of a graph is in the tree, in place of what ran."""
        self._written.add(graph)

    def ended(self, iteration: int) -> None:
        """Forget an iteration and all before it: their graphs are in the tree now."""
        self._written |= self._pieces.get(iteration, {}).keys()
        self._pieces = {i: pieces for i, pieces in self._pieces.items() if i > iteration}


def _in_order(pieces: list[_Piece]) -> list[str]:
    positions = np.concatenate([positions for positions, _ in pieces])
    names = [name for _, some in pieces for name in some]
    # What was told of while it was open is told again when it is complete: the last word counts.
    _, last = np.unique(positions[::-1], return_index=True)
    return [names[len(names) - 1 - index] for index in last.tolist()]

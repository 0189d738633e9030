"""The lines of one graph in an order, and rows of columns, some thousands at a time. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.values import GlobalOrder

_SCAN = 1 << 16


def graphs(order: GlobalOrder) -> list[int]:
    """Return the graphs that an order has lines of, lowest first."""
    found: set[int] = set()
    column = order.columns["graph"]
    for low in range(0, len(order), _SCAN):
        found.update(np.unique(column[low : low + _SCAN]).tolist())
    return sorted(found)


def blocks(order: GlobalOrder, graph: int, size: int) -> Iterator[Column]:
    """Yield the numbers of a graph's lines, in order, at most `size` at once."""
    column = order.columns["graph"]
    for low in range(0, len(order), size):
        lines = low + np.flatnonzero(column[low : low + size] == graph)
        if len(lines):
            yield lines


def rows(*columns: Column) -> Iterator[tuple[int, ...]]:
    """Yield the rows of columns of one length, without a list of all of them."""
    for low in range(0, len(columns[0]), _SCAN):
        lists = [column[low : low + _SCAN].tolist() for column in columns]
        yield from zip(*lists, strict=True)

"""The merged order as lines of a CSV file. Pure.

Operators are nearly all lines: their names are quoted once per iteration, and one operation
formats some thousand lines. A test holds this against `to_line`, which says what a line is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column
from rankdump.contract.order import field, to_line
from rankdumpd.coordinator.publish.blocks import blocks
from rankdumpd.coordinator.values import GlobalOrder

# Larger blocks fall out of the processor's cache.
_BLOCK = 4096
_VARYING = ("rank", "start_us", "end_us", "position", "stream")


def csv_lines(order: GlobalOrder, graph: int, first_position: int) -> Iterator[bytes]:
    """Yield the lines of a graph, some thousand at a time."""
    names = np.array([field(name) for name in order.names], dtype=object)
    form = f"%d,{order.iteration},{graph},OPERATOR,%s,%d,,0,%d,%d,,%d,%d,0,,-1\n"
    for lines in blocks(order, graph, _BLOCK):
        cells = _cells(order, names, lines, first_position)
        yield "".join(_texts(order, lines, form, cells, first_position)).encode()


def _cells(order: GlobalOrder, names: Column, lines: Column, first_position: int) -> list[object]:
    """Return what varies from operator to operator, line by line in one list."""
    columns = order.columns
    varying = [
        (lines + first_position).tolist(),
        names[columns["name"][lines]].tolist(),
        *(columns[column][lines].tolist() for column in _VARYING),
    ]
    cells: list[object] = [None] * (len(varying) * len(lines))
    for at, column in enumerate(varying):
        cells[at :: len(varying)] = column
    return cells


def _texts(
    order: GlobalOrder, lines: Column, form: str, cells: list[object], first_position: int
) -> Iterator[str]:
    width = len(cells) // len(lines)
    call_of = order.columns["call"][lines]
    done = 0
    for at in np.flatnonzero(call_of >= 0).tolist():
        yield form * (at - done) % tuple(cells[width * done : width * at])
        yield to_line(order.call_entry(int(lines[at]) + first_position, int(call_of[at])))
        done = at + 1
    yield form * (len(lines) - done) % tuple(cells[width * done :])

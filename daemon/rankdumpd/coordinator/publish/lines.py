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


def csv_lines(order: GlobalOrder, graph: int, first_position: int) -> Iterator[bytes]:
    """Yield the lines of a graph, some thousand at a time."""
    names = np.array([field(name) for name in order.names], dtype=object)
    for lines in blocks(order, graph, _BLOCK):
        form, cells = _operators(order, names, lines, first_position)
        width = len(cells) // len(lines)
        pieces: list[str] = []
        done = 0
        call_of = order.columns["call"][lines]
        for at in np.flatnonzero(call_of >= 0).tolist():
            pieces.append(form * (at - done) % tuple(cells[width * done : width * at]))
            entry = order.call_entry(int(lines[at]) + first_position, int(call_of[at]))
            pieces.append(to_line(entry))
            done = at + 1
        pieces.append(form * (len(lines) - done) % tuple(cells[width * done :]))
        yield "".join(pieces).encode()


def _operators(
    order: GlobalOrder, names: Column, lines: Column, first_position: int
) -> tuple[str, list[object]]:
    """Return the form of a block's operators, and what varies among them in one list."""
    columns = order.columns
    texts = names[columns["name"][lines]].tolist()
    varying = [(lines + first_position).tolist(), texts]
    parts = ["%d", f"{order.iteration},{int(columns['graph'][lines[0]])},OPERATOR,%s"]
    for column, after in _REST:
        values = columns[column][lines]
        if (values == values[0]).all():
            parts.append(f"{values[0]}{after}")
        else:
            parts.append(f"%d{after}")
            varying.append(values.tolist())
    cells: list[object] = [None] * (len(varying) * len(lines))
    for at, column in enumerate(varying):
        cells[at :: len(varying)] = column
    return ",".join(parts) + "\n", cells


_REST = (
    ("rank", ",,0"),
    ("start_us", ""),
    ("end_us", ","),
    ("position", ""),
    ("stream", ",0,,-1"),
)
"""Columns of an operator's line after its name, and what stands between them."""

"""The merged order as lines of a CSV file. Pure.

Operators are nearly all lines, and are made some thousand at once; a test holds them against
`to_line`, which says what a line is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column
from rankdump.contract.order import field, to_line
from rankdumpd.coordinator.publish.blocks import blocks
from rankdumpd.coordinator.publish.cells import Piece, Texts, dense, digits, laid_out
from rankdumpd.coordinator.values import GlobalOrder

# Larger blocks fall out of the processor's cache.
_BLOCK = 4096


def csv_lines(order: GlobalOrder, graph: int, first_position: int) -> Iterator[bytes]:
    """Yield the lines of a graph, some thousand at a time."""
    names = Texts(map(field, order.names))
    for lines in blocks(order, graph, _BLOCK):
        operators = _operators(order, names, lines, first_position)
        pieces: list[bytes] = []
        done = 0
        call_of = order.columns["call"][lines]
        for at in np.flatnonzero(call_of >= 0).tolist():
            entry = order.call_entry(int(lines[at]) + first_position, int(call_of[at]))
            pieces += (dense(operators[done:at]), to_line(entry).encode())
            done = at + 1
        pieces.append(dense(operators[done:]))
        yield b"".join(pieces)


def _operators(order: GlobalOrder, names: Texts, lines: Column, first_position: int) -> Column:
    """Return a row for each line, as if all were operators'."""
    columns = order.columns
    graph = int(columns["graph"][lines[0]])
    pieces: list[Piece] = [
        *digits(lines + first_position),
        f",{order.iteration},{graph},OPERATOR,".encode(),
        names.at(columns["name"][lines]),
    ]
    for column, before in _REST:
        pieces += (before, *digits(columns[column][lines]))
    return laid_out([*pieces, b",0,,-1\n"], len(lines))


_REST = (
    ("rank", b","),
    ("start_us", b",,0,"),
    ("end_us", b","),
    ("position", b",,"),
    ("stream", b","),
)
"""Columns of an operator's line after its name, and what stands before each."""

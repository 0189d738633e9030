"""Places of iterations in a long order file, by the Parquet tables that the coordinator wrote
beside it: a table has the first and last position of its iteration, and lines are sorted by
position. The lines are read from the order file, which alone is the order. Imports pyarrow on use.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from rankdump._core.execution_order import make_parquet_file_name
from rankdump._core.plan import IterationSelection

_MIN_BYTES = 64 << 20
"""Of a shorter file, reading all of it takes no longer than loading pyarrow."""
_MAX_ITERATIONS = 256
"""Of more iterations than that, most of the file is read anyway."""


class LineSpan(NamedTuple):
    """Lines that follow each other in a file, in bytes."""

    start: int
    end: int


class _PositionRange(NamedTuple):
    first: int
    last: int


def find_iteration_spans(path: Path, iterations: IterationSelection) -> list[LineSpan] | None:
    """Return where the lines of iterations are in an order file, in the order of the file.

    None where all lines have to be looked at: an iteration has no table, or one of another order.
    """
    spans = iterations.spans
    if spans is None or sum(high - low + 1 for low, high in spans) > _MAX_ITERATIONS:
        return None
    found: list[LineSpan] = []
    try:
        if path.stat().st_size < _MIN_BYTES:
            return None
        with path.open("rb") as file:
            for iteration in {at for low, high in spans for at in range(low, high + 1)}:
                name = make_parquet_file_name(iteration)
                positions = _read_positions(path.with_suffix(".parquet") / name)
                span = _find_span(file, iteration, positions) if positions is not None else None
                if span is None:
                    return None
                found.append(span)
    except (OSError, ValueError):
        return None
    return sorted(found)


def _read_positions(path: Path) -> _PositionRange | None:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        return None
    try:
        with path.open("rb") as file:
            facts = pq.read_metadata(file)
    except (OSError, pa.ArrowException):
        return None
    at = facts.schema.names.index("position")
    groups = [facts.row_group(number).column(at) for number in range(facts.num_row_groups)]
    known = [each.statistics for each in groups if each.statistics is not None]
    if not known or len(known) < len(groups):
        return None
    return _PositionRange(min(each.min for each in known), max(each.max for each in known))


def _find_span(file: BinaryIO, iteration: int, positions: _PositionRange) -> LineSpan | None:
    """Return the lines of an iteration; None where the positions are not those of its lines."""
    start, last = (_find_line(file, position) for position in positions)
    for place, position in ((start, positions.first), (last, positions.last)):
        if _read_numbers(file, place) != (position, iteration):
            return None
    return LineSpan(start, last + len(_read_line(file, last)))


def _find_line(file: BinaryIO, position: int) -> int:
    """Return where the first line begins that has at least a position; ValueError for another
    file.
    """
    file.seek(0)
    low, high = len(file.readline()), file.seek(0, os.SEEK_END)
    while low < high:
        middle = (low + high) // 2
        # The first line that begins behind the middle; there may be none before the end.
        file.seek(middle)
        begin = middle + len(file.readline())
        numbers = _read_numbers(file, begin) if begin < high else None
        if numbers is None or numbers[0] >= position:
            high = middle
        else:
            low = begin
    # All lines that begin behind it have the position, or a later one.
    line = _read_numbers(file, low)
    return low if line is None or line[0] >= position else low + len(_read_line(file, low))


def _read_numbers(file: BinaryIO, place: int) -> tuple[int, int] | None:
    """Return position and iteration of a line; None where no whole line is."""
    line = _read_line(file, place)
    if not line.endswith(b"\n"):
        return None
    position, iteration, _ = line.split(b",", 2)
    return int(position), int(iteration)


def _read_line(file: BinaryIO, place: int) -> bytes:
    file.seek(place)
    return file.readline()

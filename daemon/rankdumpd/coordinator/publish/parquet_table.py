"""Parquet table of the merged order of an iteration, written if pyarrow is installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rankdump._core.events import EventColumn, EventKind
from rankdump._core.execution_order import ORDER_COLUMNS
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.publish.order_lines import iter_line_blocks
from rankdumpd.coordinator.publish.tree_files import open_whole_file

_ROW_GROUP_LINES = 1 << 17
_TEXT_COLUMNS = ("kind", "name", "group", "dtype")
_KINDS = ("", *(kind.name for kind in EventKind))


def has_parquet() -> bool:
    """Return whether pyarrow is installed, so that tables can be written."""
    return _import_arrow() is not None


def write_parquet_table(path: Path, order: GlobalOrder, graph: int, first_position: int) -> None:
    """Write the lines of a graph to a file, which appears as a whole or not at all."""
    arrow = _import_arrow()
    batches = _build_batches(arrow, order, graph, first_position)
    first = next(batches)
    with (
        open_whole_file(path) as file,
        arrow.parquet.ParquetWriter(
            file, first.schema, compression="zstd", use_dictionary=list(_TEXT_COLUMNS)
        ) as writer,
    ):
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)


@cache
def _import_arrow() -> Any:
    """Return pyarrow, or None when the extra `parquet` is not installed."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        return None


def _build_batches(
    arrow: Any, order: GlobalOrder, graph: int, first_position: int
) -> Iterator[Any]:
    names = arrow.array(order.names, arrow.string())
    groups = arrow.array([*(group.name for group in order.groups), ""], arrow.string())
    kinds = arrow.array(_KINDS, arrow.string())
    for lines in iter_line_blocks(order, graph, _ROW_GROUP_LINES):
        part = _TablePart(arrow, order, lines)
        texts = {
            "kind": part.text(part.scalar("kind", int(EventKind.OPERATOR)), kinds),
            "name": part.text(order.columns["name"][lines], names),
            "group": part.text(part.scalar("group", len(order.groups)), groups),
            "dtype": part.text(part.scalar("dtype", 0), names),
        }
        numbers = {
            "position": (lines + first_position).astype("i8"),
            "iteration": np.full(len(lines), order.iteration, "u8"),
            "graph": np.full(len(lines), graph, "u4"),
            "start_us": part.scalar("start_us", order.columns["start_us"][lines]),
            "end_us": part.scalar("end_us", order.columns["end_us"][lines]),
            "sequence": part.scalar("sequence", 0).astype("u8"),
            "element_count": part.scalar("element_count", 0).astype("u8"),
            "peer": part.scalar("peer", -1).astype("i4"),
        }
        lists = {
            "ranks": part.members("rank", "u4"),
            "rank_positions": part.members("position", "u8"),
            "streams": part.members("stream", "u4"),
            "missing": part.missing(),
        }
        columns = {name: arrow.array(column) for name, column in numbers.items()} | texts | lists
        yield arrow.RecordBatch.from_pydict({name: columns[name] for name in ORDER_COLUMNS})


class _TablePart:
    """Some lines of an order, with the members of each line."""

    def __init__(self, arrow: Any, order: GlobalOrder, lines: EventColumn) -> None:
        self._arrow = arrow
        self._order = order
        self._lines = lines
        call = order.columns["call"][lines]
        self._is_call = call >= 0
        self._calls = call[self._is_call]

    def scalar(self, field: str, of_operators: EventColumn | int) -> EventColumn:
        """Return a column whose values come from the calls for calls, and from `of_operators` for
        operators.
        """
        column = np.empty(len(self._lines), "i8")
        column[:] = of_operators
        column[self._is_call] = self._order.calls.columns[field][self._calls]
        return column

    def text(self, places: EventColumn, table: Any) -> Any:
        """Return the texts of a table at these positions."""
        return self._arrow.DictionaryArray.from_arrays(
            self._arrow.array(places.astype("i4")), table
        )

    def members(self, field: str, code: str) -> Any:
        """Return a list per line: the values of the call's members, or the single value of an
        operator.
        """
        counts = np.ones(len(self._lines), "i8")
        counts[self._is_call], members = self._order.calls.locate_members(self._calls)
        is_call = np.repeat(self._is_call, counts)
        values = np.empty(len(is_call), code)
        values[~is_call] = self._order.columns[field][self._lines[~self._is_call]]
        values[is_call] = self._order.calls.members[field][members]
        return self._list(counts, values)

    def missing(self) -> Any:
        """Return a list per line: the ranks that should have taken part in the call and did not."""
        lists = [self._order.calls.missing.get(call, ()) for call in self._calls.tolist()]
        counts = np.zeros(len(self._lines), "i8")
        counts[self._is_call] = [len(ranks) for ranks in lists]
        values = np.array([rank for ranks in lists for rank in ranks], "u4")
        return self._list(counts, values)

    def _list(self, counts: EventColumn, values: EventColumn) -> Any:
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return self._arrow.ListArray.from_arrays(
            self._arrow.array(offsets.astype("i4")), self._arrow.array(values)
        )

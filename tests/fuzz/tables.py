"""Targets for files of lines: statistics, info and stack files of API dumps, orders, hints,
graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from fuzz.input_pieces import chosen, file_of

from rankdump._analysis.reader.source_lines import read_ir_operators, read_stack_operators
from rankdump._analysis.reader.statistic_tables import read_info
from rankdump._analysis.reader.table_records import TableRecords
from rankdump._analysis.reader.table_rows import TableRows, read_table_rows
from rankdump._analysis.reader.tree import Entries, Table, Tree
from rankdump._core.execution_order import (
    format_finding_line,
    format_order_line,
    parse_finding_line,
    parse_order_line,
)
from rankdump._core.statistics import STATISTIC_TITLES
from rankdump._core.timeouts import format_hints, parse_hints
from rankdump._layout.api_files import read_stack_key
from rankdump._layout.api_tree import parse_tensor_name
from rankdump._layout.file_name import parse_file_name
from rankdump.errors import CorruptedError
from rankdumpd.coordinator.hints.spread_history import HintState

_OPERATOR = parse_file_name("Add.Default_Add-op0.7.3.1700000000000000.csv")


def statistics(data: bytes) -> None:
    """A table of statistics: of a folder, or of one operator."""
    which, rest = chosen(data, 2)
    path = file_of(rest, "statistic.csv")
    operator = _OPERATOR if which else None
    table = Table(path.parent, path.name, 0, "Net", 0, 0, operator=operator)
    tree = Tree(path.parent, (), Entries.of(path.parent, ()), ())
    if not which:
        _read_places(replace(table, dated=False), tree)
    for row in read_table_rows(table, TableRecords(tree)):
        for item in STATISTIC_TITLES:
            row.number(item)
        assert row.finite in (True, False, None)


def _read_places(table: Table, tree: Tree) -> None:
    """Read a table of several iterations, of which each has what the whole table has of it."""
    with suppress(CorruptedError):
        rows = TableRows(table, TableRecords(tree))
        found = [row for place in rows.places for row in rows.read_rows(place)]
        whole = list(read_table_rows(table, TableRecords(tree)))
        assert sorted(map(repr, found)) == sorted(map(repr, whole))
        for place in rows.places:
            rows.read_text(place)
            assert rows.count_finite_rows(place) >= 0


def apis(data: bytes) -> None:
    """The info file of a dump of APIs, or its stack file."""
    which, rest = chosen(data, 2)
    if which:
        for call in read_stack_operators(file_of(rest, "stack.json")):
            assert call.op_name
        for line in rest.decode("utf-8", "replace").split("\n"):
            read_stack_key(line)
        return
    path = file_of(rest, "torch_api_dump_info.pkl")
    tree = Tree(path.parent, (), Entries.of(path.parent, ()), ())
    _read_places(Table(path.parent, path.name, 0, "", 0, 0, dated=False, info=True), tree)
    for noted in read_info(path, stepped=False).lines:
        parse_tensor_name(noted.line.name)


def orders(data: bytes) -> None:
    """A line of an order or of findings, a file of hints, a state of hints."""
    which, rest = chosen(data, len(_ORDERS))
    text = rest.decode("utf-8", "replace")
    _ORDERS[which](text)


def _order_line(text: str) -> None:
    entry = parse_order_line(text)
    parse_order_line(format_order_line(entry))


def _finding_line(text: str) -> None:
    finding = parse_finding_line(text)
    assert parse_finding_line(format_finding_line(finding)) == finding


def _hints(text: str) -> None:
    hints = parse_hints(text)
    assert repr(parse_hints(format_hints(hints))) == repr(hints)


def _hint_state(text: str) -> None:
    state = HintState.from_json(text)
    assert HintState.from_json(state.to_json()) == state


_ORDERS: tuple[Callable[[str], None], ...] = (_order_line, _finding_line, _hints, _hint_state)


def graphs(data: bytes) -> None:
    """A graph's `.ir` text."""
    for operator in read_ir_operators(file_of(data, "graph.ir")):
        for frame in operator.frames:
            assert frame.line <= frame.last_line

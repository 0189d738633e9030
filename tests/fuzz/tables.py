"""Files of lines: tables of figures, info and stack files of API dumps, orders, hints, graphs."""

from __future__ import annotations

from collections.abc import Callable

from fuzz.pieces import chosen, file_of

from rankdump.contract.layout.api_name import tensor_of
from rankdump.contract.layout.api_stacks import key_in
from rankdump.contract.layout.file_name import parsed
from rankdump.contract.order import (
    finding_from_line,
    finding_to_line,
    from_line,
    to_line,
)
from rankdump.contract.statistics import ITEMS
from rankdump.contract.timeouts import hints_from_text, hints_to_text
from rankdump.reader.calls import calls
from rankdump.reader.entry import Table
from rankdump.reader.infos import read_info
from rankdump.reader.ir import operators
from rankdump.reader.tables import Recorded, rows
from rankdumpd.coordinator.hints.state import HintState

_OPERATOR = parsed("Add.Default_Add-op0.7.3.1700000000000000.csv")


def statistics(data: bytes) -> None:
    """A table of figures: of a folder, or of one operator."""
    which, rest = chosen(data, 2)
    path = file_of(rest, "statistic.csv")
    operator = _OPERATOR if which else None
    table = Table(path.parent, path.name, 0, "Net", 0, 0, operator=operator)
    for row in rows(table, Recorded(path.parent)):
        for item in ITEMS:
            row.number(item)
        assert row.finite in (True, False, None)


def apis(data: bytes) -> None:
    """The info file of a dump of APIs, or its stack file."""
    which, rest = chosen(data, 2)
    if which:
        for call in calls(file_of(rest, "stack.json")):
            assert call.op_name
        for line in rest.decode("utf-8", "replace").split("\n"):
            key_in(line)
        return
    for noted in read_info(file_of(rest, "info.pkl"), stepped=False).lines:
        tensor_of(noted.line.name)


def orders(data: bytes) -> None:
    """A line of an order or of findings, a file of hints, a state of hints."""
    which, rest = chosen(data, len(_ORDERS))
    text = rest.decode("utf-8", "replace")
    _ORDERS[which](text)


def _order_line(text: str) -> None:
    entry = from_line(text)
    from_line(to_line(entry))


def _finding_line(text: str) -> None:
    finding = finding_from_line(text)
    assert finding_from_line(finding_to_line(finding)) == finding


def _hints(text: str) -> None:
    hints = hints_from_text(text)
    assert repr(hints_from_text(hints_to_text(hints))) == repr(hints)


def _hint_state(text: str) -> None:
    state = HintState.from_json(text)
    assert HintState.from_json(state.to_json()) == state


_ORDERS: tuple[Callable[[str], None], ...] = (_order_line, _finding_line, _hints, _hint_state)


def graphs(data: bytes) -> None:
    """A graph's `.ir` text."""
    for operator in operators(file_of(data, "graph.ir")):
        for frame in operator.frames:
            assert frame.line <= frame.last_line

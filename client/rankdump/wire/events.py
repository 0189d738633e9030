"""Batches of events as messages and back: columns as packed numbers, checked when they come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import COLUMN_TYPES, Column, EventColumns, EventKind, ProcessGroup
from rankdump.wire.fields import utf8
from rankdump.wire.limits import LIMIT, check_count, check_text, sendable
from rankdump.wire.v1 import events_pb2

MAX_EVENTS = 1 << 20
"""Most events of one message."""
MAX_NAMES = 1 << 16
MAX_GROUPS = 1 << 12
MAX_MEMBERS = 1 << 20
"""Ranks of all groups of one message."""
_CALL_COLUMNS = ("group", "sequence", "element_count", "dtype", "peer", "stall_us")
"""Those that only collectives and messages fill; of operators they have the values of _OPERATOR."""
_COLUMNS = tuple(field for field in COLUMN_TYPES if field not in _CALL_COLUMNS)
_OPERATOR = {"peer": -1}
_INDEX = "u4"


def events_to_wire(events: EventColumns, *, names: bool = True) -> events_pb2.EventColumns:
    """Return the message of a batch; without `names` where the stream says them elsewhere."""
    columns = events.columns
    calls = np.flatnonzero(columns["kind"] != int(EventKind.OPERATOR))
    message = events_pb2.EventColumns(
        names=[sendable(utf8(name)) for name in events.names] if names else (),
        groups=[
            events_pb2.ProcessGroup(name=sendable(g.name), ranks=g.ranks) for g in events.groups
        ],
        stalled_us=events.stalled_us,
        sent_us=events.sent_us,
        count=len(events),
        calls=calls.astype(f"<{_INDEX}").tobytes(),
        position=columns["position"].astype("<u8").tobytes(),
    )
    for field in _COLUMNS:
        if field != "position":
            setattr(message, field, _packed(columns[field], COLUMN_TYPES[field]))
    for field in _CALL_COLUMNS:
        setattr(message, field, _packed(columns[field][calls], COLUMN_TYPES[field]))
    return message


def events_from_wire(
    message: events_pb2.EventColumns, texts: Sequence[str] | None = None
) -> EventColumns:
    """Read a batch; ProtocolError when columns differ in length or point nowhere.

    Without names of its own its columns point into `texts`.
    """
    count = message.count
    if count > MAX_EVENTS:
        raise ProtocolError(f"{count} events in one message; at most {MAX_EVENTS}")
    # A column of zeros is empty, but for this one: it shows how long a batch really is.
    if len(message.position) != 8 * count:
        raise ProtocolError(f"{count} events with {len(message.position)} bytes of positions")
    _check_texts(message)
    columns = {field: _column(message, field, count) for field in _COLUMNS}
    kinds = columns["kind"]
    if count and not (kinds.min() >= 1 and kinds.max() <= max(EventKind)):
        raise ProtocolError("event of an unknown kind")
    calls = _unpacked("calls", message.calls, _INDEX, len(message.calls) // 4)
    if not np.array_equal(calls, np.flatnonzero(kinds != int(EventKind.OPERATOR))):
        raise ProtocolError(f"{len(calls)} calls that are not those of the kinds")
    for field in _CALL_COLUMNS:
        columns[field] = np.full(count, _OPERATOR.get(field, 0), COLUMN_TYPES[field])
        columns[field][calls] = _column(message, field, len(calls))
    names: Sequence[str] = tuple(message.names) or texts or ("",)
    for field in ("name", "group", "dtype"):
        if count and columns[field].max() >= len(names):
            raise ProtocolError(f"event column {field} points past {len(names)} names")
    groups = tuple(ProcessGroup(g.name, tuple(g.ranks)) for g in message.groups)
    return EventColumns(names, groups, columns, message.stalled_us, message.sent_us)


def _check_texts(message: events_pb2.EventColumns) -> None:
    check_count("names of events", len(message.names), MAX_NAMES)
    check_count("groups", len(message.groups), MAX_GROUPS)
    check_count("ranks of groups", sum(len(g.ranks) for g in message.groups), MAX_MEMBERS)
    for name in message.names:
        check_text("event with a name", name)
    for group in message.groups:
        check_text("group with a name", group.name)


def _packed(column: Column, code: str) -> bytes:
    return column.astype(f"<{code}").tobytes() if column.any() else b""


def _column(message: events_pb2.EventColumns, field: str, count: int) -> Column:
    column = _unpacked(field, getattr(message, field), COLUMN_TYPES[field], count)
    if COLUMN_TYPES[field] == "u8" and column.max(initial=0) >= LIMIT:
        raise ProtocolError(f"event column {field} with a number over {LIMIT - 1}")
    return column


def _unpacked(field: str, data: bytes, code: str, count: int) -> Column:
    if not data:
        return np.zeros(count, code)
    if len(data) != count * np.dtype(code).itemsize:
        raise ProtocolError(f"event column {field} of {len(data)} bytes for {count} events")
    return np.frombuffer(data, f"<{code}").astype(code, copy=False)

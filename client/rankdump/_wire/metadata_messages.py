"""Conversion between messages of event batches, graphs, operator arguments and call stacks, and
frozen values. Columns are sent as packed numbers; bounds are checked on receipt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from rankdump._core.events import (
    CALL_COLUMNS,
    EVENT_COLUMN_TYPES,
    TEXT_COLUMNS,
    CallOutcome,
    EventColumn,
    EventColumns,
    EventKind,
    ProcessGroup,
    UnseenCollectives,
)
from rankdump._core.graph import (
    GraphPart,
    OperatorGraph,
)
from rankdump._core.record import MAX_FRAME_ROWS
from rankdump._core.session_protocol import CallStacks, KernelArguments, OperatorArguments
from rankdump._wire.message_fields import (
    NUMBER_LIMIT,
    check_count,
    check_numbers,
    check_text,
    from_message,
    make_fields,
    make_sendable,
    replace_surrogates,
)
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, events_pb2

MAX_MESSAGE_EVENTS = 1 << 20
"""Maximum number of events in one message."""
MAX_EVENT_NAMES = 1 << 16
MAX_PROCESS_GROUPS = 1 << 12
MAX_GROUP_MEMBERS = 1 << 20
"""Maximum number of ranks in all groups of one message."""
MAX_UNSEEN_ENTRIES = 1 << 12
_COMMON_COLUMNS = tuple(field for field in EVENT_COLUMN_TYPES if field not in CALL_COLUMNS)
_OPERATOR_DEFAULTS = {"peer": -1}
_INDEX_TYPE = "u4"


def events_to_wire(events: EventColumns, *, names: bool = True) -> events_pb2.EventColumns:
    """Return the message of a batch of events; without `names` if the stream carries the names
    elsewhere.
    """
    columns = events.columns
    calls = np.flatnonzero(columns["kind"] != int(EventKind.OPERATOR))
    message = events_pb2.EventColumns(
        names=[make_sendable(name) for name in events.names] if names else (),
        groups=[
            events_pb2.ProcessGroup(name=make_sendable(g.name), ranks=g.ranks)
            for g in events.groups
        ],
        stalled_us=events.stalled_us,
        sent_us=events.sent_us,
        unseen=[
            events_pb2.UnseenCollectives(
                group=make_sendable(each.group), **make_fields(each, "group", replace=True)
            )
            for each in events.unseen
        ],
        count=len(events),
        calls=calls.astype(f"<{_INDEX_TYPE}").tobytes(),
        position=columns["position"].astype("<u8").tobytes(),
    )
    for field in _COMMON_COLUMNS:
        if field != "position":
            setattr(message, field, _pack_column(columns[field], EVENT_COLUMN_TYPES[field]))
    for field in CALL_COLUMNS:
        setattr(message, field, _pack_column(columns[field][calls], EVENT_COLUMN_TYPES[field]))
    return message


def events_from_wire(
    message: events_pb2.EventColumns, texts: Sequence[str] | None = None
) -> EventColumns:
    """Convert the message of a batch of events; ProtocolError if columns differ in length or an
    index is out of range.

    A batch without names has indices into `texts`.
    """
    count = message.count
    if count > MAX_MESSAGE_EVENTS:
        raise ProtocolError(f"{count} events in one message, at most {MAX_MESSAGE_EVENTS}")
    # A column of zeros is sent as an empty one, except `position`, whose length is that of the
    # batch.
    if len(message.position) != 8 * count:
        raise ProtocolError(f"{count} events have {len(message.position)} bytes of positions")
    _check_event_texts(message)
    columns = {field: _read_column(message, field, count) for field in _COMMON_COLUMNS}
    kinds = columns["kind"]
    if count and not (kinds.min() >= 1 and kinds.max() <= max(EventKind)):
        raise ProtocolError("an event has an unknown kind")
    calls = _unpack_column("calls", message.calls, _INDEX_TYPE, len(message.calls) // 4)
    if not np.array_equal(calls, np.flatnonzero(kinds != int(EventKind.OPERATOR))):
        raise ProtocolError(f"{len(calls)} calls, which do not match the kinds of the events")
    own_names = bool(message.names) or texts is None
    for field in CALL_COLUMNS:
        columns[field] = np.full(count, _OPERATOR_DEFAULTS.get(field, 0), EVENT_COLUMN_TYPES[field])
        sent = "stream_source" if field == "source" and not own_names else field
        columns[field][calls] = _read_column(message, sent, len(calls), field)
    # An outcome that only a newer peer knows counts as unknown.
    columns["outcome"][columns["outcome"] > max(CallOutcome)] = CallOutcome.UNKNOWN
    names: Sequence[str] = tuple(message.names) or texts or ("",)
    for field in TEXT_COLUMNS:
        if count and columns[field].max() >= len(names):
            raise ProtocolError(f"the event column {field} points past {len(names)} names")
    groups = tuple(ProcessGroup(g.name, tuple(g.ranks)) for g in message.groups)
    unseen = _read_unseen(message)
    return EventColumns(names, groups, columns, message.stalled_us, message.sent_us, unseen)


def _read_unseen(message: events_pb2.EventColumns) -> tuple[UnseenCollectives, ...]:
    check_count("entries of unseen collectives", len(message.unseen), MAX_UNSEEN_ENTRIES)
    for each in message.unseen:
        check_text("unseen collectives of a group with a name", each.group)
        check_text("unseen collectives with a reason", each.reason)
        check_numbers("unseen collectives", (each.iteration, each.count))
    return tuple(from_message(UnseenCollectives, each) for each in message.unseen)


def _check_event_texts(message: events_pb2.EventColumns) -> None:
    check_count("names of events", len(message.names), MAX_EVENT_NAMES)
    check_count("groups", len(message.groups), MAX_PROCESS_GROUPS)
    check_count("ranks of groups", sum(len(g.ranks) for g in message.groups), MAX_GROUP_MEMBERS)
    for name in message.names:
        check_text("event with a name", name)
    for group in message.groups:
        check_text("group with a name", group.name)


def _pack_column(column: EventColumn, code: str) -> bytes:
    return column.astype(f"<{code}").tobytes() if column.any() else b""


def _read_column(
    message: events_pb2.EventColumns, sent: str, count: int, field: str = ""
) -> EventColumn:
    """Convert a field of the message to the column `field`, which by default has the same name."""
    field = field or sent
    column = _unpack_column(field, getattr(message, sent), EVENT_COLUMN_TYPES[field], count)
    if EVENT_COLUMN_TYPES[field] == "u8" and column.max(initial=0) >= NUMBER_LIMIT:
        raise ProtocolError(f"the event column {field} has a number over {NUMBER_LIMIT - 1}")
    return column


def _unpack_column(field: str, data: bytes, code: str, count: int) -> EventColumn:
    if not data:
        return np.zeros(count, code)
    if len(data) != count * np.dtype(code).itemsize:
        raise ProtocolError(f"the event column {field} has {len(data)} bytes for {count} events")
    return np.frombuffer(data, f"<{code}").astype(code, copy=False)


MAX_GRAPH_DIMENSIONS = 64


def graph_part_to_wire(part: GraphPart) -> agent_pb2.GraphPart:
    """Return the message of a part of a graph."""
    graph = make_fields(part.graph, "number", replace=True)
    return agent_pb2.GraphPart(graph=part.graph.number, **graph, **make_fields(part, "graph"))


def graph_part_from_wire(message: agent_pb2.GraphPart) -> GraphPart:
    """Convert the message of a part of a graph; ProtocolError if a tensor has too many
    dimensions.
    """
    graph = from_message(OperatorGraph, message, number=message.graph)
    of_nodes = (kind for node in graph.nodes for kind in node.outputs)
    for kind in chain(of_nodes, (each.type for each in graph.parameters)):
        if len(kind.shape) > MAX_GRAPH_DIMENSIONS:
            raise ProtocolError(f"a tensor of a graph has {len(kind.shape)} dimensions")
    return from_message(GraphPart, message, graph=graph)


def arguments_to_wire(arguments: KernelArguments) -> agent_pb2.KernelArguments:
    """Return the message of arguments of operators."""
    return agent_pb2.KernelArguments(**make_fields(arguments, replace=True))


def arguments_from_wire(message: agent_pb2.KernelArguments) -> KernelArguments:
    """Convert the message of arguments of operators."""
    # The values are made directly, because there may be thousands and `from_message` takes a
    # seventh longer.
    operators = tuple(
        OperatorArguments(each.graph, each.op_type, each.op_name, dict(each.values))
        for each in message.operators
    )
    return KernelArguments(message.iteration, operators)


def stacks_to_wire(stacks: CallStacks) -> agent_pb2.CallStacks:
    """Return the message of call stacks."""
    texts = [agent_pb2.CallStack(lines=map(replace_surrogates, lines)) for lines in stacks.texts]
    return agent_pb2.CallStacks(texts=texts, **make_fields(stacks, "texts", replace=True))


def stacks_from_wire(message: agent_pb2.CallStacks) -> CallStacks:
    """Convert the message of call stacks; ProtocolError if the columns do not match."""
    calls, places = tuple(message.calls), tuple(message.stacks)
    if len(calls) != len(places) or len(calls) > MAX_FRAME_ROWS:
        raise ProtocolError(
            f"columns have {len(calls)} calls and {len(places)} stacks, at most {MAX_FRAME_ROWS}"
        )
    texts = tuple(tuple(stack.lines) for stack in message.texts)
    if max(places, default=-1) >= len(texts):
        raise ProtocolError(f"a call refers to stack {max(places)} of {len(texts)}")
    return CallStacks(message.iteration, calls, places, texts)

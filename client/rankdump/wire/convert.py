"""Messages to frozen values and back; every length and number from the wire is checked here."""

from __future__ import annotations

import numpy as np

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import COLUMN_TYPES, EventColumns, EventKind, ProcessGroup
from rankdump.contract.exchange import (
    Declaration,
    IterationEnd,
    RecordHead,
    SessionEnd,
    SessionGrant,
    SessionRequest,
    SlabPlace,
)
from rankdump.contract.key import Side, TensorKey
from rankdump.wire.fields import common, utf8
from rankdump.wire.graphs import arguments_from_wire, graph_part_from_wire
from rankdump.wire.v1 import agent_pb2, events_pb2

_SIDES = {Side.INPUT: agent_pb2.SIDE_INPUT, Side.OUTPUT: agent_pb2.SIDE_OUTPUT}
_SIDES_BACK = {number: side for side, number in _SIDES.items()}
_KINDS = frozenset(map(int, EventKind))
MAX_DIMENSIONS = 64
MAX_WORLD_SIZE = 1 << 24


def session_request_to_wire(request: SessionRequest) -> agent_pb2.OpenSessionRequest:
    """Return the message of a rank's introduction."""
    return agent_pb2.OpenSessionRequest(**common(request, SessionRequest))


def session_request_from_wire(message: agent_pb2.OpenSessionRequest) -> SessionRequest:
    """Read a rank's introduction; ProtocolError when it contradicts itself."""
    if not message.session_id or not message.job_id:
        raise ProtocolError("session without a session id or a job id")
    if not 0 <= message.rank < message.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(f"rank {message.rank} of {message.world_size}: rank must be below it")
    return SessionRequest(**common(message, SessionRequest))


def session_grant_to_wire(grant: SessionGrant) -> agent_pb2.OpenSessionResponse:
    """Return the message of the agent's answer."""
    return agent_pb2.OpenSessionResponse(
        token=grant.token,
        acknowledged_sequence=grant.acknowledged,
        max_record_bytes=grant.max_record_bytes,
        excluded=grant.excluded,
        slab=None if grant.slab is None else agent_pb2.Slab(**common(grant.slab, SlabPlace)),
        redirect=grant.redirect,
    )


def session_grant_from_wire(message: agent_pb2.OpenSessionResponse) -> SessionGrant:
    """Read the agent's answer."""
    return SessionGrant(
        token=message.token,
        acknowledged=message.acknowledged_sequence,
        max_record_bytes=message.max_record_bytes,
        excluded=message.excluded,
        slab=SlabPlace(**common(message.slab, SlabPlace)) if message.HasField("slab") else None,
        redirect=message.redirect,
    )


def record_to_wire(head: RecordHead, data: bytes) -> agent_pb2.Record:
    """Return the message of a record with its first bytes."""
    key = head.key
    return agent_pb2.Record(
        graph=key.graph,
        iteration=key.iteration,
        op_type=utf8(key.op_type),
        op_name=utf8(key.op_name),
        side=_SIDES[key.side],
        slot=key.slot,
        timestamp_us=key.timestamp_us,
        task=key.task,
        stream=key.stream,
        dtype=head.dtype,
        shape=head.shape,
        byte_count=head.byte_count,
        argument=utf8(head.argument),
        data=data,
        figures=None if head.figures is None else agent_pb2.Figures(texts=head.figures),
        switched_on=head.switched_on,
        degraded=head.degraded,
        constant=key.constant,
    )


def record_from_wire(message: agent_pb2.Record, *, rank: int, net_name: str) -> RecordHead:
    """Read a record's head; whether its shape fits its bytes is the receiver's question."""
    side = _SIDES_BACK.get(message.side)
    if side is None:
        raise ProtocolError(f"record with side {message.side}")
    if len(message.shape) > MAX_DIMENSIONS:
        raise ProtocolError(f"record with {len(message.shape)} dimensions")
    key = TensorKey(
        rank=rank,
        net_name=net_name,
        graph=message.graph,
        iteration=message.iteration,
        timestamp_us=message.timestamp_us,
        op_type=message.op_type,
        op_name=message.op_name,
        side=side,
        slot=message.slot,
        task=message.task,
        stream=message.stream,
        constant=message.constant,
    )
    return RecordHead(
        key=key,
        dtype=message.dtype,
        shape=tuple(message.shape),
        byte_count=message.byte_count,
        argument=message.argument,
        figures=tuple(message.figures.texts) if message.HasField("figures") else None,
        switched_on=message.switched_on,
        degraded=message.degraded,
    )


def events_to_wire(events: EventColumns) -> events_pb2.EventColumns:
    """Return the message of a batch of events."""
    columns = {field: column.tolist() for field, column in events.columns.items()}
    groups = [events_pb2.ProcessGroup(name=g.name, ranks=g.ranks) for g in events.groups]
    return events_pb2.EventColumns(names=map(utf8, events.names), groups=groups, **columns)


def events_from_wire(message: events_pb2.EventColumns) -> EventColumns:
    """Read a batch of events; ProtocolError when columns differ in length or point nowhere."""
    # Before it becomes a column: a numpy that is old cuts a number instead of refusing it.
    if not _KINDS.issuperset(message.kind):
        raise ProtocolError("event of an unknown kind")
    try:
        columns = {
            field: np.fromiter(getattr(message, field), dtype=code)
            for field, code in COLUMN_TYPES.items()
        }
    except (OverflowError, ValueError) as error:
        raise ProtocolError(f"event column out of range: {error}") from None
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise ProtocolError(f"event columns of different lengths: {sorted(lengths)}")
    names = tuple(message.names) or ("",)
    for field in ("name", "group", "dtype"):
        if len(columns[field]) and columns[field].max() >= len(names):
            raise ProtocolError(f"event column {field} points past {len(names)} names")
    groups = tuple(ProcessGroup(g.name, tuple(g.ranks)) for g in message.groups)
    return EventColumns(names, groups, columns)


def declaration_from_wire(frame: agent_pb2.Frame) -> Declaration:
    """Read a frame that is neither record nor chunk."""
    body = frame.WhichOneof("body")
    if body == "events":
        return events_from_wire(frame.events)
    if body == "iteration_end":
        end = frame.iteration_end
        return IterationEnd(end.iteration, end.expected, dict(end.dropped), end.stall_us)
    if body == "graph_part":
        return graph_part_from_wire(frame.graph_part)
    if body == "kernel_arguments":
        return arguments_from_wire(frame.kernel_arguments)
    if body == "session_end":
        return SessionEnd(frame.session_end.iterations_seen, tuple(frame.session_end.notes))
    raise ProtocolError(f"frame {frame.sequence} with body {body}")

"""Messages to frozen values and back; every length and number from the wire is checked here."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from rankdump.contract import reasons
from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import (
    Declaration,
    IterationEnd,
    RecordHead,
    SessionEnd,
    SessionGrant,
    SessionRequest,
    SlabPlace,
)
from rankdump.contract.figure_rows import MAX_ROWS, FigureRows
from rankdump.contract.plan import UNNAMED
from rankdump.contract.timeouts import GroupTimeout, Timeouts
from rankdump.wire.events import events_from_wire
from rankdump.wire.fields import common
from rankdump.wire.graphs import arguments_from_wire, graph_part_from_wire, stacks_from_wire
from rankdump.wire.kinds import kind_from_wire, kind_to_wire
from rankdump.wire.limits import (
    LIMIT,
    check_count,
    check_numbers,
    check_text,
    shown,
    shown_notes,
)
from rankdump.wire.v1 import agent_pb2, events_pb2

MAX_WORLD_SIZE = 1 << 24
MAX_JOB_ID = 256
MAX_REASONS = 256
MAX_TIMEOUTS = 4096
_MOST_PLAN_BYTES = 4 << 20
_MOST_SOURCE_BYTES = 1 << 20
_SECRET_BYTES = (16, 64)


def session_request_to_wire(request: SessionRequest) -> agent_pb2.OpenSessionRequest:
    """Return the message of a rank's introduction."""
    return agent_pb2.OpenSessionRequest(**common(request, SessionRequest))


def session_request_from_wire(message: agent_pb2.OpenSessionRequest) -> SessionRequest:
    """Read a rank's introduction; ProtocolError when it contradicts itself."""
    if not message.session_id or not message.job_id:
        raise ProtocolError("session without a session id or a job id")
    if not 0 <= message.rank < message.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(f"rank {message.rank} of {message.world_size}: rank must be below it")
    check_numbers(f"session of rank {message.rank}", (message.pid,))
    _check_job_id(message.job_id)
    check_text("session id", message.session_id, MAX_JOB_ID)
    check_count("bytes of a plan", len(message.plan_json), _MOST_PLAN_BYTES)
    check_count("bytes of a configuration", len(message.config_source), _MOST_SOURCE_BYTES)
    if message.secret and not _SECRET_BYTES[0] <= len(message.secret) <= _SECRET_BYTES[1]:
        raise ProtocolError(f"session with a secret of {len(message.secret)} bytes")
    return SessionRequest(
        host=shown(message.host),
        framework=shown(message.framework),
        device_target=shown(message.device_target),
        **common(message, SessionRequest, "host", "framework", "device_target"),
    )


def _check_job_id(job_id: str) -> None:
    check_text("job id", job_id, MAX_JOB_ID)
    if not job_id.isprintable():
        raise ProtocolError(f"job id {job_id!r}: printable characters only")


def session_grant_to_wire(grant: SessionGrant) -> agent_pb2.OpenSessionResponse:
    """Return the message of the agent's answer."""
    return agent_pb2.OpenSessionResponse(
        token=grant.token,
        acknowledged_sequence=grant.acknowledged,
        max_record_bytes=grant.max_record_bytes,
        excluded=grant.excluded,
        slab=None if grant.slab is None else agent_pb2.Slab(**common(grant.slab, SlabPlace)),
        redirect=grant.redirect,
        opening=grant.opening,
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
        opening=message.opening,
    )


def record_to_wire(head: RecordHead, data: bytes) -> agent_pb2.Record:
    """Return the message of a record with its first bytes."""
    return agent_pb2.Record(
        kind=kind_to_wire(head.kind),
        iteration=head.iteration,
        timestamp_us=head.timestamp_us,
        task=head.task,
        stream=head.stream,
        switched_on=head.switched_on,
        data=data,
    )


def record_from_wire(message: agent_pb2.Record, *, rank: int, net_name: str) -> RecordHead:
    """Read a record's head; ProtocolError when it contradicts itself.

    `net_name` is the plan's, which goes before the one that the rank gives.
    """
    kind = kind_from_wire(message.kind)
    iteration, timestamp_us = message.iteration, message.timestamp_us
    if iteration >= LIMIT or timestamp_us >= LIMIT:
        raise ProtocolError(f"record with a number over {LIMIT - 1}")
    model = net_name or kind.model or UNNAMED
    if kind.model != model:
        kind = kind._replace(model=model)
    return RecordHead(
        kind, iteration, timestamp_us, rank, message.task, message.stream, message.switched_on
    )


def figure_rows_to_wire(rows: FigureRows) -> agent_pb2.FigureRows:
    """Return the message of rows of figures."""
    return agent_pb2.FigureRows(
        iteration=rows.iteration,
        kinds=map(kind_to_wire, rows.kinds),
        timestamps_us=rows.timestamps_us,
        figures=rows.figures,
        switched_on=rows.switched_on,
        degraded=rows.degraded,
    )


def figure_rows_from_wire(message: agent_pb2.FigureRows) -> FigureRows:
    """Read rows of figures; ProtocolError when the columns differ in length or are too long."""
    lengths = {len(message.kinds), len(message.timestamps_us), len(message.figures)}
    if len(lengths) > 1 or max(lengths) > MAX_ROWS:
        raise ProtocolError(f"figure columns of {sorted(lengths)} rows, at most {MAX_ROWS}")
    timestamps_us = tuple(message.timestamps_us)
    if max(message.iteration, *timestamps_us, 0) >= LIMIT:
        raise ProtocolError(f"figures with a number over {LIMIT - 1}")
    return FigureRows(
        iteration=message.iteration,
        kinds=tuple(map(kind_from_wire, message.kinds)),
        timestamps_us=timestamps_us,
        figures=tuple(message.figures),
        switched_on=message.switched_on,
        degraded=message.degraded,
    )


def timeouts_to_wire(timeouts: Timeouts) -> events_pb2.Timeouts:
    """Return the message of a rank's limits."""
    groups = [events_pb2.GroupTimeout(**common(g, GroupTimeout)) for g in timeouts.groups]
    return events_pb2.Timeouts(variables=timeouts.variables, groups=groups, limits=timeouts.limits)


def timeouts_from_wire(message: events_pb2.Timeouts) -> Timeouts:
    """Read a rank's limits; ProtocolError when they are none, or longer than any are."""
    for each in (message.variables, message.groups, message.limits):
        check_count("limits of time", len(each), MAX_TIMEOUTS)
    named = (text for group in message.groups for text in (group.group, group.backend))
    for text in (*named, *message.variables, *message.variables.values(), *message.limits):
        check_text("limit of time with a text", text)
    check_numbers("limit of time", (group.timeout_us for group in message.groups))
    if not all(map(math.isfinite, message.limits.values())):
        raise ProtocolError("limit of time that is no number of seconds")
    groups = tuple(GroupTimeout(**common(g, GroupTimeout)) for g in message.groups)
    return Timeouts(dict(message.variables), groups, dict(message.limits))


def iteration_end_from_wire(message: agent_pb2.IterationEnd) -> IterationEnd:
    """Read the end of an iteration; reasons that nobody knows count as one."""
    rest = common(message, IterationEnd, "dropped")
    return IterationEnd(dropped=reasons_from_wire(message.dropped), **rest)


def reasons_from_wire(dropped: Mapping[str, int]) -> dict[str, int]:
    """Read what was dropped, by reason; ProtocolError when there are more reasons than any has."""
    check_count("reasons of drops", len(dropped), MAX_REASONS)
    counted: Counter[str] = Counter()
    for reason, count in dropped.items():
        counted[reasons.known(reason)] += count
    check_numbers("drops", counted.values())
    return dict(counted)


def declaration_from_wire(frame: agent_pb2.Frame) -> Declaration:
    """Read a frame that is neither record nor chunk."""
    body = frame.WhichOneof("body")
    if body == "events":
        return events_from_wire(frame.events)
    if body == "figure_rows":
        return figure_rows_from_wire(frame.figure_rows)
    if body == "iteration_end":
        return iteration_end_from_wire(frame.iteration_end)
    if body == "timeouts":
        return timeouts_from_wire(frame.timeouts)
    if body == "graph_part":
        return graph_part_from_wire(frame.graph_part)
    if body == "kernel_arguments":
        return arguments_from_wire(frame.kernel_arguments)
    if body == "call_stacks":
        return stacks_from_wire(frame.call_stacks)
    if body == "session_end":
        return SessionEnd(frame.session_end.iterations_seen, shown_notes(frame.session_end.notes))
    raise ProtocolError(f"frame {frame.sequence} with body {body}")

"""Reads an agent's report from the wire; what contradicts itself is refused as a whole."""

from __future__ import annotations

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import EventColumns
from rankdump.contract.status import IterationStatus, RankEvents, SessionStatus
from rankdump.wire.convert import MAX_WORLD_SIZE
from rankdump.wire.events import events_from_wire
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.views import iteration_from_wire, load_from_wire, session_from_wire
from rankdumpd.coordinator.values import Report


def report_from_wire(message: coordinator_pb2.ReportRequest) -> Report:
    """Return a report; ProtocolError when any part of it cannot be."""
    if not message.agent_id:
        raise ProtocolError(f"report {message.sequence} without an agent id")
    return Report(
        agent_id=message.agent_id,
        sequence=message.sequence,
        sessions=tuple(_session(session_from_wire(each)) for each in message.sessions),
        iterations=tuple(_balance(iteration_from_wire(each)) for each in message.iterations),
        events=tuple(map(_events, message.events)),
        load=load_from_wire(message.load),
        roots={job_id: _root(job_id, root) for job_id, root in message.roots.items()},
    )


def _session(session: SessionStatus) -> SessionStatus:
    if not session.job_id or not session.session_id:
        raise ProtocolError(f"session of rank {session.rank} without a job id or a session id")
    if not 0 <= session.rank < session.world_size <= MAX_WORLD_SIZE:
        raise ProtocolError(f"rank {session.rank} of {session.world_size}: rank must be below it")
    return session


def _balance(status: IterationStatus) -> IterationStatus:
    if not status.job_id or not status.session_id:
        raise ProtocolError(f"balance of rank {status.rank} without a job id or a session id")
    return status


def _events(message: coordinator_pb2.RankEvents) -> tuple[RankEvents, EventColumns]:
    if not message.job_id:
        raise ProtocolError(f"events of rank {message.rank} without a job id")
    if message.rank >= MAX_WORLD_SIZE:
        raise ProtocolError(f"events of rank {message.rank}: at most {MAX_WORLD_SIZE} ranks")
    try:
        columns = events_from_wire(message.columns)
    except OverflowError as error:
        raise ProtocolError(f"events of rank {message.rank}: {error}") from None
    return RankEvents(message.job_id, message.rank), columns


def _root(job_id: str, root: str) -> str:
    if not job_id or not root.startswith("/") or "\0" in root:
        raise ProtocolError(f"tree {root!r} of job {job_id!r} is not an absolute path")
    return root

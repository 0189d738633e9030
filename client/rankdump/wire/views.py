"""Status, order and hints as messages and back: what people and scripts ask for."""

from __future__ import annotations

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import EventKind
from rankdump.contract.status import (
    ArrivalHint,
    IterationStatus,
    Load,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump.wire.v1 import coordinator_pb2, events_pb2, status_pb2

_STATES = {
    SessionState.OPEN: status_pb2.SESSION_STATE_OPEN,
    SessionState.CLOSED: status_pb2.SESSION_STATE_CLOSED,
    SessionState.LOST: status_pb2.SESSION_STATE_LOST,
}
_STATES_BACK = {number: state for state, number in _STATES.items()}
_KIND_NUMBERS = {kind: events_pb2.EventKind.Value(f"EVENT_KIND_{kind.name}") for kind in EventKind}


def _kind(number: int) -> EventKind:
    try:
        return EventKind(number)
    except ValueError:
        raise ProtocolError(f"event of unknown kind {number}") from None


def session_to_wire(session: SessionStatus) -> status_pb2.SessionStatus:
    """Return the message of one session's state."""
    return status_pb2.SessionStatus(
        job_id=session.job_id,
        session_id=session.session_id,
        rank=session.rank,
        world_size=session.world_size,
        device=session.device,
        host=session.host,
        pid=session.pid,
        state=_STATES[session.state],
        excluded=session.excluded,
        iterations_seen=session.iterations_seen,
        notes=session.notes,
    )


def session_from_wire(message: status_pb2.SessionStatus) -> SessionStatus:
    """Read one session's state."""
    if message.state not in _STATES_BACK:
        raise ProtocolError(f"session in unknown state {message.state}")
    return SessionStatus(
        job_id=message.job_id,
        session_id=message.session_id,
        rank=message.rank,
        world_size=message.world_size,
        device=message.device,
        host=message.host,
        pid=message.pid,
        state=_STATES_BACK[message.state],
        excluded=message.excluded,
        iterations_seen=message.iterations_seen,
        notes=tuple(message.notes),
    )


_COUNTS = (
    "job_id",
    "session_id",
    "rank",
    "iteration",
    "complete",
    "expected",
    "stored",
    "linked",
    "degraded",
    "bytes_in",
    "bytes_stored",
)


def iteration_to_wire(status: IterationStatus) -> status_pb2.IterationStatus:
    """Return the message of one iteration's balance."""
    counts = {name: getattr(status, name) for name in _COUNTS}
    return status_pb2.IterationStatus(dropped=status.dropped, **counts)


def iteration_from_wire(message: status_pb2.IterationStatus) -> IterationStatus:
    """Read one iteration's balance."""
    counts = {name: getattr(message, name) for name in _COUNTS}
    return IterationStatus(dropped=dict(message.dropped), **counts)


def load_to_wire(load: Load) -> status_pb2.Load:
    """Return the message of an agent's load."""
    return status_pb2.Load(
        queued_records=load.queued_records,
        queued_bytes=load.queued_bytes,
        disk_free_bytes=load.disk_free_bytes,
        disk_total_bytes=load.disk_total_bytes,
    )


def load_from_wire(message: status_pb2.Load) -> Load:
    """Read an agent's load."""
    return Load(
        message.queued_records,
        message.queued_bytes,
        message.disk_free_bytes,
        message.disk_total_bytes,
    )


def view_to_wire(view: StatusView) -> status_pb2.StatusView:
    """Return the message of the whole picture."""
    return status_pb2.StatusView(
        sessions=map(session_to_wire, view.sessions),
        iterations=map(iteration_to_wire, view.iterations),
        load=load_to_wire(view.load),
        roots=view.roots,
        findings=view.findings,
    )


def view_from_wire(message: status_pb2.StatusView) -> StatusView:
    """Read the whole picture."""
    return StatusView(
        sessions=tuple(map(session_from_wire, message.sessions)),
        iterations=tuple(map(iteration_from_wire, message.iterations)),
        load=load_from_wire(message.load),
        roots=tuple(message.roots),
        findings=tuple(message.findings),
    )


def entry_to_wire(entry: OrderEntry) -> coordinator_pb2.OrderEntry:
    """Return the message of one line of the global order."""
    return coordinator_pb2.OrderEntry(
        position=entry.position,
        graph=entry.graph,
        iteration=entry.iteration,
        ranks=entry.ranks,
        name=entry.name,
        kind=_KIND_NUMBERS[entry.kind],
        group=entry.group,
        sequence=entry.sequence,
        start_us=entry.start_us,
        end_us=entry.end_us,
        missing=entry.missing,
    )


def entry_from_wire(message: coordinator_pb2.OrderEntry) -> OrderEntry:
    """Read one line of the global order."""
    return OrderEntry(
        position=message.position,
        graph=message.graph,
        iteration=message.iteration,
        ranks=tuple(message.ranks),
        name=message.name,
        kind=_kind(message.kind),
        group=message.group,
        sequence=message.sequence,
        start_us=message.start_us,
        end_us=message.end_us,
        missing=tuple(message.missing),
    )


def hint_to_wire(hint: ArrivalHint) -> coordinator_pb2.ArrivalHint:
    """Return the message of one hint."""
    return coordinator_pb2.ArrivalHint(
        job_id=hint.job_id,
        group=hint.group,
        kind=_KIND_NUMBERS[hint.kind],
        iteration=hint.iteration,
        sequence=hint.sequence,
        spread_us=hint.spread_us,
        first_rank=hint.first_rank,
        last_rank=hint.last_rank,
        reason=hint.reason,
    )


def hint_from_wire(message: coordinator_pb2.ArrivalHint) -> ArrivalHint:
    """Read one hint."""
    return ArrivalHint(
        job_id=message.job_id,
        group=message.group,
        kind=_kind(message.kind),
        iteration=message.iteration,
        sequence=message.sequence,
        spread_us=message.spread_us,
        first_rank=message.first_rank,
        last_rank=message.last_rank,
        reason=message.reason,
    )

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
from rankdump.wire.fields import common
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
    rest = common(session, SessionStatus, "state")
    return status_pb2.SessionStatus(state=_STATES[session.state], **rest)


def session_from_wire(message: status_pb2.SessionStatus) -> SessionStatus:
    """Read one session's state."""
    if message.state not in _STATES_BACK:
        raise ProtocolError(f"session in unknown state {message.state}")
    rest = common(message, SessionStatus, "state", "notes")
    return SessionStatus(state=_STATES_BACK[message.state], notes=tuple(message.notes), **rest)


def iteration_to_wire(status: IterationStatus) -> status_pb2.IterationStatus:
    """Return the message of one iteration's balance."""
    return status_pb2.IterationStatus(**common(status, IterationStatus))


def iteration_from_wire(message: status_pb2.IterationStatus) -> IterationStatus:
    """Read one iteration's balance."""
    rest = common(message, IterationStatus, "dropped")
    return IterationStatus(dropped=dict(message.dropped), **rest)


def load_to_wire(load: Load) -> status_pb2.Load:
    """Return the message of an agent's load."""
    return status_pb2.Load(**common(load, Load))


def load_from_wire(message: status_pb2.Load) -> Load:
    """Read an agent's load."""
    return Load(**common(message, Load))


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
    rest = common(entry, OrderEntry, "kind")
    return coordinator_pb2.OrderEntry(kind=_KIND_NUMBERS[entry.kind], **rest)


def entry_from_wire(message: coordinator_pb2.OrderEntry) -> OrderEntry:
    """Read one line of the global order."""
    rest = common(message, OrderEntry, "kind", "ranks", "missing")
    lists = {"ranks": tuple(message.ranks), "missing": tuple(message.missing)}
    return OrderEntry(kind=_kind(message.kind), **lists, **rest)


def hint_to_wire(hint: ArrivalHint) -> coordinator_pb2.ArrivalHint:
    """Return the message of one hint."""
    rest = common(hint, ArrivalHint, "kind")
    return coordinator_pb2.ArrivalHint(kind=_KIND_NUMBERS[hint.kind], **rest)


def hint_from_wire(message: coordinator_pb2.ArrivalHint) -> ArrivalHint:
    """Read one hint."""
    return ArrivalHint(kind=_kind(message.kind), **common(message, ArrivalHint, "kind"))

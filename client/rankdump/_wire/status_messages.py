"""Messages of status, execution order, findings, hints and metrics, and frozen values, in both
directions.
"""

from __future__ import annotations

from collections.abc import Iterable

from rankdump._core.events import EventKind, Finding, FindingKind
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    ClockEstimate,
    DiskStatus,
    IterationStatus,
    JobNeed,
    JobUsage,
    LedgerStatus,
    MemoryStatus,
    MergeStatus,
    MetricSample,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdump._wire.message_fields import copy_fields
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import coordinator_pb2, events_pb2, metrics_pb2, status_pb2

_STATE_NUMBERS = {
    SessionState.OPEN: status_pb2.SESSION_STATE_OPEN,
    SessionState.CLOSED: status_pb2.SESSION_STATE_CLOSED,
    SessionState.LOST: status_pb2.SESSION_STATE_LOST,
}
_STATES_BY_NUMBER = {number: state for state, number in _STATE_NUMBERS.items()}
_KIND_NUMBERS = {kind: events_pb2.EventKind.Value(f"EVENT_KIND_{kind.name}") for kind in EventKind}


def _parse_event_kind(number: int) -> EventKind:
    try:
        return EventKind(number)
    except ValueError:
        raise ProtocolError(f"an event has the unknown kind {number}") from None


def session_to_wire(session: SessionStatus) -> status_pb2.SessionStatus:
    """Return the message of one session's state."""
    rest = copy_fields(session, SessionStatus, "state")
    return status_pb2.SessionStatus(state=_STATE_NUMBERS[session.state], **rest)


def session_from_wire(message: status_pb2.SessionStatus) -> SessionStatus:
    """Read one session's state."""
    if message.state not in _STATES_BY_NUMBER:
        raise ProtocolError(f"a session has the unknown state {message.state}")
    rest = copy_fields(message, SessionStatus, "state", "notes")
    return SessionStatus(state=_STATES_BY_NUMBER[message.state], notes=tuple(message.notes), **rest)


def iteration_to_wire(status: IterationStatus) -> status_pb2.IterationStatus:
    """Return the message of one iteration's balance."""
    return status_pb2.IterationStatus(**copy_fields(status, IterationStatus))


def iteration_from_wire(message: status_pb2.IterationStatus) -> IterationStatus:
    """Read one iteration's balance."""
    rest = copy_fields(message, IterationStatus, "dropped")
    return IterationStatus(dropped=dict(message.dropped), **rest)


def load_to_wire(load: AgentLoad) -> status_pb2.Load:
    """Return the message of an agent's load."""
    return status_pb2.Load(**copy_fields(load, AgentLoad))


def load_from_wire(message: status_pb2.Load) -> AgentLoad:
    """Read an agent's load."""
    return AgentLoad(**copy_fields(message, AgentLoad))


def agent_to_wire(agent: AgentStatus) -> status_pb2.AgentStatus:
    """Return the message of an agent as its coordinator knows it."""
    rest = copy_fields(agent, AgentStatus, "clock", "load")
    clock = {
        f"clock_{name}": value for name, value in copy_fields(agent.clock, ClockEstimate).items()
    }
    return status_pb2.AgentStatus(load=load_to_wire(agent.load), **rest, **clock)


def agent_from_wire(message: status_pb2.AgentStatus) -> AgentStatus:
    """Read an agent as its coordinator knows it."""
    clock = ClockEstimate(
        message.clock_offset_us, message.clock_error_us, message.clock_steps, message.clock_known
    )
    rest = copy_fields(message, AgentStatus, "clock", "load")
    return AgentStatus(clock=clock, load=load_from_wire(message.load), **rest)


def finding_to_wire(finding: Finding) -> status_pb2.Finding:
    """Return the message of a finding."""
    return status_pb2.Finding(kind=finding.kind.value, **copy_fields(finding, Finding, "kind"))


def finding_from_wire(message: status_pb2.Finding) -> Finding:
    """Read a finding; ProtocolError when it is of an unknown kind."""
    try:
        kind = FindingKind(message.kind)
    except ValueError:
        raise ProtocolError(f"a finding has the unknown kind {message.kind!r}") from None
    rest = copy_fields(message, Finding, "kind", "ranks")
    return Finding(kind=kind, ranks=tuple(message.ranks), **rest)


def timeout_hint_to_wire(hint: TimeoutHint) -> status_pb2.TimeoutHint:
    """Return the message of a hint."""
    return status_pb2.TimeoutHint(
        level=hint.level.value,
        limit=None if hint.limit is None else _limit_to_wire(hint.limit),
        limits=map(_limit_to_wire, hint.limits),
        **copy_fields(hint, TimeoutHint, "level", "limit", "limits"),
    )


def timeout_hint_from_wire(message: status_pb2.TimeoutHint) -> TimeoutHint:
    """Read a hint; ProtocolError when it is of an unknown level."""
    try:
        level = HintLevel(message.level)
    except ValueError:
        raise ProtocolError(f"a hint has the unknown level {message.level!r}") from None
    return TimeoutHint(
        level=level,
        limit=_limit_from_wire(message.limit) if message.HasField("limit") else None,
        limits=tuple(map(_limit_from_wire, message.limits)),
        settings=tuple(message.settings),
        **copy_fields(message, TimeoutHint, "level", "limit", "limits", "settings"),
    )


def _limit_to_wire(limit: TimeoutLimit) -> status_pb2.TimeoutLimit:
    return status_pb2.TimeoutLimit(**copy_fields(limit, TimeoutLimit))


def _limit_from_wire(message: status_pb2.TimeoutLimit) -> TimeoutLimit:
    rest = copy_fields(message, TimeoutLimit, "ranks")
    return TimeoutLimit(ranks=tuple(message.ranks), **rest)


def view_to_wire(view: StatusView) -> status_pb2.StatusView:
    """Return the message of the whole picture."""
    return status_pb2.StatusView(
        sessions=map(session_to_wire, view.sessions),
        iterations=map(iteration_to_wire, view.iterations),
        load=load_to_wire(view.load),
        roots=view.roots,
        findings=view.findings,
        agents=map(agent_to_wire, view.agents),
        merges=(status_pb2.MergeStatus(**copy_fields(merge, MergeStatus)) for merge in view.merges),
        hints=map(timeout_hint_to_wire, view.hints),
        order_findings=map(finding_to_wire, view.order_findings),
        disks=(status_pb2.DiskStatus(**copy_fields(disk, DiskStatus)) for disk in view.disks),
        usage=(status_pb2.JobUsage(**copy_fields(job, JobUsage)) for job in view.usage),
        memory=status_pb2.MemoryStatus(**copy_fields(view.memory, MemoryStatus)),
        needs=(status_pb2.JobNeed(**copy_fields(need, JobNeed)) for need in view.needs),
        ledger=status_pb2.LedgerStatus(**copy_fields(view.ledger, LedgerStatus)),
    )


def view_from_wire(message: status_pb2.StatusView) -> StatusView:
    """Read the whole picture."""
    return StatusView(
        sessions=tuple(map(session_from_wire, message.sessions)),
        iterations=tuple(map(iteration_from_wire, message.iterations)),
        load=load_from_wire(message.load),
        roots=tuple(message.roots),
        findings=tuple(message.findings),
        agents=tuple(map(agent_from_wire, message.agents)),
        merges=tuple(MergeStatus(**copy_fields(merge, MergeStatus)) for merge in message.merges),
        hints=tuple(map(timeout_hint_from_wire, message.hints)),
        order_findings=tuple(map(finding_from_wire, message.order_findings)),
        disks=tuple(DiskStatus(**copy_fields(disk, DiskStatus)) for disk in message.disks),
        usage=tuple(JobUsage(**copy_fields(job, JobUsage)) for job in message.usage),
        memory=MemoryStatus(**copy_fields(message.memory, MemoryStatus)),
        needs=tuple(JobNeed(**copy_fields(need, JobNeed)) for need in message.needs),
        ledger=LedgerStatus(**copy_fields(message.ledger, LedgerStatus)),
    )


def samples_to_wire(samples: Iterable[MetricSample]) -> metrics_pb2.MetricsResponse:
    """Return the message of metrics."""
    return metrics_pb2.MetricsResponse(
        samples=(
            metrics_pb2.MetricSample(**copy_fields(sample, MetricSample)) for sample in samples
        )
    )


def samples_from_wire(message: metrics_pb2.MetricsResponse) -> list[MetricSample]:
    """Read metrics."""
    return [
        MetricSample(sample.name, sample.value, dict(sample.labels)) for sample in message.samples
    ]


def entry_to_wire(entry: OrderEntry) -> coordinator_pb2.OrderEntry:
    """Return the message of one line of the global order."""
    rest = copy_fields(entry, OrderEntry, "kind")
    return coordinator_pb2.OrderEntry(kind=_KIND_NUMBERS[entry.kind], **rest)


def entry_from_wire(message: coordinator_pb2.OrderEntry) -> OrderEntry:
    """Read one line of the global order."""
    rest = copy_fields(message, OrderEntry, "kind")
    lists = ("ranks", "missing", "rank_positions", "streams")
    rest |= {name: tuple(rest[name]) for name in lists}
    return OrderEntry(kind=_parse_event_kind(message.kind), **rest)

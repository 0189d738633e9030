"""Conversion between messages of status, execution order, findings, hints and metrics, and frozen
values.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from rankdump._core.events import Finding
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    ClockEstimate,
    IterationStatus,
    MetricSample,
    OrderEntry,
    SessionStatus,
    StatusView,
)
from rankdump._core.timeouts import TimeoutHint
from rankdump._wire.message_fields import from_message, make_fields
from rankdump.wire.v1 import coordinator_pb2, metrics_pb2, status_pb2


def session_to_wire(session: SessionStatus) -> status_pb2.SessionStatus:
    """Return the message of the status of one session."""
    return status_pb2.SessionStatus(**make_fields(session))


def iteration_to_wire(status: IterationStatus) -> status_pb2.IterationStatus:
    """Return the message of one iteration's balance."""
    return status_pb2.IterationStatus(**make_fields(status))


def load_to_wire(load: AgentLoad) -> status_pb2.Load:
    """Return the message of an agent's load."""
    return status_pb2.Load(**make_fields(load))


def finding_to_wire(finding: Finding) -> status_pb2.Finding:
    """Return the message of a finding."""
    return status_pb2.Finding(**make_fields(finding))


def timeout_hint_to_wire(hint: TimeoutHint) -> status_pb2.TimeoutHint:
    """Return the message of a hint."""
    return status_pb2.TimeoutHint(**make_fields(hint))


def entry_to_wire(entry: OrderEntry) -> coordinator_pb2.OrderEntry:
    """Return the message of one entry of the global execution order."""
    return coordinator_pb2.OrderEntry(**make_fields(entry))


session_from_wire = partial(from_message, SessionStatus)
iteration_from_wire = partial(from_message, IterationStatus)
load_from_wire = partial(from_message, AgentLoad)
finding_from_wire = partial(from_message, Finding)
timeout_hint_from_wire = partial(from_message, TimeoutHint)
entry_from_wire = partial(from_message, OrderEntry)


def agent_to_wire(agent: AgentStatus) -> status_pb2.AgentStatus:
    """Return the message of an agent's status, as its coordinator knows it."""
    clock = {f"clock_{name}": value for name, value in make_fields(agent.clock).items()}
    return status_pb2.AgentStatus(**make_fields(agent, "clock"), **clock)


def agent_from_wire(message: status_pb2.AgentStatus) -> AgentStatus:
    """Convert the message of an agent's status, as its coordinator knows it."""
    clock = ClockEstimate(
        message.clock_offset_us, message.clock_error_us, message.clock_steps, message.clock_known
    )
    return from_message(AgentStatus, message, clock=clock)


def view_to_wire(view: StatusView) -> status_pb2.StatusView:
    """Return the message of a complete status."""
    agents = map(agent_to_wire, view.agents)
    return status_pb2.StatusView(agents=agents, **make_fields(view, "agents"))


def view_from_wire(message: status_pb2.StatusView) -> StatusView:
    """Convert the message of a complete status."""
    agents = tuple(map(agent_from_wire, message.agents))
    return from_message(StatusView, message, agents=agents)


def samples_to_wire(samples: Iterable[MetricSample]) -> metrics_pb2.MetricsResponse:
    """Return the message of metrics."""
    messages = (metrics_pb2.MetricSample(**make_fields(sample)) for sample in samples)
    return metrics_pb2.MetricsResponse(samples=messages)


def samples_from_wire(message: metrics_pb2.MetricsResponse) -> list[MetricSample]:
    """Convert the message of metrics."""
    return [from_message(MetricSample, sample) for sample in message.samples]

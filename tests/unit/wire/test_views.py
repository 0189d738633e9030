"""Round trips of status, order and hints through messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.wire_round_trip import counts, sent, sint64, texts, uint32, uint64

from rankdump._core.events import EventKind
from rankdump._core.record import TensorSide
from rankdump._core.status import (
    AgentLoad,
    IterationStatus,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump._core.timeouts import HintLevel, TimeoutHint, TimeoutLimit
from rankdump._wire import status_messages
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, events_pb2, status_pb2

sessions = st.builds(
    SessionStatus,
    job_id=texts,
    session_id=texts,
    rank=uint32,
    world_size=uint32,
    device=uint32,
    host=texts,
    pid=uint64,
    state=st.sampled_from(SessionState),
    excluded=texts,
    iterations_seen=uint64,
    notes=st.lists(texts, max_size=2).map(tuple),
)
iterations = st.builds(
    IterationStatus,
    job_id=texts,
    session_id=texts,
    rank=uint32,
    iteration=uint64,
    complete=st.booleans(),
    expected=uint64,
    stored=uint64,
    linked=uint64,
    degraded=uint64,
    dropped=counts,
    bytes_in=uint64,
    bytes_stored=uint64,
    degraded_by=counts,
)
entries = st.builds(
    OrderEntry,
    position=uint64,
    graph=uint32,
    iteration=uint64,
    ranks=st.lists(uint32, max_size=3).map(tuple),
    name=texts,
    kind=st.sampled_from(EventKind),
    group=texts,
    sequence=uint64,
    start_us=sint64,
    end_us=sint64,
    missing=st.lists(uint32, max_size=3).map(tuple),
)
limits = st.builds(
    TimeoutLimit,
    name=texts,
    limit_us=uint64,
    source=texts,
    ranks=st.lists(uint32, max_size=3).map(tuple),
)
hints = st.builds(
    TimeoutHint,
    job_id=texts,
    group=texts,
    backend=texts,
    level=st.sampled_from(HintLevel),
    waiting=st.booleans(),
    kind=texts,
    name=texts,
    iteration=uint64,
    sequence=sint64,
    first_rank=uint32,
    last_rank=uint32,
    spread_us=uint64,
    dump_us=uint64,
    limit=st.none() | limits,
    limits=st.lists(limits, max_size=2).map(tuple),
    projected_us=uint64,
    projected_iteration=sint64,
    settings=st.lists(texts, max_size=2).map(tuple),
    reason=texts,
)
status_views = st.builds(
    StatusView,
    sessions=st.lists(sessions, max_size=2).map(tuple),
    iterations=st.lists(iterations, max_size=2).map(tuple),
    load=st.builds(AgentLoad, uint64, uint64, uint64, uint64),
    roots=st.lists(texts, max_size=2).map(tuple),
    findings=st.lists(texts, max_size=2).map(tuple),
)


@given(view=status_views)
def test_status_view_round_trip(view: StatusView):
    message = sent(status_messages.view_to_wire(view), status_pb2.StatusView)
    assert status_messages.view_from_wire(message) == view


@given(entry=entries)
def test_order_entry_round_trip(entry: OrderEntry):
    message = sent(status_messages.entry_to_wire(entry), coordinator_pb2.OrderEntry)
    assert status_messages.entry_from_wire(message) == entry


@given(hint=hints)
def test_timeout_hint_round_trip(hint: TimeoutHint):
    message = sent(status_messages.timeout_hint_to_wire(hint), status_pb2.TimeoutHint)
    assert status_messages.timeout_hint_from_wire(message) == hint


def test_timeout_hint_of_unknown_level_is_rejected():
    """Levels are texts on the wire."""
    with pytest.raises(ProtocolError, match="unknown level 'red'"):
        status_messages.timeout_hint_from_wire(status_pb2.TimeoutHint(level="red"))


@pytest.mark.parametrize("number", [0, 99, -1])
def test_status_view_rejects_unknown_enumerators(number: Any):
    """The unknown value is a state or a kind."""
    with pytest.raises(ProtocolError, match="unknown state"):
        status_messages.session_from_wire(status_pb2.SessionStatus(state=number))
    with pytest.raises(ProtocolError, match="unknown kind"):
        status_messages.entry_from_wire(coordinator_pb2.OrderEntry(kind=number))


def test_wire_enumerators_agree_with_those_here():
    """Messages and values number kinds alike, and every state and side has its number."""
    wire_kinds = dict(events_pb2.EventKind.items())
    assert wire_kinds.pop("EVENT_KIND_UNSPECIFIED") == 0
    assert wire_kinds == {f"EVENT_KIND_{kind.name}": kind.value for kind in EventKind}
    assert len(status_pb2.SessionState.items()) == len(SessionState) + 1
    assert len(agent_pb2.Side.items()) == len(TensorSide) + 1

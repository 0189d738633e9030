"""Messages to values and back: nothing is lost, and hostile numbers stop at the door."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import COLUMN_TYPES, Event, EventColumns, EventKind, ProcessGroup
from rankdump.contract.exchange import (
    IterationEnd,
    RecordHead,
    SessionEnd,
    SessionGrant,
    SessionRequest,
)
from rankdump.contract.key import Side, TensorKey
from rankdump.contract.status import (
    ArrivalHint,
    IterationStatus,
    Load,
    OrderEntry,
    SessionState,
    SessionStatus,
    StatusView,
)
from rankdump.wire import convert, frames, views
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, events_pb2, status_pb2

uint32 = st.integers(0, 2**32 - 1)
uint64 = st.integers(0, 2**64 - 1)
sint64 = st.integers(-(2**63), 2**63 - 1)
blobs = st.binary(max_size=20)
# protobuf strings are UTF-8: unpaired surrogates cannot travel in them.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
counts = st.dictionaries(texts, uint64, max_size=3)


def sent(message, kind):
    """Return the message as the other side parses it."""
    return kind.FromString(message.SerializeToString())


# sessions

requests = st.builds(
    SessionRequest,
    job_id=names,
    session_id=names,
    rank=st.just(0),
    world_size=st.integers(1, convert.MAX_WORLD_SIZE),
    device=uint32,
    host=texts,
    pid=uint64,
    framework=texts,
    device_target=texts,
    plan_json=blobs,
    config_source=blobs,
).flatmap(lambda r: st.integers(0, r.world_size - 1).map(lambda n: replace(r, rank=n)))


@given(request=requests)
def test_session_request(request: SessionRequest):
    """An introduction comes back as it was."""
    message = sent(convert.session_request_to_wire(request), agent_pb2.OpenSessionRequest)
    assert convert.session_request_from_wire(message) == request


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"session_id": ""}, "session id"),
        ({"job_id": ""}, "job id"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": 2**32 - 1}, "rank 4294967295 of 2"),
        ({"world_size": 2**32 - 1}, "of 4294967295"),
    ],
)
def test_hostile_session_request(fields: dict[str, Any], cause: str):
    """An introduction that contradicts itself is refused with its numbers."""
    good: dict[str, Any] = {"job_id": "j", "session_id": "s", "rank": 0, "world_size": 2}
    with pytest.raises(ProtocolError, match=cause):
        convert.session_request_from_wire(agent_pb2.OpenSessionRequest(**(good | fields)))


@given(grant=st.builds(SessionGrant, blobs, uint64, uint64, texts))
def test_session_grant(grant: SessionGrant):
    """An answer comes back as it was."""
    message = sent(convert.session_grant_to_wire(grant), agent_pb2.OpenSessionResponse)
    assert convert.session_grant_from_wire(message) == grant


# records

heads = st.builds(
    RecordHead,
    key=st.builds(
        TensorKey,
        rank=st.just(3),
        net_name=st.just("Net"),
        graph=uint32,
        iteration=uint64,
        timestamp_us=uint64,
        op_type=texts,
        op_name=texts,
        side=st.sampled_from(Side),
        slot=uint32,
        task=uint32,
        stream=uint32,
    ),
    dtype=texts,
    shape=st.lists(uint64, max_size=convert.MAX_DIMENSIONS).map(tuple),
    byte_count=uint64,
    argument=texts,
)


@given(head=heads, data=blobs)
def test_record(head: RecordHead, data: bytes):
    """A record's head and first bytes come back; rank and net name are the session's own."""
    message = sent(convert.record_to_wire(head, data), agent_pb2.Record)
    assert convert.record_from_wire(message, rank=3, net_name="Net") == head
    assert message.data == data


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({}, "record with side 0"),
        ({"side": 7}, "record with side 7"),
        ({"side": -1}, "record with side -1"),
        ({"side": 1, "shape": [1] * 65}, "65 dimensions"),
    ],
)
def test_hostile_record(fields: dict[str, Any], cause: str):
    """A record without a side or with too many dimensions is refused."""
    with pytest.raises(ProtocolError, match=cause):
        convert.record_from_wire(agent_pb2.Record(**fields), rank=0, net_name="Net")


def test_unpaired_surrogates():
    """A name that UTF-8 cannot hold travels with a mark in its place."""
    bad = "a\ud800/b"
    key = TensorKey(3, "Net", 0, 0, 1, bad, bad, Side.INPUT, 0)
    message = sent(
        convert.record_to_wire(RecordHead(key, "int8", (), 1, bad), b"x"), agent_pb2.Record
    )
    assert (message.op_type, message.op_name, message.argument) == ("a?/b", "a?/b", "a?/b")
    columns = EventColumns.of([Event(0, 0, 0, 0, bad, EventKind.OPERATOR, 0, 0)])
    assert list(convert.events_to_wire(columns).names) == ["", "a?/b"]


# events

words = st.sampled_from(["", "Default/a-op0", "world", "float32"])
events = st.builds(
    Event,
    graph=uint32,
    iteration=uint64,
    position=uint64,
    end_position=uint64,
    name=words,
    kind=st.sampled_from(EventKind),
    start_us=sint64,
    end_us=sint64,
    stream=uint32,
    group=words,
    sequence=uint64,
    element_count=uint64,
    dtype=words,
    peer=st.integers(-1, 2**31 - 1),
)
groups = st.lists(
    st.builds(ProcessGroup, texts, st.lists(uint32, max_size=4).map(tuple)), max_size=3
).map(tuple)


def same_columns(left: EventColumns, right: EventColumns) -> bool:
    return (left.names, left.groups, left.events()) == (right.names, right.groups, right.events())


@given(batch=st.lists(events, max_size=10), groups=groups)
def test_events(batch: list[Event], groups: tuple[ProcessGroup, ...]):
    """A batch of events comes back as it was, in columns of the right types."""
    columns = EventColumns.of(batch, groups)
    message = sent(convert.events_to_wire(columns), events_pb2.EventColumns)
    back = convert.events_from_wire(message)
    assert same_columns(back, columns)
    assert {field: column.dtype for field, column in back.columns.items()} == COLUMN_TYPES


def test_no_events():
    """An empty message is an empty batch."""
    assert len(convert.events_from_wire(events_pb2.EventColumns())) == 0


ONE = EventColumns.of([Event(0, 0, 0, 0, "a", EventKind.OPERATOR, 0, 0)])


@pytest.mark.parametrize("field", list(COLUMN_TYPES))
def test_columns_of_different_lengths(field: str):
    """Each column must have as many elements as the others."""
    message = convert.events_to_wire(ONE)
    getattr(message, field).append(1)
    with pytest.raises(ProtocolError, match="different lengths"):
        convert.events_from_wire(message)


@pytest.mark.parametrize("field", ["name", "group", "dtype"])
def test_index_past_the_table(field: str):
    """A text must be in the table."""
    message = convert.events_to_wire(ONE)
    getattr(message, field)[0] = len(message.names)
    with pytest.raises(ProtocolError, match=f"{field} points past 2 names"):
        convert.events_from_wire(message)


@pytest.mark.parametrize("kind", [0, 13, 255, 256, 257, 2**31 - 1, -1, -255])
def test_unknown_kind(kind: Any):
    """A kind from a newer or a broken client is refused, and never wraps into another kind."""
    message = convert.events_to_wire(ONE)
    message.kind[0] = kind
    with pytest.raises(ProtocolError, match="event"):
        convert.events_from_wire(sent(message, events_pb2.EventColumns))


# declarations


@given(end=st.builds(IterationEnd, uint64, uint64, counts, uint64), sequence=uint64)
def test_iteration_end(end: IterationEnd, sequence: int):
    """The end of an iteration comes back with its number."""
    frame = sent(frames.declaration_frame(sequence, end), agent_pb2.Frame)
    assert frame.sequence == sequence
    assert convert.declaration_from_wire(frame) == end


@given(end=st.builds(SessionEnd, uint64, st.lists(texts, max_size=3).map(tuple)))
def test_session_end(end: SessionEnd):
    """A goodbye comes back as it was."""
    frame = sent(frames.declaration_frame(1, end), agent_pb2.Frame)
    assert convert.declaration_from_wire(frame) == end


def test_events_in_a_frame():
    """Events travel in a frame too."""
    frame = sent(frames.declaration_frame(9, ONE), agent_pb2.Frame)
    back = convert.declaration_from_wire(frame)
    assert isinstance(back, EventColumns)
    assert same_columns(back, ONE)


@pytest.mark.parametrize(
    "frame",
    [
        agent_pb2.Frame(sequence=4),
        agent_pb2.Frame(sequence=4, record=agent_pb2.Record()),
        agent_pb2.Frame(sequence=4, chunk=agent_pb2.Chunk()),
    ],
)
def test_no_declaration(frame: agent_pb2.Frame):
    """A frame of any other kind is refused with its number."""
    with pytest.raises(ProtocolError, match="frame 4 with body"):
        convert.declaration_from_wire(frame)


@given(sizes=st.lists(st.integers(0, frames.CHUNK_BYTES), max_size=6))
def test_batches(sizes: list[int]):
    """Frames keep their order, no message is empty, and only the last one may be small."""
    limit = frames.CHUNK_BYTES
    sent_frames = [
        agent_pb2.Frame(sequence=n, chunk=agent_pb2.Chunk(data=bytes(size)))
        for n, size in enumerate(sizes)
    ]
    messages = [list(request.batch.frames) for request in frames.batches(sent_frames)]
    assert [frame for batch in messages for frame in batch] == sent_frames
    totals = [[frame.ByteSize() for frame in batch] for batch in messages]
    for total in totals:
        assert total
        assert sum(total[:-1]) < limit
    for total in totals[:-1]:
        assert sum(total) >= limit


# views

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
hints = st.builds(
    ArrivalHint,
    job_id=texts,
    group=texts,
    kind=st.sampled_from(EventKind),
    iteration=uint64,
    sequence=uint64,
    spread_us=uint64,
    first_rank=uint32,
    last_rank=uint32,
    reason=texts,
)
status_views = st.builds(
    StatusView,
    sessions=st.lists(sessions, max_size=2).map(tuple),
    iterations=st.lists(iterations, max_size=2).map(tuple),
    load=st.builds(Load, uint64, uint64, uint64, uint64),
    roots=st.lists(texts, max_size=2).map(tuple),
    findings=st.lists(texts, max_size=2).map(tuple),
)


@given(view=status_views)
def test_view(view: StatusView):
    """The whole picture comes back as it was."""
    message = sent(views.view_to_wire(view), status_pb2.StatusView)
    assert views.view_from_wire(message) == view


@given(entry=entries)
def test_entry(entry: OrderEntry):
    """A line of the order comes back as it was."""
    message = sent(views.entry_to_wire(entry), coordinator_pb2.OrderEntry)
    assert views.entry_from_wire(message) == entry


@given(hint=hints)
def test_hint(hint: ArrivalHint):
    """A hint comes back as it was."""
    message = sent(views.hint_to_wire(hint), coordinator_pb2.ArrivalHint)
    assert views.hint_from_wire(message) == hint


@pytest.mark.parametrize("number", [0, 99, -1])
def test_unknown_enumerators(number: Any):
    """A state or a kind that nobody knows is refused."""
    with pytest.raises(ProtocolError, match="unknown state"):
        views.session_from_wire(status_pb2.SessionStatus(state=number))
    with pytest.raises(ProtocolError, match="unknown kind"):
        views.entry_from_wire(coordinator_pb2.OrderEntry(kind=number))
    with pytest.raises(ProtocolError, match="unknown kind"):
        views.hint_from_wire(coordinator_pb2.ArrivalHint(kind=number))


def test_enumerators_agree():
    """Wire and contract number the kinds alike, and every state and side has its number."""
    wire_kinds = dict(events_pb2.EventKind.items())
    assert wire_kinds.pop("EVENT_KIND_UNSPECIFIED") == 0
    assert wire_kinds == {f"EVENT_KIND_{kind.name}": kind.value for kind in EventKind}
    assert len(status_pb2.SessionState.items()) == len(SessionState) + 1
    assert len(agent_pb2.Side.items()) == len(Side) + 1

"""Messages to values and back: nothing is lost, and hostile numbers are rejected."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.event_lists import list_events
from support.record_heads import head_of
from support.tensor_layouts import layouts, shard_rows
from support.wire_round_trip import (
    blobs,
    lines,
    names,
    same_columns,
    sent,
    sint64,
    texts,
    uint32,
    uint63,
    uint64,
)

from rankdump._core.drop_reasons import DEGRADE_REASONS
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.events import (
    EVENT_COLUMN_TYPES,
    EventColumns,
    EventKind,
    ProcessGroup,
    RankEvent,
    UnseenCollectives,
)
from rankdump._core.record import (
    MAX_FRAME_ROWS,
    PASS_PHASES,
    StatisticRows,
    TensorKey,
    TensorKind,
    TensorSide,
)
from rankdump._core.session_protocol import RecordHead, SessionEnd, SessionGrant, SessionRequest
from rankdump._core.tensor_fingerprint import FINGERPRINT_BYTES
from rankdump._core.tensor_layout import (
    LayoutSource,
)
from rankdump._wire import frames, session_messages
from rankdump._wire.message_fields import NUMBER_LIMIT
from rankdump._wire.metadata_messages import events_from_wire, events_to_wire
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2, events_pb2

# sessions

requests = st.builds(
    SessionRequest,
    job_id=lines.filter(bool),
    session_id=names,
    rank=st.just(0),
    world_size=st.integers(1, session_messages.MAX_WORLD_SIZE),
    device=uint32,
    host=lines,
    pid=st.integers(0, NUMBER_LIMIT - 1),
    framework=lines,
    device_target=lines,
    plan_json=blobs,
    config_source=blobs,
    secret=st.sampled_from([b"", b"s" * 32]),
).flatmap(lambda r: st.integers(0, r.world_size - 1).map(lambda n: replace(r, rank=n)))


@given(request=requests)
def test_session_request_round_trip(request: SessionRequest):
    message = sent(session_messages.session_request_to_wire(request), agent_pb2.OpenSessionRequest)
    assert session_messages.session_request_from_wire(message) == request


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"session_id": ""}, "session id"),
        ({"job_id": ""}, "job id"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"rank": 2**32 - 1}, "rank 4294967295 of 2"),
        ({"world_size": 2**32 - 1}, "of 4294967295"),
        ({"pid": 1 << 63}, "number 9223372036854775808"),
        ({"job_id": "j" * 257}, "job id of 257 characters"),
        ({"job_id": "j\x1b[2J"}, "printable"),
        ({"session_id": "s" * 257}, "session id of 257 characters"),
        ({"plan_json": bytes((4 << 20) + 1)}, "bytes of a plan"),
        ({"config_source": bytes((1 << 20) + 1)}, "bytes of a configuration"),
        ({"secret": b"short"}, "secret of 5 bytes"),
        ({"secret": bytes(65)}, "secret of 65 bytes"),
    ],
)
def test_session_request_with_contradictions_is_rejected(fields: dict[str, Any], cause: str):
    """The error has the numbers of the request."""
    good: dict[str, Any] = {"job_id": "j", "session_id": "s", "rank": 0, "world_size": 2}
    with pytest.raises(ProtocolError, match=cause):
        session_messages.session_request_from_wire(agent_pb2.OpenSessionRequest(**(good | fields)))


@given(grant=st.builds(SessionGrant, blobs, uint64, uint64, texts, redirect=texts))
def test_session_grant_round_trip(grant: SessionGrant):
    message = sent(session_messages.session_grant_to_wire(grant), agent_pb2.OpenSessionResponse)
    assert session_messages.session_grant_from_wire(message) == grant


# records and rows of figures

counts = st.integers(0, NUMBER_LIMIT - 1)
other_types = texts.filter(lambda name: name not in ELEMENT_TYPES)
tensor_kinds = st.builds(
    TensorKind,
    layout=st.none(),
    microbatch=st.none() | uint32,
    phase=st.sampled_from(PASS_PHASES),
    graph=uint32,
    op_type=texts,
    op_name=texts,
    side=st.sampled_from(TensorSide),
    slot=uint32,
    dtype=other_types,
    shape=st.lists(counts, max_size=session_messages.MAX_TENSOR_DIMENSIONS).map(tuple),
    byte_count=counts,
    argument=texts,
    constant=st.booleans(),
    model=st.sampled_from(["", "Net"]),
)


@st.composite
def kinds_with_layouts(draw: st.DrawFn) -> TensorKind:
    kind = draw(tensor_kinds)
    shape = tuple(min(extent, NUMBER_LIMIT >> 1) for extent in kind.shape)
    return kind._replace(shape=shape, layout=draw(layouts(shape)))


@given(kind=tensor_kinds | kinds_with_layouts())
def test_tensor_kind_round_trip(kind: TensorKind):
    """The kind is equal, and made of the same bytes each time."""
    data = session_messages.kind_to_wire(kind)
    assert session_messages.kind_from_wire(data) == kind
    session_messages._serialize_nameless.cache_clear()
    assert session_messages.kind_to_wire(kind) == data


LAYOUT = shard_rows(1, 2, (4,))
MESH = LAYOUT.mesh
FLAT = replace(LAYOUT, source=LayoutSource.FSDP1, flat_range=(2, 4))


@pytest.mark.parametrize(
    ("layout", "shape", "cause"),
    [
        (replace(LAYOUT, placements=()), (2,), "0 placements"),
        (replace(LAYOUT, coordinate=(2,)), (2,), "coordinate"),
        (replace(LAYOUT, global_offset=(3,)), (2,), "block of shape"),
        (replace(LAYOUT, global_offset=()), (2,), "offset"),
        (LAYOUT, (1, 2), "block of shape"),
        (replace(LAYOUT, mesh=replace(MESH, ranks=(0,))), (2,), "1 strides and 1 ranks"),
        (replace(LAYOUT, mesh=replace(MESH, strides=())), (2,), "0 strides and 0 ranks"),
        (FLAT, (3,), "padding"),
        (replace(FLAT, flat_range=(2, 5)), (3,), "range"),
    ],
)
def test_tensor_layout_with_contradictions_is_rejected(layout, shape, cause):
    """The error for a layout that does not fit its tensor or mesh has its numbers."""
    kind = TensorKind(0, "T", "a", TensorSide.INPUT, 0, "other", shape, 8, layout=layout)
    with pytest.raises(ProtocolError, match=cause):
        session_messages.kind_from_wire(session_messages.kind_to_wire(kind))


def test_tensor_kind_with_unknown_phase_is_rejected():
    kind = TensorKind(0, "T", "a", TensorSide.INPUT, 0, "other", (), 8, phase="later")
    with pytest.raises(ProtocolError, match="unknown phase 'later'"):
        session_messages.kind_from_wire(session_messages.kind_to_wire(kind))


heads = st.builds(
    lambda kind, iteration, timestamp_us, task, stream, switched_on: RecordHead(
        kind._replace(model="Net"), iteration, timestamp_us, 3, task, stream, switched_on
    ),
    tensor_kinds,
    counts,
    counts,
    uint32,
    uint32,
    st.booleans(),
)


@given(head=heads, data=blobs)
def test_record_head_round_trip(head: RecordHead, data: bytes):
    """Head and first bytes of a record are equal; rank and net name are those of the session."""
    message = sent(session_messages.record_to_wire(head, data), agent_pb2.Record)
    assert session_messages.record_from_wire(message, rank=3, net_name="Net") == head
    assert message.data == data


@given(heads=st.lists(heads, max_size=4), checksum=st.sampled_from([b"", bytes(range(16))]))
def test_record_body_has_the_fields_of_its_message(heads: list[RecordHead], checksum: bytes):
    """Its parts are encoded one by one; the kind of every second record was remembered before."""
    for number, head in enumerate(heads):
        if number % 2:
            session_messages.remember_kind(head.kind)
        body = frames.serialize_record_body(head, checksum)
        record = session_messages.record_to_wire(head, b"")
        record.checksum = checksum
        assert agent_pb2.Frame.FromString(body) == agent_pb2.Frame(record=record)


@given(
    rows=st.lists(st.tuples(tensor_kinds, counts, texts), max_size=5),
    iteration=counts,
    switched_on=st.booleans(),
    degraded=st.sampled_from(("", *DEGRADE_REASONS)),
    fingerprints=st.booleans(),
)
def test_statistic_rows_round_trip(
    rows: list[tuple[TensorKind, int, str]],
    iteration: int,
    switched_on: bool,
    degraded: str,
    fingerprints: bool,
):
    """Rows keep their order; every other one has a fingerprint."""
    columns = tuple(zip(*rows, strict=True)) or ((), (), ())
    sent_rows = StatisticRows(iteration, *columns, switched_on=switched_on, degraded=degraded)
    if fingerprints:
        column = tuple(bytes([n]) * FINGERPRINT_BYTES * (n % 2) for n in range(len(rows)))
        sent_rows = replace(sent_rows, fingerprints=column)
    message = sent(session_messages.statistic_rows_to_wire(sent_rows), agent_pb2.FigureRows)
    assert session_messages.statistic_rows_from_wire(message) == sent_rows


@pytest.mark.parametrize(
    ("fingerprints", "cause"),
    [
        ([b""], "2 rows of statistics have 1 fingerprints"),
        ([bytes(FINGERPRINT_BYTES)] * 3, "2 rows of statistics have 3 fingerprints"),
        ([bytes(FINGERPRINT_BYTES), b"x"], "a fingerprint has 1 bytes: none, or 264, are allowed"),
    ],
)
def test_wrong_fingerprints_are_rejected(fingerprints: list[bytes], cause: str):
    message = agent_pb2.FigureRows(
        kinds=[a_kind()] * 2, timestamps_us=(1, 2), figures=("1", "2"), fingerprints=fingerprints
    )
    with pytest.raises(ProtocolError, match=cause):
        session_messages.statistic_rows_from_wire(message)


def a_kind(**fields: Any) -> bytes:
    good: dict[str, Any] = {"side": 1, "dtype": "uint8", "shape": [3], "byte_count": 3}
    return agent_pb2.TensorKind(**(good | fields)).SerializeToString()


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"\xff", "has no valid kind"),
        (a_kind(side=0), "a record has the unknown side 0"),
        (a_kind(side=7), "a record has the unknown side 7"),
        (a_kind(side=-1), "a record has the unknown side -1"),
        (a_kind(shape=[1] * 65, byte_count=1), "65 dimensions"),
        (a_kind(dtype="", byte_count=1 << 63), "number over"),
        (a_kind(dtype="", shape=[1 << 63]), "number over"),
        (a_kind(byte_count=4), r"4 bytes for uint8 of shape \[3\]"),
        (a_kind(op_name="n" * 4097), "an op_name of 4097 characters"),
        (a_kind(op_type="n" * 4097), "an op_type of 4097 characters"),
        (a_kind(dtype="d" * 65), "an element type of 65 characters"),
        (a_kind(argument="a" * 1025), "an argument of 1025 characters"),
        (a_kind(model="m" * 257), "a model of 257 characters"),
        (a_kind(op_name="a\0b"), "contains a NUL"),
        (a_kind(op_name="\u4e00" * 30_000), "the kind of a record has"),
    ],
)
def test_tensor_kind_with_contradictions_is_rejected(data: bytes, cause: str):
    """It is rejected in a record and in rows of statistics."""
    with pytest.raises(ProtocolError, match=cause):
        session_messages.record_from_wire(agent_pb2.Record(kind=data), rank=0, net_name="Net")
    rows = agent_pb2.FigureRows(kinds=[data], timestamps_us=[1], figures=["1"])
    with pytest.raises(ProtocolError, match=cause):
        session_messages.statistic_rows_from_wire(rows)


@pytest.mark.parametrize("fields", [{"iteration": 1 << 63}, {"timestamp_us": 1 << 63}])
def test_record_with_impossible_numbers_is_rejected(fields: dict[str, Any]):
    """Numbers from the wire are stored in signed columns."""
    message = agent_pb2.Record(kind=a_kind(), **fields)
    with pytest.raises(ProtocolError, match="number over"):
        session_messages.record_from_wire(message, rank=0, net_name="Net")


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"figures": []}, r"\[0, 1\] rows"),
        ({"timestamps_us": [1, 2]}, r"\[1, 2\] rows"),
        ({"timestamps_us": [1 << 63]}, "number over"),
        ({"iteration": 1 << 63}, "number over"),
    ],
)
def test_statistic_rows_with_contradictions_are_rejected(fields: dict[str, Any], cause: str):
    """Columns have different lengths, or numbers that do not fit into a column."""
    good: dict[str, Any] = {"kinds": [a_kind()], "timestamps_us": [1], "figures": ["1"]}
    with pytest.raises(ProtocolError, match=cause):
        session_messages.statistic_rows_from_wire(agent_pb2.FigureRows(**(good | fields)))


def test_statistic_rows_above_the_limit_are_rejected():
    many = MAX_FRAME_ROWS + 1
    message = agent_pb2.FigureRows(
        kinds=[a_kind()] * many, timestamps_us=[1] * many, figures=["1"] * many
    )
    with pytest.raises(ProtocolError, match="at most 1024"):
        session_messages.statistic_rows_from_wire(message)


def test_tensor_kind_that_is_long_is_not_cached():
    """Kinds of usual operators are short; a client could fill a cache with long ones."""
    before = session_messages._parse_remembered_kind.cache_info().currsize
    for at in range(8):
        session_messages.kind_from_wire(a_kind(op_name=f"{at}" * 2000))
    assert session_messages._parse_remembered_kind.cache_info().currsize == before


def test_client_cuts_names_that_an_agent_would_reject():
    """One long name must not cause the rejection of the session."""
    kind = TensorKind(0, "t" * 5000, "n" * 5000, TensorSide.INPUT, 0, "d" * 70, (), 0, "a" * 2000)
    found = session_messages.kind_from_wire(session_messages.kind_to_wire(kind))
    lengths = [len(each) for each in (found.op_type, found.op_name, found.dtype, found.argument)]
    assert lengths == [4096, 4096, 64, 1024]


def test_texts_for_people_are_sanitised_and_cut():
    """No escape sequence in a name reaches a terminal, and long texts are cut."""
    message = agent_pb2.OpenSessionRequest(
        job_id="j", session_id="s", world_size=1, host="a\x1b[2Jb", framework="f" * 1000
    )
    request = session_messages.session_request_from_wire(message)
    assert request.host == "a\ufffd[2Jb"
    assert request.framework == "f" * 256
    end = agent_pb2.SessionEnd(notes=[*["note\n"] * 256, "n" * 5000])
    goodbye = session_messages.metadata_from_wire(agent_pb2.Frame(sequence=1, session_end=end))
    assert isinstance(goodbye, SessionEnd)
    assert goodbye.notes == (*["note\ufffd"] * 255, "and 2 more notes")


def test_drop_reasons_outside_the_list_become_other():
    """Reasons become keys and labels, so unknown ones are counted as one."""
    message = agent_pb2.IterationEnd(dropped={"torn": 1, "x" * 200: 2, "y": 3, "other": 4})
    assert session_messages.iteration_end_from_wire(message).dropped == {"torn": 1, "other": 9}
    sums = agent_pb2.IterationEnd(dropped={"x": 1 << 62, "y": 1 << 62})
    with pytest.raises(ProtocolError, match="drops: the number"):
        session_messages.iteration_end_from_wire(sums)
    many = agent_pb2.IterationEnd(dropped={str(n): 1 for n in range(257)})
    with pytest.raises(ProtocolError, match="257 reasons of drops, at most 256"):
        session_messages.iteration_end_from_wire(many)


def test_unpaired_surrogates_are_replaced():
    """A name that UTF-8 cannot encode is sent with replacement characters."""
    bad = "a\ud800/b"
    key = TensorKey(3, "Net", 0, 0, 1, bad, bad, TensorSide.INPUT, 0)
    message = sent(
        session_messages.record_to_wire(head_of(key, "int8", (), 1, argument=bad), b"x"),
        agent_pb2.Record,
    )
    kind = session_messages.kind_from_wire(message.kind)
    assert (kind.op_type, kind.op_name, kind.argument) == ("a?/b", "a?/b", "a?/b")
    columns = EventColumns.from_events([RankEvent(0, 0, 0, 0, bad, EventKind.OPERATOR, 0, 0)])
    assert list(events_to_wire(columns).names) == ["", "a?/b"]


# events

words = st.sampled_from(["", "Default/a-op0", "world", "float32"])
OPERATOR: dict[str, Any] = {
    "group": "",
    "sequence": 0,
    "element_count": 0,
    "dtype": "",
    "peer": -1,
    "stall_us": 0,
}


def as_made(event: RankEvent) -> RankEvent:
    """Return an event as it is received: operators have no group, size or peer, which are
    not sent.
    """
    return replace(event, **OPERATOR) if event.kind is EventKind.OPERATOR else event


events = st.builds(
    RankEvent,
    graph=uint32,
    iteration=uint63,
    position=uint63,
    end_position=uint63,
    name=words,
    kind=st.sampled_from(EventKind),
    start_us=sint64,
    end_us=sint64,
    stream=uint32,
    group=words,
    sequence=uint63,
    element_count=uint63,
    dtype=words,
    peer=st.integers(-1, 2**31 - 1),
    stall_us=uint63,
).map(as_made)
groups = st.lists(
    st.builds(ProcessGroup, texts, st.lists(uint32, max_size=4).map(tuple)), max_size=3
).map(tuple)


@given(batch=st.lists(events, max_size=10), groups=groups)
def test_event_columns_round_trip(batch: list[RankEvent], groups: tuple[ProcessGroup, ...]):
    """A batch of events is equal, in columns of the right types."""
    columns = EventColumns.from_events(batch, groups)
    message = sent(events_to_wire(columns), events_pb2.EventColumns)
    back = events_from_wire(message)
    assert same_columns(back, columns)
    assert {field: column.dtype for field, column in back.columns.items()} == EVENT_COLUMN_TYPES


def test_unseen_collectives_round_trip():
    """Names may be any text, and the reason of a newer version is kept."""
    unseen = (UnseenCollectives(3, "0", 2, "backend_call"), UnseenCollectives(4, "a\0b", 0, "new"))
    sent = replace(EventColumns.from_events([]), unseen=unseen)
    back = events_from_wire(events_to_wire(sent)).unseen
    assert back == (unseen[0], replace(unseen[1], group="a\ufffdb"))


def test_too_many_unseen_collectives_are_rejected():
    one = UnseenCollectives(3, "0", 2, "backend_call")
    sent = replace(EventColumns.from_events([]), unseen=(one,) * ((1 << 12) + 1))
    with pytest.raises(ProtocolError, match="4097 entries of unseen collectives"):
        events_from_wire(events_to_wire(sent))


def test_event_columns_of_an_empty_message_are_empty():
    assert len(events_from_wire(events_pb2.EventColumns())) == 0


CALL = EventColumns.from_events([RankEvent(0, 0, 1, 1, "a", EventKind.ALL_REDUCE, 0, 0, outcome=1)])


@pytest.mark.parametrize("field", list(EVENT_COLUMN_TYPES))
def test_event_columns_of_different_lengths_are_rejected(field: str):
    """Each column must have as many elements as the others."""
    message = events_to_wire(CALL)
    setattr(message, field, getattr(message, field) + b"1")
    with pytest.raises(ProtocolError, match=r"bytes (of positions|for 1 events)"):
        events_from_wire(message)


def test_event_columns_with_too_few_positions_are_rejected():
    """A count costs memory, so it must agree with the positions."""
    message = events_to_wire(CALL)
    message.count = 2
    with pytest.raises(ProtocolError, match="2 events have 8 bytes of positions"):
        events_from_wire(message)
    message.count = 1 << 31
    with pytest.raises(ProtocolError, match="at most"):
        events_from_wire(message)


@pytest.mark.parametrize("field", ["name", "group", "dtype"])
def test_event_columns_with_an_index_past_the_table_are_rejected(field: str):
    message = events_to_wire(CALL)
    setattr(message, field, len(message.names).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match=f"{field} points past 2 names"):
        events_from_wire(message)


def test_event_columns_share_the_texts_of_the_stream():
    """A batch without texts of its own refers to those that were sent before."""
    message = events_to_wire(CALL, names=False)
    assert list_events(events_from_wire(message, CALL.names)) == list_events(CALL)
    with pytest.raises(ProtocolError, match="points past"):
        events_from_wire(message)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"names": ["n"] * 65_537}, "65537 names of events"),
        ({"names": ["n" * 4097]}, "a name of 4097 characters"),
        ({"groups": [events_pb2.ProcessGroup()] * 4097}, "4097 groups"),
        ({"groups": [events_pb2.ProcessGroup(name="g" * 4097)]}, "4097 characters"),
        ({"groups": [events_pb2.ProcessGroup(ranks=[0] * ((1 << 20) + 1))]}, "ranks of groups"),
    ],
)
def test_event_columns_with_too_many_texts_are_rejected(fields: dict[str, Any], cause: str):
    with pytest.raises(ProtocolError, match=cause):
        events_from_wire(events_pb2.EventColumns(**fields))


@pytest.mark.parametrize("kind", [0, 13, 255])
def test_event_columns_with_an_unknown_kind_are_rejected(kind: int):
    """A newer or a faulty client sent it."""
    message = events_to_wire(CALL)
    message.kind = bytes([kind])
    with pytest.raises(ProtocolError, match="an event has an unknown kind"):
        events_from_wire(sent(message, events_pb2.EventColumns))


@pytest.mark.parametrize("calls", [b"", b"\1\0\0\0", b"\0\0\0\0\0\0\0\0"])
def test_event_columns_with_misplaced_calls_are_rejected(calls: bytes):
    """The positions of calls must be those of events with the kind of a call."""
    message = events_to_wire(CALL)
    message.calls = calls
    with pytest.raises(ProtocolError, match="calls, which do not match the kinds of the events"):
        events_from_wire(message)

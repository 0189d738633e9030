"""Frames: every item of a session round trips, in messages of limited size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.record_heads import head_of
from support.wire_round_trip import ONE, lines, losses, same_columns, sent, texts, uint32, uint64

from rankdump._core.events import EventColumns
from rankdump._core.graph import (
    GraphNode,
    GraphParameter,
    GraphPart,
    OperatorGraph,
    SourceLine,
    TensorType,
)
from rankdump._core.record import StatisticRows, TensorKey, TensorKind, TensorSide
from rankdump._core.session_protocol import (
    CallStacks,
    IterationEnd,
    KernelArguments,
    OperatorArguments,
    SessionEnd,
)
from rankdump._wire import frames, session_messages
from rankdump.errors import ProtocolError
from rankdump.wire.v1 import agent_pb2

iteration_ends = st.builds(IterationEnd, uint64, uint64, losses, uint64, card=st.binary(max_size=9))


@given(end=iteration_ends, sequence=uint64)
def test_iteration_end_round_trip(end: IterationEnd, sequence: int):
    """The end of an iteration has its number."""
    frame = sent(frames.make_metadata_frame(sequence, end), agent_pb2.Frame)
    assert frame.sequence == sequence
    assert session_messages.metadata_from_wire(frame) == end


@given(end=st.builds(SessionEnd, uint64, st.lists(lines, max_size=3).map(tuple)))
def test_session_end_round_trip(end: SessionEnd):
    frame = sent(frames.make_metadata_frame(1, end), agent_pb2.Frame)
    assert session_messages.metadata_from_wire(frame) == end


kinds = st.builds(TensorType, texts, st.lists(uint64, max_size=4).map(tuple))
attributes = st.dictionaries(texts, texts, max_size=3)
nodes = st.builds(
    GraphNode,
    name=texts,
    op_type=texts,
    inputs=st.lists(texts, max_size=3).map(tuple),
    outputs=st.lists(kinds, max_size=3).map(tuple),
    attributes=attributes,
    source=st.lists(st.builds(SourceLine, texts, uint32, texts, texts), max_size=2).map(tuple),
)
graphs = st.builds(
    OperatorGraph,
    number=uint32,
    nodes=st.lists(nodes, max_size=3).map(tuple),
    parameters=st.lists(st.builds(GraphParameter, texts, kinds), max_size=3).map(tuple),
    compiled=st.booleans(),
)


@given(part=st.builds(GraphPart, graphs, first=st.booleans(), last=st.booleans()))
def test_graph_part_round_trip(part: GraphPart):
    frame = sent(frames.make_metadata_frame(1, part), agent_pb2.Frame)
    assert session_messages.metadata_from_wire(frame) == part


@given(
    arguments=st.builds(
        KernelArguments,
        uint64,
        st.lists(st.builds(OperatorArguments, uint32, texts, texts, attributes), max_size=3).map(
            tuple
        ),
    )
)
def test_kernel_arguments_round_trip(arguments: KernelArguments):
    frame = sent(frames.make_metadata_frame(1, arguments), agent_pb2.Frame)
    assert session_messages.metadata_from_wire(frame) == arguments


@given(
    names=st.lists(st.tuples(texts, st.integers(0, 2)), max_size=5),
    stacks=st.lists(st.lists(texts, max_size=3).map(tuple), min_size=3, max_size=3).map(tuple),
    iteration=uint64,
)
def test_call_stacks_round_trip(names, stacks, iteration: int):
    calls = tuple(name for name, _ in names)
    said = CallStacks(iteration, calls, tuple(place for _, place in names), stacks)
    frame = sent(frames.make_metadata_frame(1, said), agent_pb2.Frame)
    assert session_messages.metadata_from_wire(frame) == said


def test_graph_names_that_utf8_cannot_hold_are_replaced():
    """Each unpaired surrogate in a graph or in arguments becomes a replacement character."""
    bad = "a\ud800"
    kind = TensorType("int8", ())
    node = GraphNode(bad, bad, (bad,), (kind,), {bad: bad}, (SourceLine(bad, 1, bad, bad),))
    part = GraphPart(OperatorGraph(0, (node,), (GraphParameter(bad, kind),)), first=True, last=True)
    arguments = KernelArguments(0, (OperatorArguments(0, bad, bad, {bad: bad}),))
    stacks = CallStacks(0, (bad,), (0,), ((bad,),))
    for declaration in (part, arguments, stacks):
        frame = sent(frames.make_metadata_frame(1, declaration), agent_pb2.Frame)
        assert "a?" in str(session_messages.metadata_from_wire(frame))


@pytest.mark.parametrize("of_parameter", [True, False])
def test_graph_tensor_of_too_many_dimensions_is_rejected(of_parameter: bool):
    """The limit is that of a record."""
    kind = agent_pb2.TensorType(shape=[1] * 65)
    if of_parameter:
        part = agent_pb2.GraphPart(parameters=[agent_pb2.GraphParameter(type=kind)])
    else:
        part = agent_pb2.GraphPart(nodes=[agent_pb2.GraphNode(outputs=[kind])])
    with pytest.raises(ProtocolError, match="65 dimensions"):
        session_messages.metadata_from_wire(agent_pb2.Frame(sequence=4, graph_part=part))


def test_statistic_rows_frame_round_trip():
    """A frame has any number of rows, whatever the sizes of their tensors."""
    kind = TensorKind(0, "T", "a", TensorSide.INPUT, 0, "uint8", (1 << 40,), 1 << 40)
    rows = StatisticRows(3, (kind, kind), (1, 2), ("6,1,nan", "7,2,0"))
    frame = sent(frames.make_metadata_frame(7, rows), agent_pb2.Frame)
    assert session_messages.metadata_from_wire(frame) == rows


def test_events_frame_round_trip():
    frame = sent(frames.make_metadata_frame(9, ONE), agent_pb2.Frame)
    back = session_messages.metadata_from_wire(frame)
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
def test_frame_without_metadata_is_rejected(frame: agent_pb2.Frame):
    """The error has the number of the frame."""
    with pytest.raises(ProtocolError, match="frame 4 has the unknown body"):
        session_messages.metadata_from_wire(frame)


@pytest.mark.parametrize(
    "extra", [-frames.MAX_CHUNK_BYTES, -1, 0, 1, 2 * frames.MAX_CHUNK_BYTES + 3]
)
def test_record_frames_hold_all_chunks_of_the_data(extra: int):
    """The frames of a record have one number, at most a chunk of bytes each, and all of
    its data.
    """
    data = bytes(range(256)) * ((frames.MAX_CHUNK_BYTES + extra) // 256 + 1)
    data = data[: frames.MAX_CHUNK_BYTES + extra]
    key = TensorKey(3, "Net", 0, 0, 1, "T", "a", TensorSide.INPUT, 0)
    head = head_of(key, "uint8", (len(data),), len(data))
    first, *rest = frames.make_record_frames(7, head, memoryview(data))
    assert session_messages.record_from_wire(first.record, rank=3, net_name="Net") == head
    whole = first.record.data
    for frame in rest:
        assert (frame.sequence, frame.chunk.offset) == (7, len(whole))
        assert 0 < len(frame.chunk.data) <= frames.MAX_CHUNK_BYTES
        whole += frame.chunk.data
    assert whole == data


@given(sizes=st.lists(st.integers(0, frames.MAX_CHUNK_BYTES), max_size=6))
def test_batches_keep_the_order_of_frames(sizes: list[int]):
    """No message is empty, and only the last one may be small."""
    limit = frames.MAX_CHUNK_BYTES
    sent_frames = [
        agent_pb2.Frame(sequence=n, chunk=agent_pb2.Chunk(data=bytes(size)))
        for n, size in enumerate(sizes)
    ]
    messages = [list(request.batch.frames) for request in frames.batch_frames(sent_frames)]
    assert [frame for batch in messages for frame in batch] == sent_frames
    totals = [[frame.ByteSize() for frame in batch] for batch in messages]
    for total in totals:
        assert total
        assert sum(total[:-1]) < limit
    for total in totals[:-1]:
        assert sum(total) >= limit


@given(sequence=uint64, end=iteration_ends)
def test_sequence_and_body_make_a_frame(sequence: int, end: IterationEnd):
    """A frame in a slab is numbered after its body was made, when it has its place."""
    body = frames.make_metadata_frame(0, end).SerializeToString()
    frame = agent_pb2.Frame.FromString(frames.add_sequence(sequence, body))
    assert frame == frames.make_metadata_frame(sequence, end)


@pytest.mark.parametrize("size", [0, 1, frames.MAX_CHUNK_BYTES, 2 * frames.MAX_CHUNK_BYTES + 3])
def test_slab_entry_is_split_into_frames(size: int):
    """An entry that is read back from a slab is sent as on the stream."""
    data = memoryview(bytes(range(251)) * (size // 251 + 1))[:size]
    key = TensorKey(3, "Net", 0, 0, 1, "T", "a", TensorSide.INPUT, 0)
    head = head_of(key, "uint8", (size,), size)
    in_slab = agent_pb2.Frame.FromString(frames.add_sequence(7, frames.serialize_record_body(head)))
    assert not in_slab.record.data
    assert list(frames.split_frame(in_slab, data)) == list(frames.make_record_frames(7, head, data))


@pytest.mark.parametrize("offset", [1, 1 << 40])
def test_piece_in_a_slab_has_its_offset(offset: int):
    frame = agent_pb2.Frame.FromString(frames.add_sequence(7, frames.serialize_chunk_body(offset)))
    assert (frame.sequence, frame.chunk.offset) == (7, offset)

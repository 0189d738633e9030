"""Frames: every item of a session travels whole, in messages of a good size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from suites.travel import ONE, counts, same_columns, sent, texts, uint64

from rankdump.contract.errors import ProtocolError
from rankdump.contract.events import EventColumns
from rankdump.contract.exchange import (
    IterationEnd,
    RecordHead,
    SessionEnd,
)
from rankdump.contract.key import Side, TensorKey
from rankdump.wire import convert, frames
from rankdump.wire.v1 import agent_pb2


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


@pytest.mark.parametrize("extra", [-frames.CHUNK_BYTES, -1, 0, 1, 2 * frames.CHUNK_BYTES + 3])
def test_record_frames(extra: int):
    """A record's frames have one number, at most a chunk of bytes each, and all of the data."""
    data = bytes(range(256)) * ((frames.CHUNK_BYTES + extra) // 256 + 1)
    data = data[: frames.CHUNK_BYTES + extra]
    key = TensorKey(3, "Net", 0, 0, 1, "T", "a", Side.INPUT, 0)
    head = RecordHead(key, "uint8", (len(data),), len(data))
    first, *rest = frames.record_frames(7, head, memoryview(data))
    assert convert.record_from_wire(first.record, rank=3, net_name="Net") == head
    whole = first.record.data
    for frame in rest:
        assert (frame.sequence, frame.chunk.offset) == (7, len(whole))
        assert 0 < len(frame.chunk.data) <= frames.CHUNK_BYTES
        whole += frame.chunk.data
    assert whole == data


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

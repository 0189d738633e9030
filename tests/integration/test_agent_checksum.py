"""Agent and damaged data: it is not stored, and affects no other record."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import grpc
import numpy as np
import pytest
import xxhash
from support.slab_agents import MIB, SMALL, arrays_of, counts, manifest_of, wait_until
from support.slab_side import SlabSide

from rankdump._shm.slab_format import ENTRY_HEAD
from rankdump.wire.v1 import agent_pb2

ARRAY = np.arange(100, dtype=np.float32)
LARGE = np.arange(20_000, dtype=np.float32)


@pytest.fixture
def rank(make_agent, make_rank, short_dir):
    agent = make_agent(runtime_dir=str(short_dir), slab_bytes=MIB)
    return make_rank(agent.address, wants_slab=True, codec="none", delivery=SMALL)


@pytest.fixture
def side(rank) -> Iterator[SlabSide]:
    place = rank.open().slab
    side = SlabSide(place.path, place.length)
    yield side
    side.close()


def put(side: SlabSide, frames, sequence: int, array: np.ndarray) -> int:
    """Publish a record; return where in the ring its entry begins."""
    begin = side.writer.written
    frame = frames.record(sequence, array, first_bytes=0).SerializeToString()
    side.put(frame, array.tobytes(), sequence=sequence, mark=1)
    return begin


@pytest.mark.parametrize("array", [ARRAY, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("place", ["frame", "data"])
def test_changed_ring_entry_is_counted_as_drop(rank, side, frames, array, place, caplog):
    """Any byte that changed after the seal counts; the entries beside it are in the tree."""
    caplog.set_level(logging.CRITICAL)
    begins = [put(side, frames, number, array + number) for number in (1, 2, 3)]
    side.put(frames.end(4, 0, 3).SerializeToString(), sequence=4)
    side.seal()
    side.flip(begins[1] + ENTRY_HEAD.size + 3 if place == "frame" else begins[2] - 100)
    rank.push().ring(side.writer.written).wait_acknowledged(4)
    assert counts(rank) == {"stored": 2, "degraded": 0, "expected": 3, "corrupted": 1}
    assert arrays_of(rank.root) == [(array + number).tobytes() for number in (1, 3)]
    assert manifest_of(rank.root).status.is_balanced
    assert side.writer.released == side.writer.written


@pytest.mark.parametrize("place", ["head", "frame"])
def test_changed_declaration_is_resent(rank, side, frames, place):
    """The rank leaves the slab and sends the frame on the stream, so nothing is lost."""
    put(side, frames, 1, ARRAY)
    begin = side.writer.written
    side.put(frames.end(2, 0, 2).SerializeToString(), sequence=2)
    side.seal()
    side.flip(begin + (ENTRY_HEAD.size + 1 if place == "frame" else 20))
    stream = rank.push().ring(side.writer.written)
    assert stream.wait_over() is grpc.StatusCode.DATA_LOSS
    side.unlock()
    rank.open()
    lost = agent_pb2.Lost(iteration=0, tensors=1, reason="corrupted")
    again = [frames.record(1, ARRAY), frames.end(2, 0, 2), agent_pb2.Frame(sequence=3, lost=lost)]
    rank.push().send(*again, frames.end(4, 0, 0)).wait_acknowledged(4)
    assert arrays_of(rank.root) == [ARRAY.tobytes()]
    assert counts(rank) == {"stored": 1, "degraded": 0, "expected": 2, "corrupted": 1}


def test_rank_that_died_after_a_damaged_head_has_no_balance(rank, side, frames):
    """The content of the entry is unknown, so its iteration does not end, and a finding
    reports it.
    """
    put(side, frames, 1, ARRAY)
    begin = side.writer.written
    put(side, frames, 2, ARRAY + 1)
    side.put(frames.end(3, 0, 2).SerializeToString(), sequence=3)
    side.seal()
    side.flip(begin + 20)
    side.unlock()
    wait_until(lambda: any("ended within iteration 0" in said for said in rank.status().findings))
    assert any("slab is lost" in said for said in rank.status().findings)
    (found,) = rank.status().iterations
    assert (found.stored, found.complete) == (1, False)


@pytest.mark.parametrize("place", ["first frame", "frame", "data"])
def test_changed_piece_drops_its_record(rank, side, frames, place):
    """A record in pieces has the checksum of all of it; later records are accepted."""
    data, begins = LARGE.tobytes(), []
    checksum = xxhash.xxh3_128_digest(data)
    head = frames.record(1, LARGE, first_bytes=0, checksum=checksum)
    for at in range(0, len(data), 30_000):
        frame = agent_pb2.Frame(sequence=1, chunk=agent_pb2.Chunk(offset=at)) if at else head
        begins.append(side.writer.written)
        piece = data[at : at + 30_000]
        side.put(frame.SerializeToString(), piece, sequence=1, mark=0 if at else 1)
    put(side, frames, 2, ARRAY)
    side.writer.seal(side.writer.written, lambda number, _: b"")
    at = {
        "first frame": ENTRY_HEAD.size,
        "frame": begins[1] + ENTRY_HEAD.size,
        "data": begins[2] - 100,
    }
    side.flip(at[place])
    stream = rank.push().ring(side.writer.written)
    stream.wait_acknowledged(2)
    assert counts(rank) == {"stored": 1, "degraded": 0, "expected": 0, "corrupted": 1}
    assert stream.finish() is grpc.StatusCode.OK


def test_unsealed_entries_are_stored(rank, side, frames):
    """A rank that was killed before its sender sealed its entries leaves entries without
    checksums.
    """
    put(side, frames, 1, ARRAY)
    side.flip(side.writer.written - 200)
    side.unlock()
    wait_until(lambda: rank.status().iterations)
    (found,) = arrays_of(rank.root)
    assert found != ARRAY.tobytes()


@pytest.mark.parametrize("first", [None, 1000])
def test_checksum_on_the_stream_covers_the_whole_record(rank, side, frames, first):
    """A record in chunks has one checksum; records without one, as of earlier clients, are
    accepted.
    """
    side.unlock()
    stream = rank.push()
    for number, checksum in enumerate([b"", None, bytes(16), b"x"], 1):
        array = LARGE + number
        said = xxhash.xxh3_128_digest(array.tobytes()) if checksum is None else checksum
        frame = frames.record(number, array, first_bytes=first, checksum=said)
        stream.send(frame, *([] if first is None else frames.chunks(number, array, first, 50_000)))
    stream.wait_acknowledged(4)
    assert counts(rank) == {"stored": 2, "degraded": 0, "expected": 0, "corrupted": 2}

"""Checksums of a slab's entries: their extent, entries of version 1, and the reuse of space."""

from __future__ import annotations

import hashlib
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankdump._shm import slab_format
from rankdump._shm.slab_format import (
    ENTRY_HEAD,
    RING_OFFSET,
    SlabMemory,
    compute_slab_bytes,
    format_slab,
)
from rankdump._shm.slab_ring import SlabEntry, SlabReader, SlabWriter
from rankdump.errors import CorruptedError

FRAMES = [(b"frame %d" % n * 9, bytes([n]) * n * 40) for n in range(1, 6)]


def digest_of(_: int, data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def fresh() -> memoryview:
    memory = memoryview(bytearray(compute_slab_bytes(0)))
    format_slab(memory)
    return memory


def put(writer: SlabWriter, frame: bytes, data: bytes, number: int) -> None:
    room = writer.reserve(frame, len(data), sequence=number, mark=number + 100)
    assert room is not None
    room.data[:] = data
    writer.commit(room)


def sealed() -> tuple[memoryview, int]:
    memory = fresh()
    writer = SlabWriter(memory)
    for number, (frame, data) in enumerate(FRAMES):
        put(writer, frame, data, number)
    writer.seal(writer.written, digest_of)
    return memory, writer.written


def is_right(reader: SlabReader, entry: SlabEntry) -> bool:
    return not entry.is_corrupted and entry.digest == digest_of(0, reader.read_data(entry))


def test_sealed_entry_has_digest_number_and_mark():
    memory, _ = sealed()
    reader = SlabReader(SlabMemory(memory))
    found = list(reader.read_entries())
    assert [(e.sequence, e.mark) for e in found] == [(n, n + 100) for n in range(5)]
    assert all(e.has_data and is_right(reader, e) for e in found)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, sealed()[1] * 8 - 1))
def test_sealed_entry_with_a_changed_bit_is_detected(at: int):
    """Law: an entry is as it was sealed, or it shows; one with a whole head costs no other."""
    memory, _ = sealed()
    memory[RING_OFFSET + at // 8] ^= 1 << at % 8
    reader, found = SlabReader(SlabMemory(memory)), []
    try:
        for entry in reader.read_entries():
            right = is_right(reader, entry)
            found.append(entry)
            sent = (bytes(entry.frame), bytes(reader.read_data(entry))) == FRAMES[len(found) - 1]
            assert sent or not right
            if entry.is_corrupted:
                assert (entry.sequence, entry.mark) == (len(found) - 1, len(found) + 99)
    except CorruptedError:
        return
    assert len(found) == len(FRAMES)


def test_unsealed_or_abandoned_entry_is_accepted():
    memory = fresh()
    writer = SlabWriter(memory)
    put(writer, b"sealed", b"1", 1)
    writer.seal(writer.written, lambda _n, _d: b"")
    put(writer, b"not yet", b"2", 2)
    torn = writer.reserve(b"torn", 5)
    assert torn is not None
    writer.commit(torn, whole=False)
    writer.seal(writer.written - 1, digest_of)
    found = list(SlabReader(SlabMemory(memory)).read_entries())
    assert [(bytes(e.frame), e.digest, e.is_corrupted, e.has_data) for e in found] == [
        (b"sealed", b"", False, True),
        (b"not yet", digest_of(0, memoryview(b"2")), False, True),
        (b"torn", b"", False, False),
    ]


def test_space_is_not_reused_while_its_entry_is_sealed():
    """The agent may take and release an entry that was never announced: nobody may write there
    before the seal is on it, and the seal goes on nothing else."""
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    put(writer, b"first", bytes(30_000), 1)
    put(writer, b"second", bytes(30_000), 2)
    hashing, go_on = threading.Event(), threading.Event()

    def slow(number: int, data: memoryview) -> bytes:
        hashing.set()
        assert go_on.wait(20)
        return digest_of(number, data)

    thread = threading.Thread(target=writer.seal, args=(writer.written, slow))
    thread.start()
    assert hashing.wait(20)
    ends = [entry.end_position for entry in reader.read_entries()]
    reader.release(ends[-1])
    assert writer.reserve(b"third", 20_000) is None
    go_on.set()
    thread.join()
    room = writer.reserve(b"third", 20_000)
    assert room is not None
    writer.commit(room)
    writer.seal(writer.written, digest_of)
    (entry,) = reader.read_entries()
    assert (bytes(entry.frame), is_right(reader, entry)) == (b"third", True)


def test_slab_of_version_1_is_read_only():
    """What a rank of an earlier library left is taken; a new one uses its stream."""
    memory = fresh()
    struct.pack_into("<Q", memory, 8, 1)
    for number in range(3):
        head = struct.pack("<IIQQQ", slab_format.ENTRY_MAGIC, 2, number * 128, 5, 3)
        memory[RING_OFFSET + number * 128 :][:37] = head + b"fr %d!" % number
        memory[RING_OFFSET + number * 128 + 64 :][:3] = b"abc"
    memory[64:72] = struct.pack("<Q", 3 * 128)
    reader = SlabReader(SlabMemory(memory))
    found = [
        (bytes(e.frame), bytes(reader.read_data(e)), e.has_data) for e in reader.read_entries()
    ]
    assert found == [(b"fr %d!" % n, b"abc", True) for n in range(3)]
    with pytest.raises(CorruptedError, match="version 1; this side writes 2 and 3"):
        SlabWriter(memory)
    struct.pack_into("<Q", memory, 8, 4)
    with pytest.raises(CorruptedError, match="version 4; this side reads 1, 2, 3"):
        SlabReader(SlabMemory(memory))


def test_entry_head_fits_one_cache_line():
    assert ENTRY_HEAD.size == slab_format.ENTRY_ALIGNMENT

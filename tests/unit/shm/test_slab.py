"""Ring in shared memory: entries are read once, in order, and never beyond its end."""

from __future__ import annotations

import mmap
import random
import struct
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankdump._shm import slab_format
from rankdump._shm.slab_format import SlabMemory, compute_slab_bytes, format_slab
from rankdump._shm.slab_ring import SlabReader, SlabWriter
from rankdump.errors import CorruptedError

SMALL = slab_format.MIN_RING_BYTES


def fresh(ring_bytes: int = SMALL) -> memoryview:
    memory = memoryview(bytearray(compute_slab_bytes(ring_bytes)))
    format_slab(memory)
    return memory


def put(writer: SlabWriter, frame: bytes, data: bytes) -> bool:
    room = writer.reserve(frame, len(data))
    if room is None:
        return False
    room.data[:] = data
    writer.commit(room)
    return True


def drain(reader: SlabReader, *, release: bool = True) -> list[tuple[bytes, bytes, bool]]:
    found, end = [], 0
    for entry in reader.read_entries():
        found.append((bytes(entry.frame), bytes(reader.read_data(entry)), entry.has_data))
        end = entry.end_position
    if release and end:
        reader.release(end)
    return found


def test_reader_yields_committed_entries_in_order():
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    for number in range(20):
        assert put(writer, b"frame %d" % number, bytes([number]) * number)
    assert drain(reader) == [(b"frame %d" % n, bytes([n]) * n, True) for n in range(20)]
    assert drain(reader) == []


def test_unfinished_entry_holds_back_later_ones():
    """Published in the order of reservations, an abandoned one without its data."""
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    first, second = writer.reserve(b"first", 3), writer.reserve(b"second", 3)
    assert first is not None
    assert second is not None
    second.data[:] = b"two"
    writer.commit(second)
    assert drain(reader) == []
    writer.commit(first, whole=False)
    assert [(frame, whole) for frame, _, whole in drain(reader)] == [
        (b"first", False),
        (b"second", True),
    ]


def test_writer_reuses_released_space():
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    count = 0
    while put(writer, b"f", bytes(4000)):
        count += 1
    assert count * 4000 <= SMALL < (count + 2) * 4096
    assert not put(writer, b"f", bytes(4000))
    assert len(drain(reader)) == count
    assert put(writer, b"f", bytes(4000))


@pytest.mark.parametrize("frame_bytes", [0, 1, 63, 64, 100])
def test_largest_content_fits_at_any_position(frame_bytes: int):
    """Half of the ring holds it, so a filler at the end always leaves room for it."""
    largest = SlabWriter(fresh()).max_content_bytes
    assert SMALL // 2 - 256 < largest < SMALL // 2
    for before in range(0, SMALL // 2, 4096):
        memory = fresh()
        writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
        assert put(writer, b"", bytes(before))
        drain(reader)
        assert put(writer, bytes(frame_bytes), bytes(largest - frame_bytes))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.binary(max_size=200), st.integers(0, 30_000)),
            st.tuples(st.just("begin"), st.binary(max_size=20), st.integers(0, 5000)),
            st.tuples(st.just("end"), st.booleans(), st.integers(0, 5)),
            st.tuples(st.just("read"), st.booleans(), st.just(0)),
        ),
        max_size=80,
    )
)
def test_ring_behaves_as_a_queue(actions):
    """Law: whatever the order of writing, ending, reading and releasing, nothing is lost,
    repeated, changed or overwritten before its release."""
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    expected: deque[list] = deque()
    begun: list = []
    held: list = []
    for kind, what, number in actions:
        if kind in ("put", "begin"):
            room = writer.reserve(what, number)
            if room is None:
                continue
            room.data[:] = bytes([len(expected) % 256]) * number
            row = [what, bytes(room.data), None]
            expected.append(row)
            begun.append((room, row))
        if kind in ("put", "end") and begun:
            room, row = begun.pop(number % len(begun)) if kind == "end" else begun.pop()
            row[2] = what if kind == "end" else True
            writer.commit(room, whole=row[2])
        if kind == "read":
            for entry in reader.read_entries():
                frame, data, whole = expected.popleft()
                assert (bytes(entry.frame), entry.has_data) == (frame, whole)
                held.append((entry, data))
            for entry, data in held:
                assert bytes(reader.read_data(entry)) == data
            if what and held:
                reader.release(held[-1][0].end_position)
                held.clear()


def test_several_threads_write_while_one_reads():
    memory = fresh(1 << 18)
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    found: list[tuple[bytes, bytes, bool]] = []

    def write(thread: int) -> None:
        for number in range(300):
            data = random.Random(thread * 1000 + number).randbytes(number * 7)
            while not put(writer, b"%d %d" % (thread, number), data):
                pass

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while len(found) < 1200:
        found += drain(reader)
    for thread in threads:
        thread.join()
    for thread in range(4):
        own = [row for row in found if row[0].startswith(b"%d " % thread)]
        assert [int(row[0].split()[1]) for row in own] == list(range(300))
        for number, (_, data, whole) in enumerate(own):
            assert whole
            assert data == random.Random(thread * 1000 + number).randbytes(number * 7)


def test_reader_finds_entries_of_a_dead_rank():
    """Also behind an entry whose copy the death interrupted, and not what an earlier lap left."""
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    for _ in range(9):
        assert put(writer, b"old", bytes(10_000))
        drain(reader)
    assert put(writer, b"a", b"1")
    assert writer.reserve(b"torn", 5)
    assert put(writer, b"b", b"2")
    again = SlabReader(SlabMemory(memory))
    assert [(bytes(e.frame), e.has_data) for e in again.read_remaining_entries()] == [
        (b"a", True),
        (b"torn", False),
        (b"b", True),
    ]


def test_new_reader_starts_at_the_first_unreleased_entry():
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    put(writer, b"a", b"1")
    drain(reader)
    put(writer, b"b", b"2")
    assert drain(reader, release=False) == [(b"b", b"2", True)]
    assert drain(SlabReader(SlabMemory(memory))) == [(b"b", b"2", True)]
    put(SlabWriter(memory), b"c", b"3")
    assert drain(SlabReader(SlabMemory(memory))) == [(b"c", b"3", True)]


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 4095 + SMALL), st.binary(min_size=1, max_size=64))
def test_reader_rejects_impossible_entries(at: int, garbage: bytes):
    """Law: whatever a rank scribbles, entries lie within the ring or DamagedError says so."""
    memory = fresh()
    writer = SlabWriter(memory)
    for number in range(30):
        put(writer, b"frame", bytes(number * 100))
    garbage = garbage[: len(memory) - at]
    memory[at : at + len(garbage)] = garbage
    try:
        reader = SlabReader(SlabMemory(memory))
        for entry in reader.read_entries():
            assert len(entry.frame) + entry.data_bytes <= SMALL
            reader.release(entry.end_position)
    except CorruptedError:
        pass


def test_read_entry_at_finds_an_entry_by_position():
    """Whatever became of those before it; where none begins, none is found."""
    memory = fresh()
    writer = SlabWriter(memory)
    rooms = [writer.reserve(b"frame %d" % number, 100) for number in range(3)]
    begins = [room.position for room in rooms if room is not None]
    for room in rooms:
        assert room is not None
        writer.commit(room)
    memory[slab_format.RING_OFFSET + begins[1]] ^= 1
    reader = SlabReader(SlabMemory(memory))
    assert bytes(reader.read_entry_at(begins[2]).frame) == b"frame 2"
    assert bytes(reader.read_entry_at(begins[0]).frame) == b"frame 0"
    for position in (begins[1], begins[0] + slab_format.ENTRY_ALIGNMENT, begins[2] + SMALL):
        with pytest.raises(CorruptedError):
            reader.read_entry_at(position)


@pytest.mark.parametrize(
    "length", [0, 100, slab_format.RING_OFFSET, slab_format.RING_OFFSET + SMALL]
)
def test_parse_slab_header_rejects_other_buffers(length: int):
    with pytest.raises(CorruptedError, match=f"slab of {length} bytes"):
        SlabReader(SlabMemory(memoryview(bytearray(length))))


def test_parse_slab_header_rejects_another_length():
    memory = fresh()
    struct.pack_into("<Q", memory, 16, SMALL * 2)
    with pytest.raises(CorruptedError, match="header"):
        SlabWriter(memory)


_COUNTING_RANK = """
import mmap, sys
from rankdump._shm.slab_format import SlabMemory
from rankdump._shm.slab_ring import SlabReader
from rankdump._shm.slab_ring import SlabWriter
with open(sys.argv[1], "r+b") as file:
    memory = memoryview(mmap.mmap(file.fileno(), 0))
writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
print("begins", flush=True)
for _ in range(60_000):
    writer.commit(writer.reserve(b"frame", 3))
    for entry in reader.read_entries():
        reader.release(entry.end_position)
"""


def test_numbers_are_stored_atomically(tmp_path: Path):
    """A number that reads as zero for an instant once ended a session: it seemed to go back."""
    file = tmp_path / "slab"
    file.write_bytes(bytes(fresh()))
    with file.open("r+b") as opened:
        memory = memoryview(mmap.mmap(opened.fileno(), 0))
    watcher = SlabReader(SlabMemory(memory))
    command = [sys.executable, "-c", _COUNTING_RANK, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        last_written = last_released = 0
        while rank.poll() is None:
            for _ in range(1000):
                released, written = watcher.released, watcher.written
                assert released >= last_released
                assert written >= last_written
                last_released, last_written = released, written
    assert rank.returncode == 0
    assert watcher.written == watcher.released > 0


def test_reader_leaves_unannounced_entries_for_later():
    memory = fresh()
    writer, reader = SlabWriter(memory), SlabReader(SlabMemory(memory))
    assert put(writer, b"first", b"1")
    announced = writer.written
    assert put(writer, b"second", b"2")
    assert [bytes(e.frame) for e in reader.read_entries(announced)] == [b"first"]
    assert [bytes(e.frame) for e in reader.read_entries(0)] == []
    assert [bytes(e.frame) for e in reader.read_entries(writer.written)] == [b"second"]

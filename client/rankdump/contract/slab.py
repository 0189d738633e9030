"""A slab: shared memory in which a rank leaves frames for its agent, as a ring. Pure: any buffer.

       0  magic, version, bytes of the ring
      64  `written`: bytes ever published, by the rank
     128  `released`: bytes ever given back, by the agent
    4096  the ring: entries, each a head, a frame and the frame's data, at multiples of 64

Positions only rise; an entry at position p stands at p modulo the ring's length and never wraps.
What the rank committed is readable whoever dies. One process writes, one reads. The other one
may look at any moment, so each number is stored and loaded at one blow: through an element of a
memoryview, because `struct.pack_into` fills the place with zeros first.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from rankdump.contract.errors import DamagedError

ALIGN = 64
RING_OFFSET = 4096
MIN_RING_BYTES = 1 << 16
_HEADER = struct.Struct("<8sQQ")
_MAGIC = b"RDSLAB\0\1"
_VERSION = 1
_WRITTEN, _RELEASED = 64 // 8, 128 // 8
_HEAD = struct.Struct("<IIQQQ")
_ENTRY_MAGIC = 0x31454452


class _State(IntEnum):
    RESERVED = 1
    COMMITTED = 2
    ABANDONED = 3
    """Its frame counts, its data never came."""
    FILLER = 4
    """Room at the end of the ring that was too small."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one entry, between `reserve` and `commit` or `abandon`."""

    offset: int
    """Of the entry's head within the ring."""
    data: memoryview
    """Where the data goes."""
    end: int
    """Position behind the entry."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a reader finds."""

    frame: memoryview
    data: memoryview
    """Readable until the position behind the entry is released."""
    whole: bool
    """Whether the data is there; without it only the frame counts."""
    end: int
    """Position behind the entry."""


def slab_bytes(ring_bytes: int) -> int:
    """Return the length of a slab with a ring of that many bytes, rounded up to whole entries."""
    return RING_OFFSET + _aligned(max(ring_bytes, MIN_RING_BYTES))


def format_slab(memory: memoryview) -> None:
    """Make an empty slab of a buffer of `slab_bytes` length."""
    ring_bytes = len(memory) - RING_OFFSET
    if ring_bytes < MIN_RING_BYTES or ring_bytes % ALIGN:
        raise ValueError(f"a slab of {len(memory)} bytes: see slab_bytes")
    memory[:RING_OFFSET] = bytes(RING_OFFSET)
    _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, ring_bytes)


class _Slab:
    """What both sides share."""

    def __init__(self, memory: memoryview) -> None:
        if len(memory) < RING_OFFSET + MIN_RING_BYTES:
            raise DamagedError(f"slab of {len(memory)} bytes")
        magic, version, ring_bytes = _HEADER.unpack_from(memory, 0)
        if magic != _MAGIC or version != _VERSION or ring_bytes != len(memory) - RING_OFFSET:
            raise DamagedError(f"slab of {len(memory)} bytes with header {bytes(memory[:24])!r}")
        self._numbers = memory[:RING_OFFSET].cast("Q")
        self._ring = memory[RING_OFFSET:]
        self.ring_bytes = ring_bytes
        """Bytes of the ring."""

    @property
    def written(self) -> int:
        """Position behind the last published entry."""
        return self._numbers[_WRITTEN]

    @property
    def released(self) -> int:
        """Position before which everything may be overwritten."""
        return self._numbers[_RELEASED]


class SlabWriter(_Slab):
    """The rank's side; safe to use from several threads.

    Entries are published in the order of their reservations, so an unfinished one holds back
    those after it.
    """

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._lock = threading.Lock()
        self._states = self._ring.cast("I")
        self._next = self.written
        self._open: deque[int] = deque()
        self._done: set[int] = set()

    def fits(self, frame_bytes: int, data_bytes: int) -> bool:
        """Return whether an entry of that size can be reserved at all, once there is room."""
        return _total(frame_bytes, data_bytes) <= self.ring_bytes // 2

    def reserve(self, frame: bytes, data_bytes: int) -> Reservation | None:
        """Take room for a frame and its data; None when there is none just now."""
        total = _total(len(frame), data_bytes)
        with self._lock:
            offset = self._next % self.ring_bytes
            # An entry never wraps: what is left at the end is filled up.
            filler = self.ring_bytes - offset if offset + total > self.ring_bytes else 0
            if self._next + filler + total - self.released > self.ring_bytes:
                return None
            if filler:
                self._put_head(offset, _State.FILLER, 0, filler)
                self._next += filler
                offset = 0
            begin = offset + _HEAD.size
            self._ring[begin : begin + len(frame)] = frame
            # Last, so that a death in between leaves no head before half a frame.
            self._put_head(offset, _State.RESERVED, len(frame), data_bytes)
            self._next += total
            end = self._next
            self._open.append(end)
        data_at = offset + _aligned(_HEAD.size + len(frame))
        return Reservation(offset, self._ring[data_at : data_at + data_bytes], end)

    def commit(self, reservation: Reservation) -> None:
        """Publish an entry whose data is in place."""
        self._end(reservation, _State.COMMITTED)

    def abandon(self, reservation: Reservation) -> None:
        """Publish an entry whose data will never come."""
        self._end(reservation, _State.ABANDONED)

    def _end(self, reservation: Reservation, state: _State) -> None:
        self._states[reservation.offset // 4 + 1] = state
        with self._lock:
            waiting, done = self._open, self._done
            done.add(reservation.end)
            end = 0
            while waiting and waiting[0] in done:
                end = waiting.popleft()
                done.remove(end)
            if end:
                self._numbers[_WRITTEN] = end

    def _put_head(self, offset: int, state: _State, frame_bytes: int, data_bytes: int) -> None:
        _HEAD.pack_into(
            self._ring, offset, _ENTRY_MAGIC, state, self._next, frame_bytes, data_bytes
        )


class SlabReader(_Slab):
    """The agent's side, which believes nothing; for one thread at a time."""

    def __init__(self, memory: memoryview) -> None:
        super().__init__(memory)
        self._read = self.released

    def entries(self, announced: int | None = None) -> Iterator[Entry]:
        """Yield what was published since the last call; DamagedError for what cannot be.

        While the rank lives, only what lies before the position that a message of it `announced`
        is sure to be seen as it was written, on every kind of processor.
        """
        written, most = self.written, self.released + self.ring_bytes
        if self._read % ALIGN or not self._read <= written <= most:
            raise DamagedError(f"slab written to {written}, read to {self._read}")
        yield from self._until(written if announced is None else min(announced, written))

    def remains(self) -> Iterator[Entry]:
        """Yield what a rank that is dead had committed or begun; one begun is not whole."""
        yield from self.entries()
        try:
            yield from self._until(self.released + self.ring_bytes)
        except DamagedError:
            # Nothing stands here yet, or what an earlier lap left.
            return

    def release(self, position: int) -> None:
        """Let the rank overwrite everything before a position."""
        if not self.released <= position <= self._read:
            raise ValueError(f"release to {position}, read to {self._read}")
        self._numbers[_RELEASED] = position

    def _until(self, limit: int) -> Iterator[Entry]:
        while self._read < limit:
            entry = self._entry(self._read, limit)
            if isinstance(entry, Entry):
                self._read = entry.end
                yield entry
            else:
                self._read = entry

    def _entry(self, position: int, limit: int) -> Entry | int:
        """Return the entry at a position, or the position behind a filler."""
        offset = position % self.ring_bytes
        magic, state, stamp, frame_bytes, data_bytes = _HEAD.unpack_from(self._ring, offset)
        filler = state == _State.FILLER
        total = data_bytes if filler else _total(frame_bytes, data_bytes)
        end = position + total
        if (magic, stamp) != (_ENTRY_MAGIC, position) or state not in _STATES:
            raise DamagedError(f"slab without an entry at {position}")
        if not 0 < total <= self.ring_bytes - offset or end > limit or total % ALIGN:
            raise DamagedError(f"slab entry of {total} bytes at {position}, written to {limit}")
        if filler:
            return end
        begin = offset + _HEAD.size
        data_at = offset + _aligned(_HEAD.size + frame_bytes)
        return Entry(
            frame=self._ring[begin : begin + frame_bytes].toreadonly(),
            data=self._ring[data_at : data_at + data_bytes].toreadonly(),
            whole=state == _State.COMMITTED,
            end=end,
        )


_STATES = frozenset(map(int, _State))


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


def _total(frame_bytes: int, data_bytes: int) -> int:
    return _aligned(_HEAD.size + frame_bytes) + _aligned(data_bytes)

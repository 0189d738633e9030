"""Ring of entries in a slab: its writer, on the rank's side, which reserves, fills, publishes and
seals space in any buffer, safe to use from several threads; and its reader, on the agent's side,
which checks everything that it reads from any store, for one thread at a time. Pure.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankdump._shm.slab_format import (
    CHECKED_HEAD,
    CHECKED_HEAD_BYTES,
    ENTRY_ALIGNMENT,
    ENTRY_HEAD,
    ENTRY_MAGIC,
    JOURNAL_SLAB_VERSION,
    RELEASED_OFFSET,
    RING_OFFSET,
    SEAL_TAIL,
    SLAB_HEADER_BYTES,
    SLAB_VERSION,
    WRITTEN_OFFSET,
    EntryState,
    SlabStore,
    parse_slab_header,
)
from rankdump.errors import CorruptedError

_MAX_MARK = (1 << 32) - 1
_HEAD_BYTES = ENTRY_HEAD.size
_pack_head = ENTRY_HEAD.pack_into
_UNSEALED = 0, 0, 0, b""
"""Values of the last fields of a head before its entry is sealed."""
_PADDING_MASK, _ALIGNED = ENTRY_ALIGNMENT - 1, -ENTRY_ALIGNMENT
"""`length + _PADDING_MASK & _ALIGNED` equals `align_length(length)` without a call for each tensor;
a field of `length` bytes is followed by `-length & _PADDING_MASK` bytes of padding.
"""
_WRITTEN, _RELEASED = WRITTEN_OFFSET // 8, RELEASED_OFFSET // 8
# The states are integers, because comparing members of an enumeration takes longer than reading an
# entry.
_RESERVED, _COMMITTED, _ABANDONED, _FILLER, _SEALED = map(int, EntryState)


class SlabReservation(NamedTuple):
    """Space for one entry, between `reserve` and `commit`."""

    offset: int
    """Offset of the entry's head in the ring."""
    data: memoryview
    """Memory for the entry's data."""
    position: int
    end_position: int
    """Position after the entry."""
    frame: bytes
    sequence: int
    mark: int


class SlabWriter:
    """Writes entries; safe to use from several threads.

    Entries are published in the order of their reservations, so an unfinished entry holds back the
    entries after it.
    """

    def __init__(self, memory: memoryview) -> None:
        """Take over a slab; CorruptedError if it has another version or no header."""
        version, self.ring_bytes = parse_slab_header(memory[:RING_OFFSET], len(memory))
        if version < SLAB_VERSION:
            raise CorruptedError(
                f"slab has version {version}; this side writes {SLAB_VERSION} and "
                f"{JOURNAL_SLAB_VERSION}"
            )
        self.max_content_bytes = self.ring_bytes // 2 - _HEAD_BYTES - 2 * _PADDING_MASK
        """Maximum bytes of a frame and its data together that can be reserved in an empty ring."""
        self.has_journal = version == JOURNAL_SLAB_VERSION
        """Whether the slab has a journal after the ring."""
        self._numbers = memory[:RING_OFFSET].cast("Q")
        self._ring = memory[RING_OFFSET : RING_OFFSET + self.ring_bytes]
        self._states = self._ring.cast("I")
        self._lock = threading.Lock()
        self._next = self.written
        self._free_end = 0
        """Position up to which space was free when this was last looked up."""
        self._open: deque[SlabReservation] = deque()
        self._done: dict[int, bool] = {}
        self._unsealed: deque[SlabReservation] = deque()
        self._seal_lock = threading.Lock()
        self._sealing: int | None = None

    @property
    def written(self) -> int:
        """Position after the last published entry."""
        return self._numbers[_WRITTEN]

    @property
    def released(self) -> int:
        """Position up to which everything may be overwritten."""
        return self._numbers[_RELEASED]

    @property
    def open_entries(self) -> int:
        """Number of entries that are reserved but not published."""
        with self._lock:
            return len(self._open)

    def reserve(
        self, frame: bytes, data_bytes: int, sequence: int = 0, mark: int = 0
    ) -> SlabReservation | None:
        """Reserve space for a frame and its data; return None if there is no space at present.

        `sequence` and `mark` stay readable if the bytes of the frame are damaged.
        """
        frame_bytes, ring = len(frame), self._ring
        if mark > _MAX_MARK:
            mark = _MAX_MARK
        data_at = _HEAD_BYTES + frame_bytes + _PADDING_MASK & _ALIGNED
        total = data_at + data_bytes + _PADDING_MASK & _ALIGNED
        with self._lock:
            position, ring_bytes = self._next, self.ring_bytes
            offset = position % ring_bytes
            # An entry never wraps around: a filler takes the space that is left at the end.
            filler = ring_bytes - offset if offset + total > ring_bytes else 0
            end = position + filler + total
            if end > self._free_end and end > self._find_free_end():
                return None
            if filler:
                _pack_head(ring, offset, ENTRY_MAGIC, _FILLER, position, 0, 0, filler, *_UNSEALED)
                position += filler
                offset = 0
            begin = offset + _HEAD_BYTES
            ring[begin : begin + frame_bytes] = frame
            # The head is written last, so that a rank that dies in between leaves no head before an
            # incomplete frame.
            _pack_head(
                ring,
                offset,
                ENTRY_MAGIC,
                _RESERVED,
                position,
                frame_bytes,
                0,
                data_bytes,
                *_UNSEALED,
            )
            begin = offset + data_at
            data = ring[begin : begin + data_bytes]
            fields = offset, data, position, end, frame, sequence, mark
            # This equals `SlabReservation(...)` in a third of the time: there is one for each
            # tensor.
            reservation = tuple.__new__(SlabReservation, fields)
            self._next = end
            self._open.append(reservation)
        return reservation

    def commit(self, reservation: SlabReservation, *, whole: bool = True) -> None:
        """Publish an entry whose data is in place; if `whole` is False, its data will
        never come.
        """
        self._states[reservation.offset // 4 + 1] = _COMMITTED if whole else _ABANDONED
        with self._lock:
            waiting, done = self._open, self._done
            if waiting[0] is not reservation:
                done[reservation.position] = whole
                return
            published: bool | None = whole
            while published is not None:
                reservation = waiting.popleft()
                if published:
                    self._unsealed.append(reservation)
                published = done.pop(waiting[0].position, None) if waiting and done else None
            self._numbers[_WRITTEN] = reservation.end_position

    def seal(self, position: int, digest_of: Callable[[int, memoryview], bytes]) -> None:
        """Seal the entries that were committed before a position and are not released.

        `digest_of` returns the digest of a frame's data, given its sequence number; empty for none.
        """
        with self._seal_lock:
            while (reservation := self._pop_unsealed(position)) is not None:
                offset, data, begin, _, frame, sequence, mark = reservation
                digest = digest_of(sequence, data)
                checked = CHECKED_HEAD.pack(
                    begin, len(frame), zlib.crc32(frame), len(data), sequence, mark
                )
                head = checked + SEAL_TAIL.pack(zlib.crc32(checked), digest)
                # All fields except the state are written; the state is stored last, and atomically.
                self._ring[offset + CHECKED_HEAD_BYTES.start : offset + _HEAD_BYTES] = head
                self._states[offset // 4 + 1] = _SEALED

    def _pop_unsealed(self, position: int) -> SlabReservation | None:
        with self._lock:
            self._sealing = None
            while self._unsealed and self._unsealed[0].end_position <= position:
                reservation = self._unsealed.popleft()
                # The space of a released entry may belong to another entry by now.
                if reservation.end_position > self.released:
                    self._sealing = reservation.position
                    return reservation
        return None

    def _find_free_end(self) -> int:
        """Return the position up to which space can be used without overwriting an entry that is
        being sealed.
        """
        begin = self.released
        if self._sealing is not None:
            begin = min(begin, self._sealing)
        self._free_end = begin + self.ring_bytes
        return self._free_end


# When an agent is upgraded, ranks of an earlier release may still run or have left slabs.
_ENTRY_HEAD_OF_VERSION_1 = struct.Struct("<IIQQQ")
_NO_DIGEST = bytes(16)
_READ_AHEAD_BYTES = 64 << 10
"""Number of bytes that are read ahead while entries are small; of a large entry only the head is
read.
"""
_READ_AHEAD_OF_LARGE_BYTES = 1 << 10
_KNOWN_STATES = frozenset(map(int, EntryState))


class SlabEntry(NamedTuple):
    """An entry that was read from a slab."""

    frame: memoryview
    data_at: int
    """Offset of the entry's data in the slab, valid until `end_position` is released."""
    data_bytes: int
    has_data: bool
    """Whether the entry has its data; otherwise only its frame is valid."""
    end_position: int
    """Position after the entry."""
    digest: bytes = b""
    """xxh3-128 of the data, from the seal; empty if the entry is not sealed."""
    is_corrupted: bool = False
    """Whether the frame differs from the frame that was sealed."""
    sequence: int = 0
    """Sequence number of the frame, from the seal."""
    mark: int = 0
    """Number that the rank stored for the case that the frame cannot be read, from the seal."""


class SlabReader:
    """Reads the entries of a slab; used by one thread at a time."""

    def __init__(self, store: SlabStore) -> None:
        self._store = store
        header = store.read(0, min(store.length, SLAB_HEADER_BYTES))
        self._version, self.ring_bytes = parse_slab_header(header, store.length)
        self._read = self.released
        if self._read % ENTRY_ALIGNMENT:
            raise CorruptedError(f"damaged slab: released to {self._read}, where no entry ends")
        self._window, self._window_at = memoryview(b""), 0
        self._ahead = _READ_AHEAD_BYTES

    @property
    def written(self) -> int:
        """Position after the last published entry."""
        return self._store.read_number(WRITTEN_OFFSET)

    @property
    def released(self) -> int:
        """Position up to which the rank may overwrite everything."""
        return self._store.read_number(RELEASED_OFFSET)

    def read_entries(self, announced: int | None = None) -> Iterator[SlabEntry]:
        """Yield the entries that were published since the last call; CorruptedError for impossible
        entries.

        While the rank is running, only entries before the position that its doorbell `announced`
        are certain, on every kind of processor, to be read as they were written.
        """
        written = self.written
        if not self._read <= written <= self.released + self.ring_bytes:
            raise CorruptedError(f"damaged slab: written to {written} and read to {self._read}")
        yield from self._until(written if announced is None else min(announced, written))

    def read_remaining_entries(self) -> Iterator[SlabEntry]:
        """Yield the entries that a dead rank had committed or begun; entries that were only begun
        have no data.
        """
        yield from self.read_entries()
        try:
            yield from self._until(self.released + self.ring_bytes)
        except CorruptedError:
            # This is unused space, or the rest of an earlier lap.
            return

    def read_entry_at(self, position: int) -> SlabEntry:
        """Return the entry that was published at a position; CorruptedError if there is none.

        The rank uses this method, because it knows the positions: a damaged entry does not hide
        those after it.
        """
        found = self._entry(position, position + self.ring_bytes - position % self.ring_bytes)
        if not isinstance(found, SlabEntry):
            raise CorruptedError(f"damaged slab: no entry at {position}")
        return found

    def read_data(self, entry: SlabEntry) -> memoryview:
        """Return an entry's data."""
        data_bytes = entry.data_bytes
        begin = entry.end_position - data_bytes - (-data_bytes & _PADDING_MASK) - self._window_at
        if begin >= 0 and begin + data_bytes <= len(self._window):
            return self._window[begin : begin + data_bytes]
        return self._store.read(entry.data_at, data_bytes)

    def release(self, position: int) -> None:
        """Let the rank overwrite everything before a position."""
        if not self.released <= position <= self._read:
            raise ValueError(f"cannot release to {position}: read to {self._read}")
        self._store.write_number(RELEASED_OFFSET, position)

    def _until(self, limit: int) -> Iterator[SlabEntry]:
        while self._read < limit:
            entry = self._entry(self._read, limit)
            if isinstance(entry, SlabEntry):
                self._read = entry.end_position
                yield entry
            else:
                self._read = entry

    def _entry(self, position: int, limit: int) -> SlabEntry | int:
        """Return the entry at a position, or the position after a filler."""
        offset = position % self.ring_bytes
        head_bytes, state, frame_bytes, data_bytes, frame_checksum, sequence, mark, digest = (
            _parse_entry_head(self._version, self._bytes(position, _HEAD_BYTES, limit), position)
        )
        data_at = offset + head_bytes + frame_bytes
        data_at += -data_at & _PADDING_MASK
        filler = state == _FILLER
        total = data_bytes if filler else data_at - offset + data_bytes
        total += 0 if filler else -total & _PADDING_MASK
        end = position + total
        if not 0 < total <= self.ring_bytes - offset or end > limit or total % ENTRY_ALIGNMENT:
            raise CorruptedError(
                f"damaged slab: the entry at {position} declares {total} bytes, but the slab is "
                f"written to {limit}"
            )
        if filler:
            return end
        frame = self._bytes(position + head_bytes, frame_bytes, limit)
        self._ahead = (
            _READ_AHEAD_BYTES if total <= _READ_AHEAD_BYTES // 2 else _READ_AHEAD_OF_LARGE_BYTES
        )
        is_sealed = state == _SEALED
        # Arguments are positional, which is faster: there is an entry for each small record.
        return SlabEntry(
            frame,
            RING_OFFSET + data_at,
            data_bytes,
            is_sealed or state == _COMMITTED,
            end,
            digest if is_sealed and digest != _NO_DIGEST else b"",
            is_sealed and zlib.crc32(frame) != frame_checksum,
            sequence,
            mark,
        )

    def _bytes(self, position: int, length: int, limit: int) -> memoryview:
        """Return bytes of the ring; reads ahead, but not beyond the published limit."""
        begin = position - self._window_at
        if begin < 0 or begin + length > len(self._window):
            offset = position % self.ring_bytes
            ahead = max(length, min(self._ahead, limit - position))
            ahead = min(ahead, self.ring_bytes - offset)
            self._window, begin = self._store.read(RING_OFFSET + offset, ahead), 0
            self._window_at = position
        return self._window[begin : begin + length]


def _parse_entry_head(
    version: int, raw: memoryview, position: int
) -> tuple[int, int, int, int, int, int, int, bytes]:
    """Return size, state, lengths of frame and data, checksum of the frame, number, mark and
    digest.

    In the first version the last four are 0 or empty.
    """
    if version == 1:
        magic, state, stamp, frame_bytes, data_bytes = _ENTRY_HEAD_OF_VERSION_1.unpack_from(raw)
        size = _ENTRY_HEAD_OF_VERSION_1.size
        frame_checksum = sequence = mark = 0
        checksum, digest = None, _NO_DIGEST
    else:
        size = _HEAD_BYTES
        magic, state, stamp, frame_bytes, frame_checksum, data_bytes, *rest = ENTRY_HEAD.unpack(raw)
        sequence, mark, checksum, digest = rest
    if magic != ENTRY_MAGIC or stamp != position or state not in _KNOWN_STATES:
        raise CorruptedError(f"damaged slab: no entry at {position}")
    if state == _SEALED and zlib.crc32(raw[CHECKED_HEAD_BYTES]) != checksum:
        raise CorruptedError(
            f"damaged slab: the head of the entry at {position} differs from what was sealed"
        )
    return size, state, frame_bytes, data_bytes, frame_checksum, sequence, mark, digest

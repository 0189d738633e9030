"""Writer of a slab, on the rank's side: space is reserved, filled, published and sealed. Pure: any
buffer. Safe to use from several threads.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
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
    SLAB_VERSION,
    WRITTEN_OFFSET,
    EntryState,
    parse_slab_header,
)
from rankdump.errors import CorruptedError

_MAX_MARK = (1 << 32) - 1
_HEAD_BYTES = ENTRY_HEAD.size
_pack_head = ENTRY_HEAD.pack_into
_UNSEALED = 0, 0, 0, b""
"""The last fields of a head until its seal."""
_PADDING_MASK, _ALIGNED = ENTRY_ALIGNMENT - 1, -ENTRY_ALIGNMENT
"""`length + _PADDING_MASK & _ALIGNED` is `align_length(length)`, without a call for each tensor."""
_WRITTEN, _RELEASED = WRITTEN_OFFSET // 8, RELEASED_OFFSET // 8
_RESERVED, _COMMITTED = int(EntryState.RESERVED), int(EntryState.COMMITTED)
_SEALED = int(EntryState.SEALED)


class SlabReservation(NamedTuple):
    """Space for one entry, between `reserve` and `commit`."""

    offset: int
    """Of the entry's head within the ring."""
    data: memoryview
    """Space for the data."""
    position: int
    end_position: int
    """Position behind the entry."""
    frame: bytes
    sequence: int
    mark: int


class SlabWriter:
    """Safe to use from several threads.

    Entries are published in the order of their reservations, so an unfinished one holds back
    those after it.
    """

    def __init__(self, memory: memoryview) -> None:
        """Take over a slab; CorruptedError when it has another version or no header."""
        version, self.ring_bytes = parse_slab_header(memory[:RING_OFFSET], len(memory))
        if version < SLAB_VERSION:
            raise CorruptedError(
                f"slab has version {version}; this side writes {SLAB_VERSION} and "
                f"{JOURNAL_SLAB_VERSION}"
            )
        self.max_content_bytes = self.ring_bytes // 2 - _HEAD_BYTES - 2 * _PADDING_MASK
        """Largest sum of a frame and its data that can be reserved in an empty ring."""
        self.has_journal = version == JOURNAL_SLAB_VERSION
        """Whether there is a journal behind the ring."""
        self._numbers = memory[:RING_OFFSET].cast("Q")
        self._ring = memory[RING_OFFSET : RING_OFFSET + self.ring_bytes]
        self._states = self._ring.cast("I")
        self._lock = threading.Lock()
        self._next = self.written
        self._free_end = 0
        """Position up to which space was free when that was last looked up."""
        self._open: deque[SlabReservation] = deque()
        self._done: dict[int, bool] = {}
        self._unsealed: deque[SlabReservation] = deque()
        self._seal_lock = threading.Lock()
        self._sealing: int | None = None

    @property
    def written(self) -> int:
        """Position behind the last published entry."""
        return self._numbers[_WRITTEN]

    @property
    def released(self) -> int:
        """Position before which everything may be overwritten."""
        return self._numbers[_RELEASED]

    @property
    def open_entries(self) -> int:
        """Entries that are reserved and not published."""
        with self._lock:
            return len(self._open)

    def reserve(
        self, frame: bytes, data_bytes: int, sequence: int = 0, mark: int = 0
    ) -> SlabReservation | None:
        """Reserve space for a frame and its data; None when there is none at present.

        `sequence` and `mark` remain known if the bytes of the frame are damaged.
        """
        frame_bytes, ring = len(frame), self._ring
        if mark > _MAX_MARK:
            mark = _MAX_MARK
        data_at = _HEAD_BYTES + frame_bytes + _PADDING_MASK & _ALIGNED
        total = data_at + data_bytes + _PADDING_MASK & _ALIGNED
        with self._lock:
            position, ring_bytes = self._next, self.ring_bytes
            offset = position % ring_bytes
            # An entry never wraps: a filler takes what is left at the end.
            filler = ring_bytes - offset if offset + total > ring_bytes else 0
            end = position + filler + total
            if end > self._free_end and end > self._find_free_end():
                return None
            if filler:
                _pack_head(
                    ring, offset, ENTRY_MAGIC, EntryState.FILLER, position, 0, 0, filler, *_UNSEALED
                )
                position += filler
                offset = 0
            begin = offset + _HEAD_BYTES
            ring[begin : begin + frame_bytes] = frame
            # Last, so that a death in between leaves no head before half a frame.
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
            # As `SlabReservation(...)`, in a third of the time: there is one for each tensor.
            reservation = tuple.__new__(SlabReservation, fields)
            self._next = end
            self._open.append(reservation)
        return reservation

    def commit(self, reservation: SlabReservation, *, whole: bool = True) -> None:
        """Publish an entry whose data is in place, or, if not `whole`, will never come."""
        self._states[reservation.offset // 4 + 1] = _COMMITTED if whole else EntryState.ABANDONED
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
        """Seal the entries committed before a position that were not released.

        `digest_of` returns the digest of a frame's data, given its number; empty for none.
        """
        with self._seal_lock:
            while (reservation := self._pop_unsealed(position)) is not None:
                offset, data, begin, _, frame, sequence, mark = reservation
                digest = digest_of(sequence, data)
                checked = CHECKED_HEAD.pack(
                    begin, len(frame), zlib.crc32(frame), len(data), sequence, mark
                )
                head = checked + SEAL_TAIL.pack(zlib.crc32(checked), digest)
                # All but the state, which is stored last, and atomically.
                self._ring[offset + CHECKED_HEAD_BYTES.start : offset + _HEAD_BYTES] = head
                self._states[offset // 4 + 1] = _SEALED

    def _pop_unsealed(self, position: int) -> SlabReservation | None:
        with self._lock:
            self._sealing = None
            while self._unsealed and self._unsealed[0].end_position <= position:
                reservation = self._unsealed.popleft()
                # The space of a released entry may be another entry's by now.
                if reservation.end_position > self.released:
                    self._sealing = reservation.position
                    return reservation
        return None

    def _find_free_end(self) -> int:
        """Return the position up to which space may be used, without an entry being sealed."""
        begin = self.released
        if self._sealing is not None:
            begin = min(begin, self._sealing)
        self._free_end = begin + self.ring_bytes
        return self._free_end

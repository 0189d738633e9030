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
    CHECKED_HEAD_BYTES,
    ENTRY_HEAD,
    ENTRY_MAGIC,
    JOURNAL_SLAB_VERSION,
    RELEASED_OFFSET,
    RING_OFFSET,
    SLAB_VERSION,
    WRITTEN_OFFSET,
    EntryState,
    align_length,
    parse_slab_header,
)
from rankdump.errors import CorruptedError

_MAX_MARK = (1 << 32) - 1


class SlabReservation(NamedTuple):
    """Space for one entry, between `reserve` and `commit` or `abandon`."""

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
        self.has_journal = version == JOURNAL_SLAB_VERSION
        """Whether there is a journal behind the ring."""
        self._numbers = memory[:RING_OFFSET].cast("Q")
        self._ring = memory[RING_OFFSET : RING_OFFSET + self.ring_bytes]
        self._states = self._ring.cast("I")
        self._lock = threading.Lock()
        self._next = self.written
        self._open: deque[SlabReservation] = deque()
        self._done: dict[int, bool] = {}
        self._unsealed: deque[SlabReservation] = deque()
        self._seal_lock = threading.Lock()
        self._sealing: int | None = None

    @property
    def written(self) -> int:
        """Position behind the last published entry."""
        return self._numbers[WRITTEN_OFFSET // 8]

    @property
    def released(self) -> int:
        """Position before which everything may be overwritten."""
        return self._numbers[RELEASED_OFFSET // 8]

    def can_fit(self, frame_bytes: int, data_bytes: int) -> bool:
        """Return whether an entry of that size can be reserved in an empty ring."""
        return _compute_entry_bytes(frame_bytes, data_bytes) <= self.ring_bytes // 2

    def reserve(
        self, frame: bytes, data_bytes: int, *, sequence: int = 0, mark: int = 0
    ) -> SlabReservation | None:
        """Reserve space for a frame and its data; None when there is none at present.

        `sequence` and `mark` remain known if the bytes of the frame are damaged.
        """
        total = _compute_entry_bytes(len(frame), data_bytes)
        with self._lock:
            offset = self._next % self.ring_bytes
            # An entry never wraps: a filler takes what is left at the end.
            filler = self.ring_bytes - offset if offset + total > self.ring_bytes else 0
            if self._next + filler + total - self._find_free_end() > self.ring_bytes:
                return None
            if filler:
                self._put_head(offset, EntryState.FILLER, 0, filler)
                self._next += filler
                offset = 0
            begin = offset + ENTRY_HEAD.size
            self._ring[begin : begin + len(frame)] = frame
            # Last, so that a death in between leaves no head before half a frame.
            self._put_head(offset, EntryState.RESERVED, len(frame), data_bytes)
            data_at = offset + align_length(ENTRY_HEAD.size + len(frame))
            reservation = SlabReservation(
                offset,
                self._ring[data_at : data_at + data_bytes],
                self._next,
                self._next + total,
                frame,
                sequence,
                min(mark, _MAX_MARK),
            )
            self._next = reservation.end_position
            self._open.append(reservation)
        return reservation

    def commit(self, reservation: SlabReservation) -> None:
        """Publish an entry whose data is in place."""
        self._end(reservation, EntryState.COMMITTED)

    def abandon(self, reservation: SlabReservation) -> None:
        """Publish an entry whose data will never come."""
        self._end(reservation, EntryState.ABANDONED)

    def seal(self, position: int, digest_of: Callable[[int, memoryview], bytes]) -> None:
        """Seal the entries committed before a position that were not released.

        `digest_of` returns the digest of a frame's data, given its number; empty for none.
        """
        with self._seal_lock:
            while (reservation := self._pop_unsealed(position)) is not None:
                digest = digest_of(reservation.sequence, reservation.data)
                head = bytearray(ENTRY_HEAD.size)
                crc, length = zlib.crc32(reservation.frame), len(reservation.frame)
                about = (
                    reservation.position,
                    length,
                    crc,
                    len(reservation.data),
                    reservation.sequence,
                    reservation.mark,
                )
                ENTRY_HEAD.pack_into(head, 0, ENTRY_MAGIC, 0, *about, 0, digest)
                own = zlib.crc32(head[CHECKED_HEAD_BYTES])
                ENTRY_HEAD.pack_into(head, 0, ENTRY_MAGIC, 0, *about, own, digest)
                # All but the state, which is stored last, and atomically.
                self._ring[reservation.offset + 8 : reservation.offset + ENTRY_HEAD.size] = head[8:]
                self._states[reservation.offset // 4 + 1] = EntryState.SEALED

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
        """Return the position before which space may be reused, without one being sealed."""
        released = self.released
        return released if self._sealing is None else min(released, self._sealing)

    def _end(self, reservation: SlabReservation, state: EntryState) -> None:
        self._states[reservation.offset // 4 + 1] = state
        with self._lock:
            waiting, done = self._open, self._done
            done[reservation.position] = state == EntryState.COMMITTED
            end = 0
            while waiting and waiting[0].position in done:
                reservation = waiting.popleft()
                end = reservation.end_position
                if done.pop(reservation.position):
                    self._unsealed.append(reservation)
            if end:
                self._numbers[WRITTEN_OFFSET // 8] = end

    def _put_head(self, offset: int, state: EntryState, frame_bytes: int, data_bytes: int) -> None:
        about = (self._next, frame_bytes, 0, data_bytes, 0, 0, 0, b"")
        ENTRY_HEAD.pack_into(self._ring, offset, ENTRY_MAGIC, state, *about)


def _compute_entry_bytes(frame_bytes: int, data_bytes: int) -> int:
    return align_length(ENTRY_HEAD.size + frame_bytes) + align_length(data_bytes)

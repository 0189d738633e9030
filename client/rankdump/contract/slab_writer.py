"""The rank's side of a slab: room is reserved, filled, published and sealed. Pure: any buffer."""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from rankdump.contract.errors import DamagedError
from rankdump.contract.slab import (
    CHECKED,
    ENTRY_MAGIC,
    HEAD,
    RELEASED_AT,
    RING_OFFSET,
    VERSION,
    WRITTEN_AT,
    State,
    aligned,
    ring_of,
)

_MOST_MARK = (1 << 32) - 1


class Reservation(NamedTuple):
    """Room for one entry, between `reserve` and `commit` or `abandon`."""

    offset: int
    """Of the entry's head within the ring."""
    data: memoryview
    """Where the data goes."""
    position: int
    end: int
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
        """DamagedError when this side cannot write there."""
        version, self.ring_bytes = ring_of(memory[:RING_OFFSET], len(memory))
        if version != VERSION:
            raise DamagedError(f"slab of version {version}: this side writes {VERSION}")
        self._numbers = memory[:RING_OFFSET].cast("Q")
        self._ring = memory[RING_OFFSET:]
        self._states = self._ring.cast("I")
        self._lock = threading.Lock()
        self._next = self.written
        self._open: deque[Reservation] = deque()
        self._done: dict[int, bool] = {}
        self._unsealed: deque[Reservation] = deque()
        self._one_seals = threading.Lock()
        self._sealing: int | None = None

    @property
    def written(self) -> int:
        """Position behind the last published entry."""
        return self._numbers[WRITTEN_AT // 8]

    @property
    def released(self) -> int:
        """Position before which everything may be overwritten."""
        return self._numbers[RELEASED_AT // 8]

    def fits(self, frame_bytes: int, data_bytes: int) -> bool:
        """Return whether an entry of that size can be reserved at all, once there is room."""
        return _total(frame_bytes, data_bytes) <= self.ring_bytes // 2

    def reserve(
        self, frame: bytes, data_bytes: int, *, sequence: int = 0, mark: int = 0
    ) -> Reservation | None:
        """Take room for a frame and its data; None when there is none just now.

        Number and mark are what is known of the frame should its bytes be damaged.
        """
        total = _total(len(frame), data_bytes)
        with self._lock:
            offset = self._next % self.ring_bytes
            # An entry never wraps: what is left at the end is filled up.
            filler = self.ring_bytes - offset if offset + total > self.ring_bytes else 0
            if self._next + filler + total - self._free_to() > self.ring_bytes:
                return None
            if filler:
                self._put_head(offset, State.FILLER, 0, filler)
                self._next += filler
                offset = 0
            begin = offset + HEAD.size
            self._ring[begin : begin + len(frame)] = frame
            # Last, so that a death in between leaves no head before half a frame.
            self._put_head(offset, State.RESERVED, len(frame), data_bytes)
            data_at = offset + aligned(HEAD.size + len(frame))
            room = Reservation(
                offset,
                self._ring[data_at : data_at + data_bytes],
                self._next,
                self._next + total,
                frame,
                sequence,
                min(mark, _MOST_MARK),
            )
            self._next = room.end
            self._open.append(room)
        return room

    def commit(self, reservation: Reservation) -> None:
        """Publish an entry whose data is in place."""
        self._end(reservation, State.COMMITTED)

    def abandon(self, reservation: Reservation) -> None:
        """Publish an entry whose data will never come."""
        self._end(reservation, State.ABANDONED)

    def seal(self, position: int, digest_of: Callable[[int, memoryview], bytes]) -> None:
        """Put checksums to what was committed before a position, if it is still there.

        `digest_of` is asked for the digest of a frame's data, given its number; empty means none.
        """
        with self._one_seals:
            while (room := self._to_seal(position)) is not None:
                digest = digest_of(room.sequence, room.data)
                head = bytearray(HEAD.size)
                crc, length = zlib.crc32(room.frame), len(room.frame)
                about = room.position, length, crc, len(room.data), room.sequence, room.mark
                HEAD.pack_into(head, 0, ENTRY_MAGIC, 0, *about, 0, digest)
                own = zlib.crc32(head[CHECKED])
                HEAD.pack_into(head, 0, ENTRY_MAGIC, 0, *about, own, digest)
                # All but the state, which comes last and at one blow.
                self._ring[room.offset + 8 : room.offset + HEAD.size] = head[8:]
                self._states[room.offset // 4 + 1] = State.SEALED

    def _to_seal(self, position: int) -> Reservation | None:
        with self._lock:
            self._sealing = None
            while self._unsealed and self._unsealed[0].end <= position:
                room = self._unsealed.popleft()
                # What was read and released by now may be another entry's.
                if room.end > self.released:
                    self._sealing = room.position
                    return room
        return None

    def _free_to(self) -> int:
        """Return the position before which room may be used; not that of an entry being sealed."""
        released = self.released
        return released if self._sealing is None else min(released, self._sealing)

    def _end(self, reservation: Reservation, state: State) -> None:
        self._states[reservation.offset // 4 + 1] = state
        with self._lock:
            waiting, done = self._open, self._done
            done[reservation.position] = state == State.COMMITTED
            end = 0
            while waiting and waiting[0].position in done:
                room = waiting.popleft()
                end = room.end
                if done.pop(room.position):
                    self._unsealed.append(room)
            if end:
                self._numbers[WRITTEN_AT // 8] = end

    def _put_head(self, offset: int, state: State, frame_bytes: int, data_bytes: int) -> None:
        HEAD.pack_into(
            self._ring,
            offset,
            ENTRY_MAGIC,
            state,
            self._next,
            frame_bytes,
            0,
            data_bytes,
            0,
            0,
            0,
            b"",
        )


def _total(frame_bytes: int, data_bytes: int) -> int:
    return aligned(HEAD.size + frame_bytes) + aligned(data_bytes)

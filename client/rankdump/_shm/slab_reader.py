"""Reader of a slab, on the agent's side, which checks everything that it reads. Pure: any store.
For one thread at a time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from rankdump._shm.slab_format import (
    CHECKED_HEAD_BYTES,
    ENTRY_ALIGNMENT,
    ENTRY_HEAD,
    ENTRY_MAGIC,
    RELEASED_OFFSET,
    RING_OFFSET,
    SLAB_HEADER_BYTES,
    WRITTEN_OFFSET,
    EntryState,
    SlabStore,
    parse_slab_header,
)
from rankdump.errors import CorruptedError

# Ranks of an earlier release may still run, or have left slabs, when an agent is upgraded.
_ENTRY_HEAD_OF_VERSION_1 = struct.Struct("<IIQQQ")
_NO_DIGEST = bytes(16)
_HEAD_BYTES = ENTRY_HEAD.size
_PADDING_MASK = ENTRY_ALIGNMENT - 1
"""`-length & _PADDING_MASK` bytes follow a length, as in the writer."""
_READ_AHEAD_BYTES = 64 << 10
"""Bytes that are read at once while entries are small; of large ones the head alone."""
_READ_AHEAD_OF_LARGE_BYTES = 1 << 10
_KNOWN_STATES = frozenset(map(int, EntryState))
# As numbers: comparing members of an enumeration takes longer than reading them.
_COMMITTED, _FILLER, _SEALED = map(
    int, (EntryState.COMMITTED, EntryState.FILLER, EntryState.SEALED)
)


class SlabEntry(NamedTuple):
    """An entry that was read."""

    frame: memoryview
    data_at: int
    """Offset of its data in the slab, valid until `end_position` is released."""
    data_bytes: int
    has_data: bool
    """Whether the data is there; otherwise only the frame is valid."""
    end_position: int
    """Position behind the entry."""
    digest: bytes = b""
    """xxh3-128 of the data from the seal; empty without one."""
    is_corrupted: bool = False
    """Whether the frame differs from the sealed one."""
    sequence: int = 0
    """The frame's number, from the seal."""
    mark: int = 0
    """A number of the rank about a frame that cannot be read, from the seal."""


class SlabReader:
    """Reads entries; for one thread at a time."""

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
        """Position behind the last published entry."""
        return self._store.read_number(WRITTEN_OFFSET)

    @property
    def released(self) -> int:
        """Position before which everything may be overwritten."""
        return self._store.read_number(RELEASED_OFFSET)

    def read_entries(self, announced: int | None = None) -> Iterator[SlabEntry]:
        """Yield the entries published since the last call; CorruptedError for impossible ones.

        While the rank runs, only entries before the position that its doorbell `announced` are
        certain to be read as they were written, on every kind of processor.
        """
        written = self.written
        if not self._read <= written <= self.released + self.ring_bytes:
            raise CorruptedError(f"damaged slab: written to {written} and read to {self._read}")
        yield from self._until(written if announced is None else min(announced, written))

    def read_remaining_entries(self) -> Iterator[SlabEntry]:
        """Yield the entries that a dead rank had committed or begun; those begun have no data."""
        yield from self.read_entries()
        try:
            yield from self._until(self.released + self.ring_bytes)
        except CorruptedError:
            # Unused space, or the rest of an earlier lap.
            return

    def read_entry_at(self, position: int) -> SlabEntry:
        """Return the entry that was published at a position; CorruptedError when none is there.

        For the rank, which knows its positions: a damaged entry does not hide those behind it.
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
        """Return the entry at a position, or the position behind a filler."""
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
        # By position: there is one for each small record.
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
    """Return size, state, bytes of frame and data, checksum of the frame, number, mark and digest.

    The last four are 0 or empty in the first version.
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

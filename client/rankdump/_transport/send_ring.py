"""Shared-memory ring as the sender uses it: the file of the slab, mapped and locked while this
process may write into it; numbered entries and pieces of large records; and the unacknowledged
entries when the slab is abandoned.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from rankdump._core.recorder_protocol import DeviceCopier, DeviceTransfer
from rankdump._core.session_protocol import SlabPlace
from rankdump._shm.event_journal import EventJournal
from rankdump._shm.slab_format import JOURNAL_BYTES, RING_OFFSET, SlabMemory
from rankdump._shm.slab_ring import SlabReader, SlabReservation, SlabWriter
from rankdump._transport.frame_queue import NumberedItem, RecoveredEntry
from rankdump._wire.frames import compute_checksum
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2


class SlabMapping:
    """A mapped file with a POSIX lock, by which the agent sees that this process is alive.

    The lock ends when *any* descriptor of the file in this process is closed. There are two, the
    one here and the one that `mmap` creates for itself; `close` ends both.
    """

    def __init__(self, place: SlabPlace) -> None:
        """Map the file; OSError or CorruptedError if that is impossible."""
        self._descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            facts = os.fstat(self._descriptor)
            if facts.st_size != place.length:
                raise CorruptedError(
                    f"slab {place.path} of {facts.st_size} bytes, but granted with {place.length}"
                )
            self.identity = (facts.st_dev, facts.st_ino)
            """Identity of the file: device and inode."""
            # All pages are mapped at once: page faults during the first lap would cost as much as
            # the copies.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(self._descriptor, place.length, flags=flags)
            # The lock is taken last, because a failed mapping would release it with its descriptor.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.memory = memoryview(self._map)
        """Memory of the whole file."""

    def is_at(self, place: SlabPlace) -> bool:
        """Return whether the path of the place is still this file."""
        try:
            facts = Path(place.path).stat()
        except OSError:
            return False
        return (facts.st_dev, facts.st_ino) == self.identity

    def close(self) -> None:
        """Release the lock; the memory is unmapped when its last view is released."""
        os.close(self._descriptor)
        self.memory.release()


_logger = logging.getLogger(__name__)

MAX_PIECE_BYTES = 1 << 20
_MAX_NUMBER_BYTES = 11
"""Maximum number of bytes that a sequence number adds to a frame."""


class SendRing:
    """One slab of a session, from its grant until it is abandoned."""

    def __init__(self, place: SlabPlace) -> None:
        """Map the slab; OSError or CorruptedError if it is not a slab that can be written."""
        self.mapping = SlabMapping(place)
        try:
            self._writer = SlabWriter(self.mapping.memory)
        except BaseException:
            self.mapping.close()
            raise
        self.journal: EventJournal | None = None
        """Journal with the newest events of this process; None if the slab has none."""
        if self._writer.has_journal:
            begin = RING_OFFSET + self._writer.ring_bytes
            self.journal = EventJournal(self.mapping.memory[begin : begin + JOURNAL_BYTES])
        self._cut_from: dict[int, int] = {}
        self._positions = _EntryPositions()
        self.publish = self._writer.commit
        """Publishes an entry, with its data or without."""
        self.max_content_bytes = self._writer.max_content_bytes - _MAX_NUMBER_BYTES
        """Maximum bytes in one entry of a frame, without its sequence number, and its data
        together.
        """
        self._unpin: Callable[[], None] | None = None
        self._may_pin = True
        self._pinning = threading.Lock()

    @property
    def written(self) -> int:
        """Position after the last published entry."""
        return self._writer.written

    @property
    def released(self) -> int:
        """Position up to which the agent needs no data any more."""
        return self._writer.released

    @property
    def open_entries(self) -> int:
        """Number of entries that are being filled, or wait for an earlier entry that is."""
        return self._writer.open_entries

    @property
    def piece_bytes(self) -> int:
        """Bytes of one piece of a large record."""
        return min(MAX_PIECE_BYTES, self._writer.ring_bytes // 8)

    def reserve(
        self, frame: bytes, data_bytes: int, sequence: int, iteration: int | None
    ) -> SlabReservation | None:
        """Reserve space for a frame with a sequence number; return None if there is no space at
        present.

        `iteration` is the iteration of a record, which counts the loss if the frame is damaged.
        """
        mark = 0 if iteration is None else iteration + 1
        reservation = self._writer.reserve(frame, data_bytes, sequence, mark)
        if reservation is not None:
            self._positions.add(sequence, reservation.position)
        return reservation

    def begin_copy(self, accelerator: DeviceCopier, target: memoryview) -> DeviceTransfer | None:
        """Begin a copy by a tensor's accelerator into a part of this slab; return None if that is
        impossible.

        The slab is pinned for the first copy. After a failure all copies are plain, which is slower
        but reliable.
        """
        if not self._may_pin:
            return None
        try:
            with self._pinning:
                if self._may_pin and self._unpin is None:
                    self._unpin = accelerator.pin(self.mapping.memory)
                    self._may_pin = self._unpin is not None
            return accelerator.copy_into(target) if self._may_pin else None
        except Exception:
            _logger.debug("an accelerator cannot copy into the slab", exc_info=True)
            self._may_pin = False
            return None

    def seal(self, position: int) -> None:
        """Seal the entries that were published before a position; called by the sender."""
        self._writer.seal(position, self._digest)
        self._positions.forget_released(self._writer.released)

    def note_cut_record(self, sequence: int, first: SlabReservation) -> None:
        """Note that a record is sent in pieces, which the agent releases one by one."""
        released = self._writer.released
        ahead = (first.offset - released) % self._writer.ring_bytes
        self._cut_from.setdefault(sequence, released + ahead)

    def has_broken_record(self, acknowledged: int) -> bool:
        """Return whether an agent that restarts would miss the beginning of a record in pieces."""
        self._cut_from = {k: at for k, at in self._cut_from.items() if k > acknowledged}
        return any(self._writer.released > at for at in self._cut_from.values())

    def read_unacknowledged(self, acknowledged: int) -> Iterator[NumberedItem]:
        """Yield the readable entries that were not acknowledged, except records in pieces.

        Nothing may be written to the slab any more. The data stays in the slab.
        """
        try:
            reader = SlabReader(SlabMemory(self.mapping.memory))
        except CorruptedError as error:
            _logger.warning("rankdump: shared memory was damaged: %s", error)
            return
        for sequence, position in self._positions:
            if sequence > acknowledged and sequence not in self._cut_from:
                found = _recover_entry(reader, sequence, position)
                if found is not None:
                    yield found

    def close(self) -> None:
        """Release the lock, so that the agent sees that nothing more will be written."""
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self.mapping.close()

    def _digest(self, sequence: int, data: memoryview) -> bytes:
        # The frame of a record in pieces already has the digest of the whole record.
        return b"" if not data or sequence in self._cut_from else compute_checksum(data)


_MIN_FORGOTTEN_ENTRIES = 1024


class _EntryPositions:
    """Sequence numbers and positions of entries, 16 bytes each: a full slab may hold a million
    entries.

    Entries are added by one thread at a time, and forgotten by any other thread.
    """

    def __init__(self) -> None:
        self._numbers, self._positions = array("Q"), array("Q")
        self._forgetting = threading.Lock()
        self._enough = _MIN_FORGOTTEN_ENTRIES

    def add(self, sequence: int, position: int) -> None:
        """Note the number and the position of an entry."""
        # The number comes first, so that a position that is being forgotten has its number.
        self._numbers.append(sequence)
        self._positions.append(position)

    def forget_released(self, released: int) -> None:
        """Forget the entries before a position, once the list is twice as long as after the last
        time.
        """
        if len(self._positions) < self._enough:
            return
        with self._forgetting:
            count = bisect_left(self._positions, released)
            del self._numbers[:count], self._positions[:count]
            self._enough = max(_MIN_FORGOTTEN_ENTRIES, 2 * len(self._positions))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        with self._forgetting:
            return zip(self._numbers[:], self._positions[:], strict=True)


def _recover_entry(reader: SlabReader, sequence: int, position: int) -> NumberedItem | None:
    """Return the entry at a position; None if it differs from what was written there."""
    try:
        entry = reader.read_entry_at(position)
        frame = agent_pb2.Frame.FromString(bytes(entry.frame))
    except (CorruptedError, DecodeError):
        return None
    if entry.is_corrupted or frame.sequence != sequence:
        return None
    data = reader.read_data(entry)
    return NumberedItem(
        sequence,
        RecoveredEntry(frame, data, entry.has_data, _count_frame_tensors(frame), entry.digest),
    )


def _count_frame_tensors(frame: agent_pb2.Frame) -> int:
    if frame.HasField("figure_rows"):
        return len(frame.figure_rows.kinds)
    return frame.lost.tensors if frame.HasField("lost") else int(frame.HasField("record"))

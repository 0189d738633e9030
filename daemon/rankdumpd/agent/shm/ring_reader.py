"""Reader of one session's ring. It handles frames as if they had arrived on the stream, then
releases the slab up to the first entry that is still needed. After a fault in the slab, nothing
more is read from it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from google.protobuf.message import DecodeError

from rankdump._core.events import EventColumns
from rankdump._shm.event_journal import read_journal
from rankdump._shm.slab_ring import SlabEntry, SlabReader
from rankdump.errors import CorruptedError, ProtocolError, RankdumpError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.records import CORRUPTED, SMALL_RECORD_BYTES, RecordElements
from rankdumpd.agent.shm.slab_file import SlabFile


class ReleaseQueue:
    """Entries that were read and are not released yet, in the order of the ring.

    One thread may add entries while another thread pops positions.
    """

    def __init__(self, acknowledged: int) -> None:
        self._acknowledged = acknowledged
        self._entries: deque[tuple[int, int]] = deque()

    def add(self, sequence: int, end: int, *, copied: bool) -> None:
        """Add an entry that ends at the position `end`; an entry that was copied needs no
        acknowledgement.
        """
        self._entries.append((0 if copied else sequence, end))

    def acknowledge(self, sequence: int) -> None:
        """Mark all frames up to this sequence number as acknowledged."""
        self._acknowledged = max(self._acknowledged, sequence)

    def pop(self) -> int:
        """Return the position up to which entries can be released; 0 if it is the same as at the
        last call.
        """
        position, entries, acknowledged = 0, self._entries, self._acknowledged
        while entries and entries[0][0] <= acknowledged:
            _, position = entries.popleft()
        return position


COPY_FAILED = "copy_failed"
TORN = "torn"

_logger = logging.getLogger(__name__)


class FrameIntake(Protocol):
    """The part of a session's intake that its ring needs."""

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last frame that arrived; 0 before the first frame."""
        ...

    @property
    def within_record(self) -> bool:
        """Whether chunks of the last record are still missing."""
        ...

    def handle_frame(
        self, frame: agent_pb2.Frame, data: RecordElements | None = None, *, lost: str = ""
    ) -> None:
        """Accept a frame. Its elements may be passed separately as `data`, or be `lost` for a drop
        reason.
        """
        ...

    def flush(self) -> None:
        """Submit the frames that were gathered."""
        ...

    def cut_off(self, reason: str) -> None:
        """Drop the incomplete record, whose remaining chunks will never arrive."""
        ...

    def release_budget(self) -> None:
        """Release the queue budget of a record that was not completed."""
        ...

    def handle_last_events(self, events: EventColumns) -> None:
        """Accept the newest events of an exited rank; they take their place behind its
        last frame.
        """
        ...


class RingReader:
    """Reads the slab of one session, across its streams; after an error nothing more is read.

    The data of a record stays in the slab until the record is committed. Chunks of a larger record
    are released at once, because the whole record need not fit. A record with a corrupted frame is
    dropped alone; after any other corruption the rank resends on its stream.
    """

    def __init__(
        self,
        slab: SlabFile,
        intake: FrameIntake,
        *,
        acknowledged: int,
        add_finding: Callable[[str], object],
    ) -> None:
        """Start at the release position of the slab; CorruptedError when the file is not a slab.

        `add_finding` is called with findings for people.
        """
        self.slab = slab
        self._reader = SlabReader(slab)
        self.intake, self._add_finding = intake, add_finding
        self._releases = ReleaseQueue(acknowledged)
        self._fault: RankdumpError | None = None
        self._abandoned_record = 0
        """Number of the chunked record that is skipped because one of its chunks was corrupted."""
        # `_reading` is held while the queue is full, so releasing entries needs a lock of its own.
        self._reading = threading.Lock()
        self._releasing = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether a rank has ever published an entry."""
        return self._reader.written > 0

    @property
    def unused(self) -> bool:
        """Whether a rank can use the slab like a new one."""
        try:
            return self._fault is None and not self.begun
        except CorruptedError:
            return False

    @property
    def may_go_on(self) -> bool:
        """Whether the rank that uses the slab can continue with it.

        Not in the middle of a chunked record: its released chunks are gone, and the rank resends
        all of it.
        """
        broken = self._fault is not None or self.intake.within_record
        return not broken and self.slab.is_in_use()

    @property
    def filled_share(self) -> float:
        """Share of the ring that is written and not yet released; 0 after a fault."""
        try:
            return (self._reader.written - self._reader.released) / self._reader.ring_bytes
        except (CorruptedError, OSError):
            return 0.0

    def read(self, announced: int) -> None:
        """Read the entries up to the announced position, all if it is 0; RankdumpError
        for a fault.
        """
        if announced > self._reader.written:
            raise ProtocolError(
                f"a doorbell announces {announced} bytes, the slab has {self._reader.written}"
            )
        with self._reading:
            self._read_checked(self._reader.read_entries(announced or None), lost=COPY_FAILED)

    def read_remains(self) -> None:
        """Read the remaining entries of an exited rank; a record that it had not finished is
        dropped.
        """
        with self._reading:
            self._read_checked(self._reader.read_entries(), lost=COPY_FAILED)
            self._read_checked(self._reader.read_remaining_entries(), lost=TORN)
            self.intake.cut_off(TORN)

    def read_journal(self) -> bool:
        """Read the newest events of an exited rank; return whether its journal has them.

        A fault in the ring does not prevent this.
        """
        with self._reading:
            self.slab.check()
            events = read_journal(self.slab)
            if events is None:
                return False
            if len(events):
                self.intake.handle_last_events(events)
            return True

    def acknowledge(self, sequence: int) -> None:
        """Release the entries of all frames up to this sequence number."""
        with self._releasing:
            self._releases.acknowledge(sequence)
            self._release()

    def abandon(self, reason: str) -> None:
        """Stop reading: the rank resends what is not acknowledged."""
        self._fault = UnavailableError(f"slab {self.slab.path}: {reason}")

    def give_up(self) -> None:
        """Release the queue budget of a record that will never be complete."""
        with self._reading:
            self.intake.release_budget()

    def _read_checked(self, entries: Iterable[SlabEntry], *, lost: str) -> None:
        if self._fault:
            raise self._fault
        try:
            self.slab.check()
            self._handle_entries(entries, lost)
        except UnavailableError:
            # This process is stopping; the next process reads the ring again.
            raise
        except RankdumpError as error:
            self._fault = error
            raise

    def _handle_entries(self, entries: Iterable[SlabEntry], lost: str) -> None:
        try:
            for entry in entries:
                self._handle_entry(entry, "" if entry.has_data else lost)
        finally:
            self.intake.flush()
            with self._releasing:
                self._release()

    def _handle_entry(self, entry: SlabEntry, lost: str) -> None:
        intake = self.intake
        frame = self._make_lost_frame(entry) if entry.is_corrupted else _parse_frame(entry)
        body, sequence = frame.WhichOneof("body"), frame.sequence
        pieced = body == "chunk"
        if not pieced or sequence != self._abandoned_record:
            if entry.digest and body == "record":
                frame.record.checksum = entry.digest
            lost = CORRUPTED if entry.is_corrupted else lost
            data = memoryview(b"") if entry.is_corrupted else self._read_elements(entry)
            intake.handle_frame(frame, data, lost=lost)
        copied = pieced or intake.within_record
        self._releases.add(sequence, entry.end_position, copied=copied)
        if copied:
            with self._releasing:
                self._release()

    def _read_elements(self, entry: SlabEntry) -> RecordElements:
        # Small data is read at once. Large data stays in the slab, because the queue may be full.
        if entry.data_bytes <= SMALL_RECORD_BYTES:
            return self._reader.read_data(entry)
        return self.slab.elements_at(entry.data_at, entry.data_bytes)

    def _make_lost_frame(self, entry: SlabEntry) -> agent_pb2.Frame:
        """Return a lost record that replaces a corrupted frame.

        CorruptedError when the entry is not marked as a record.
        """
        number = entry.sequence
        _logger.error("slab %s: frame %d is corrupted", self.slab.path, number)
        self._add_finding("frames in its slab were corrupted")
        if self.intake.within_record and number == self.intake.last_sequence:
            self.intake.cut_off(CORRUPTED)
            self._abandoned_record = number
        elif entry.mark:
            self._abandoned_record = number
            lost = agent_pb2.Lost(iteration=entry.mark - 1, tensors=1, reason=CORRUPTED)
            return agent_pb2.Frame(sequence=number, lost=lost)
        if number == self._abandoned_record:
            return agent_pb2.Frame(sequence=number, chunk=agent_pb2.Chunk())
        raise CorruptedError(
            f"slab entry before {entry.end_position}: frame {number} is corrupted and no record"
        )

    def _release(self) -> None:
        position = self._releases.pop()
        if not position:
            return
        try:
            self._reader.release(position)
        except ValueError as error:
            # The field with the release position belongs to the agent, and the rank has overwritten
            # it.
            self._fault = ProtocolError(f"slab {self.slab.path}: {error}")


def iter_unread_sizes(slab: SlabFile, after: int) -> Iterator[int]:
    """Yield the size in bytes of each published frame with a sequence number above `after`;
    CorruptedError for a damaged frame.
    """
    for entry in SlabReader(slab).read_entries():
        # Entries without a seal have their sequence number only in the frame.
        number = entry.sequence or _parse_frame(entry).sequence
        if number > after:
            yield len(entry.frame) + entry.data_bytes


def _parse_frame(entry: SlabEntry) -> agent_pb2.Frame:
    try:
        # Copied before parsing, because the rank could change the bytes in the meantime.
        return agent_pb2.Frame.FromString(bytes(entry.frame))
    except DecodeError as error:
        raise CorruptedError(f"slab entry before {entry.end_position}: {error}") from None

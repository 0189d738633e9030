"""Reader of one session's ring: takes frames in as if they had come on the stream, then releases
the slab as far as everything before is safe. A fault in the slab is final.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from google.protobuf.message import DecodeError

from rankdump._shm.slab_reader import SlabEntry, SlabReader
from rankdump.errors import CorruptedError, ProtocolError, RankdumpError, UnavailableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.records import CORRUPTED, SMALL_RECORD_BYTES, RecordElements
from rankdumpd.agent.shm.slab_file import SlabFile


@dataclass(frozen=True, slots=True)
class _ReadEntry:
    """An entry that was read."""

    sequence: int
    end: int
    copied: bool


class ReleaseQueue:
    """Entries that were read and are not released yet, in their order."""

    def __init__(self, acknowledged: int) -> None:
        self._acknowledged = acknowledged
        self._entries: deque[_ReadEntry] = deque()

    def add(self, sequence: int, end: int, *, copied: bool) -> None:
        """Note an entry up to a position; one that was copied waits for no acknowledgement."""
        self._entries.append(_ReadEntry(sequence, end, copied))

    def acknowledge(self, sequence: int) -> None:
        """Note that everything up to a number is safe."""
        self._acknowledged = max(self._acknowledged, sequence)

    def pop(self) -> int:
        """Return the position up to which nothing is needed any more, once; 0 without news."""
        position = 0
        while self._entries and self._is_released(self._entries[0]):
            position = self._entries.popleft().end
        return position

    def _is_released(self, entry: _ReadEntry) -> bool:
        return entry.copied or entry.sequence <= self._acknowledged


COPY_FAILED = "copy_failed"
TORN = "torn"

_logger = logging.getLogger(__name__)


class FrameIntake(Protocol):
    """Takes the frames of one session in, as far as its ring knows it."""

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that arrived; 0 before the first."""
        ...

    @property
    def within_record(self) -> bool:
        """Whether more of the last record has to come."""
        ...

    def handle_frame(
        self, frame: agent_pb2.Frame, data: RecordElements | None = None, *, lost: str = ""
    ) -> None:
        """Take a frame whose data may stand elsewhere; `lost` says why that data never came."""
        ...

    def flush(self) -> None:
        """Hand on what was gathered: nothing more comes with it."""
        ...

    def cut_off(self, reason: str) -> None:
        """Count the record whose rest will never come."""
        ...

    def release_budget(self) -> None:
        """Free the room of a record that did not come to its end."""
        ...


class RingReader:
    """One slab of a session, across its streams; a fault in it is final.

    A record's data stays in the slab until it is committed; what is written is a copy. Pieces of a
    larger one are released at once: it need not fit. A record whose frame is not the one that was
    sealed costs itself and no other; anything else that is damaged, its rank has to say again.
    """

    def __init__(
        self,
        slab: SlabFile,
        intake: FrameIntake,
        *,
        acknowledged: int,
        add_finding: Callable[[str], object],
    ) -> None:
        """Begin where the slab is released to; DamagedError when it is none.

        `add_finding` hears of what people should know.
        """
        self.slab = slab
        self._reader = SlabReader(slab)
        self._intake, self._add_finding = intake, add_finding
        self._releases = ReleaseQueue(acknowledged)
        self._fault: RankdumpError | None = None
        self._abandoned_record = 0
        """Number of the record in pieces of which one was damaged."""
        # Held while there is no room for more, so the way to make room must not need it.
        self._reading = threading.Lock()
        self._releasing = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether a rank ever published anything."""
        return self._reader.written > 0

    @property
    def unused(self) -> bool:
        """Whether a rank can begin with it as if it were new."""
        try:
            return self._fault is None and not self.begun
        except CorruptedError:
            return False

    @property
    def may_go_on(self) -> bool:
        """Whether the rank that uses it can go on with it.

        Not within a record in pieces: those released are gone, and the rank begins it again.
        """
        broken = self._fault is not None or self._intake.within_record
        return not broken and self.slab.in_use()

    @property
    def within_record(self) -> bool:
        """Whether more of the last record has to come."""
        return self._intake.within_record

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that was taken in; 0 before the first."""
        return self._intake.last_sequence

    def read(self, announced: int) -> None:
        """Take in what was announced, 0 for all there is; raise what is wrong with it."""
        if announced > self._reader.written:
            raise ProtocolError(
                f"a doorbell announces {announced} bytes, the slab has {self._reader.written}"
            )
        with self._reading:
            self._take(self._reader.read_entries(announced or None), lost=COPY_FAILED)

    def read_remains(self) -> None:
        """Take in what a rank that is gone has left; what it was within is a counted drop."""
        with self._reading:
            self._take(self._reader.read_entries(), lost=COPY_FAILED)
            self._take(self._reader.read_remaining_entries(), lost=TORN)
            self._intake.cut_off(TORN)

    def acknowledge(self, sequence: int) -> None:
        """Release what is safe now that everything up to this number is."""
        with self._releasing:
            self._releases.acknowledge(sequence)
            self._release()

    def abandon(self, reason: str) -> None:
        """Take nothing more from it: the rank is to send again what is not acknowledged."""
        self._fault = UnavailableError(f"slab {self.slab.path}: {reason}")

    def give_up(self) -> None:
        """Free what is occupied for a record that will never be whole."""
        with self._reading:
            self._intake.release_budget()

    def _take(self, entries: Iterable[SlabEntry], *, lost: str) -> None:
        if self._fault:
            raise self._fault
        try:
            self.slab.check()
            self._take_all(entries, lost)
        except UnavailableError:
            # This process is stopping: the next one reads it again.
            raise
        except RankdumpError as error:
            self._fault = error
            raise

    def _take_all(self, entries: Iterable[SlabEntry], lost: str) -> None:
        try:
            for entry in entries:
                self._take_one(entry, "" if entry.has_data else lost)
        finally:
            self._intake.flush()
            with self._releasing:
                self._release()

    def _take_one(self, entry: SlabEntry, lost: str) -> None:
        frame = self._stand_in(entry) if entry.is_corrupted else _parse_frame(entry)
        pieced = frame.HasField("chunk")
        if not pieced or frame.sequence != self._abandoned_record:
            if entry.digest and frame.HasField("record"):
                frame.record.checksum = entry.digest
            lost = CORRUPTED if entry.is_corrupted else lost
            data = memoryview(b"") if entry.is_corrupted else self._data(entry)
            self._intake.handle_frame(frame, data, lost=lost)
        copied = self._intake.within_record or pieced
        with self._releasing:
            self._releases.add(frame.sequence, entry.end_position, copied=copied)
            if copied:
                self._release()

    def _data(self, entry: SlabEntry) -> RecordElements:
        # What is small is there already; for what is large there may be no room yet.
        if entry.data_bytes <= SMALL_RECORD_BYTES:
            return self._reader.read_data(entry)
        return self.slab.elements_at(entry.data_at, entry.data_bytes)

    def _stand_in(self, entry: SlabEntry) -> agent_pb2.Frame:
        """Return what is taken for a frame that cannot be read: a record that is lost.

        DamagedError where the rank did not say that it was one.
        """
        number = entry.sequence
        _logger.error("slab %s: frame %d is corrupted", self.slab.path, number)
        self._add_finding("frames in its slab were corrupted")
        if self._intake.within_record and number == self._intake.last_sequence:
            self._intake.cut_off(CORRUPTED)
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
            # The rank wrote over the agent's own number.
            self._fault = ProtocolError(f"slab {self.slab.path}: {error}")


def _parse_frame(entry: SlabEntry) -> agent_pb2.Frame:
    try:
        # Copied first: the rank could change it while it is read.
        return agent_pb2.Frame.FromString(bytes(entry.frame))
    except DecodeError as error:
        raise CorruptedError(f"slab entry before {entry.end_position}: {error}") from None

"""What one rank leaves in its slab: taken in as if it had come on the stream, then released."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from rankdump.contract.errors import ProtocolError, RankdumpError, UnavailableError
from rankdump.contract.slab import Entry, SlabReader
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.intake import Intake
from rankdumpd.agent.slabs.file import Slab
from rankdumpd.agent.slabs.releases import Releases

COPY_FAILED = "copy_failed"
TORN = "torn"


class Ring:
    """One slab of a session, across its streams; a fault in it is final.

    A record's data stays in the slab until it is committed. Pieces of a larger one are copied out
    and released at once: it need not fit.
    """

    def __init__(self, slab: Slab, intake: Intake, *, acknowledged: int) -> None:
        """Begin where the slab is released to; DamagedError when it is none."""
        self.slab = slab
        self._reader = SlabReader(slab.memory)
        self._intake = intake
        self._releases = Releases(acknowledged)
        self._fault: RankdumpError | None = None
        # Held while there is no room for more, so the way to make room must not need it.
        self._reading = threading.Lock()
        self._releasing = threading.Lock()

    @property
    def begun(self) -> bool:
        """Whether a rank ever published anything."""
        return self._reader.written > 0

    @property
    def may_go_on(self) -> bool:
        """Whether the rank that uses it can go on with it.

        Not within a record in pieces: those released are gone, and the rank begins it again.
        """
        broken = self._fault is not None or self._intake.within_record
        return not broken and self.slab.in_use()

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that was taken in; 0 before the first."""
        return self._intake.last_sequence

    def read(self, announced: int) -> None:
        """Take in what was announced, 0 for all there is; raise what is wrong with it."""
        if announced > self._reader.written:
            raise ProtocolError(
                f"a bell announces {announced} bytes of a slab written to {self._reader.written}"
            )
        with self._reading:
            self._take(self._reader.entries(announced or None), lost=COPY_FAILED)

    def read_remains(self) -> None:
        """Take in what a rank that is gone has left; what it was within is a counted drop."""
        with self._reading:
            self._take(self._reader.entries(), lost=COPY_FAILED)
            self._take(self._reader.remains(), lost=TORN)
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
            self._intake.give_back()

    def _take(self, entries: Iterable[Entry], *, lost: str) -> None:
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

    def _take_all(self, entries: Iterable[Entry], lost: str) -> None:
        try:
            for entry in entries:
                self._take_one(entry, "" if entry.whole else lost)
        finally:
            self._intake.hand_on()
            with self._releasing:
                self._release()

    def _take_one(self, entry: Entry, lost: str) -> None:
        frame = _frame(entry)
        self._intake.take(frame, entry.data, lost=lost)
        copied = self._intake.within_record or frame.HasField("chunk")
        with self._releasing:
            self._releases.add(frame.sequence, entry.end, copied=copied)
            if copied:
                self._release()

    def _release(self) -> None:
        position = self._releases.pop()
        if not position:
            return
        try:
            self._reader.release(position)
        except ValueError as error:
            # The rank wrote over the agent's own number.
            self._fault = ProtocolError(f"slab {self.slab.path}: {error}")


def _frame(entry: Entry) -> agent_pb2.Frame:
    try:
        # Copied first: the rank could change it while it is read.
        return agent_pb2.Frame.FromString(bytes(entry.frame))
    except DecodeError as error:
        raise ProtocolError(f"slab entry before {entry.end}: {error}") from None

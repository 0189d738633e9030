"""Frames of one stream to whole parcels and declarations; checks everything, decides nothing."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from rankdump.contract.errors import ProtocolError, ResendError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import FigureRows
from rankdump.contract.selection import Verdict
from rankdump.wire import convert
from rankdump.wire.limits import LIMIT
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.elements import Elements, loaded
from rankdumpd.agent.receive.broken import UNREADABLE, lost_by_rank, unreadable
from rankdumpd.agent.receive.declared import (
    declaration_again,
    declaration_from,
    figure_rows_again,
)
from rankdumpd.agent.receive.head import FigureRules, check_head, check_rows
from rankdumpd.agent.values import Declared, Judged, Outcome, Parcel, Ticket, dropped

__all__ = [
    "Assembler",
    "Received",
    "declaration_again",
    "declaration_from",
    "figure_rows_again",
    "lost_by_rank",
]

_MAPPED_BYTES = 1 << 20
"""A larger record that comes in pieces has pages of its own: there are few of that size."""

Received = Parcel | Outcome | Judged | Declared
"""What a frame completes: a record to keep, a refused one, rows of figures, a declaration."""


@dataclass(slots=True)
class _Open:
    """The record whose chunks are coming in."""

    sequence: int
    head: RecordHead
    filled: int = 0
    target: bytearray | mmap.mmap | None = None
    """None while the bytes are thrown away."""
    reason: str = ""
    repeated: bool = False
    checksum: bytes = b""


class Assembler:
    """Puts the frames of one stream together; not for several threads."""

    def __init__(
        self,
        session_id: str,
        *,
        rank: int,
        net_name: str,
        highest_first: int,
        figures: int,
        elements: bool,
        degrades: bool,
        known: Callable[[int], bool],
        admit: Callable[[RecordHead], Verdict],
    ) -> None:
        """Expect a first frame of at most `highest_first`; `admit` is asked before allocation.

        `figures` is how many stand in the place of a tensor's elements. None may where the plan
        keeps `elements`, unless it `degrades` tensors for which there is no room.
        """
        self._session_id = session_id
        self._rules = FigureRules(figures, elements=elements, degrades=degrades)
        self._rank, self._net_name = rank, net_name
        self._known, self._admit = known, admit
        self._highest_first = highest_first
        self._last = 0
        self._open: _Open | None = None

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that came; 0 before the first."""
        return self._last

    @property
    def within_record(self) -> bool:
        """Whether chunks of the last record have to come."""
        return self._open is not None

    def feed(
        self, frame: agent_pb2.Frame, data: Elements | None = None, *, lost: str = ""
    ) -> Received | None:
        """Take one frame; return what it completes, None while a record is open or repeated.

        ResendError when one before it is missing, ProtocolError when it cannot be read itself.
        Elements come within the frame, or as `data` that stays readable until they are committed.
        Those that never came are `lost` for that reason.
        """
        body = frame.WhichOneof("body")
        if body == "chunk":
            data = _data_of(frame.sequence, frame.chunk.data, data)
            return self._chunk(frame.sequence, frame.chunk.offset, data, lost)
        if not self._advance(frame.sequence):
            return None
        if body == "record":
            data = _data_of(frame.sequence, frame.record.data, data)
            return self._record(frame.sequence, frame.record, data, lost)
        if body == "lost":
            return self._lost(frame.sequence, frame.lost)
        declared = declaration_from(frame, self._session_id)
        if isinstance(declared.declaration, FigureRows):
            check_rows(frame.sequence, declared.declaration, self._rules)
        return None if self._known(frame.sequence) else declared

    def finish(self) -> None:
        """Accept the end of the stream; ResendError when a record is still open."""
        if self._open:
            raise ResendError(
                f"record {self._open.sequence} ended at byte {self._open.filled} "
                f"of {self._open.head.byte_count}"
            )

    def cut_off(self, reason: str) -> Outcome | None:
        """Return the record that is open as dropped: the rest of it will never come."""
        record, self._open = self._open, None
        if record is None or record.repeated:
            return None
        ticket = Ticket(self._session_id, record.sequence)
        return dropped(ticket, record.head, record.reason or reason)

    def settle_unreadable(self, frame: agent_pb2.Frame) -> Received | None:
        """Give up the frame that `feed` could not read just now: it takes its number, no more.

        Tensors are counted as dropped; whatever else it said is not known.
        """
        if self._open:
            return self.cut_off(UNREADABLE)
        if self._known(frame.sequence):
            return None
        ticket = Ticket(self._session_id, frame.sequence)
        return unreadable(ticket, frame)

    def _advance(self, sequence: int) -> bool:
        """Go on to a frame; return whether it is new on this stream."""
        if not 1 <= sequence < LIMIT:
            raise ProtocolError(f"frame number {sequence} is none from 1 to {LIMIT - 1}")
        if self._last and sequence <= self._last:
            return False
        self.finish()
        if not self._last and sequence > self._highest_first:
            raise ResendError(f"first frame is {sequence}, at most {self._highest_first} is due")
        if self._last and sequence != self._last + 1:
            raise ResendError(f"frame {sequence} after {self._last}: numbers rise by one")
        self._last = sequence
        return True

    def _record(
        self, sequence: int, message: agent_pb2.Record, data: Elements, lost: str
    ) -> Parcel | Outcome | None:
        head = convert.record_from_wire(message, rank=self._rank, net_name=self._net_name)
        check_head(sequence, head, len(data))
        ticket = Ticket(self._session_id, sequence)
        # A slab's entry that was given up may have lost its data's length with its data.
        whole = len(data) == head.byte_count or bool(lost and not data)
        if self._known(sequence):
            self._open = None if whole else _Open(sequence, head, len(data), repeated=True)
            return None
        answer = Verdict(False, lost) if lost and head.byte_count else self._admit(head)
        if whole:
            if answer.accepted:
                return Parcel(ticket, head, data, message.checksum)
            return dropped(ticket, head, answer.reason)
        self._open = _Open(sequence, head, reason=answer.reason, checksum=message.checksum)
        if answer.accepted:
            self._allocate(self._open)
        self._fill(self._open, 0, data)
        return None

    def _lost(self, sequence: int, message: agent_pb2.Lost) -> Judged | None:
        judged = lost_by_rank(Ticket(self._session_id, sequence), message)
        return None if self._known(sequence) else judged

    def _allocate(self, record: _Open) -> None:
        size = record.head.byte_count
        try:
            # What is only declared costs nothing: pages are taken as they are filled.
            record.target = mmap.mmap(-1, size) if size > _MAPPED_BYTES else bytearray(size)
        except (MemoryError, OverflowError, OSError, ValueError):
            record.reason = "no_memory"

    def _chunk(
        self, sequence: int, offset: int, data: Elements, lost: str
    ) -> Parcel | Outcome | None:
        record = self._open
        if record is None or record.sequence != sequence:
            if 1 <= sequence <= self._last:
                return None
            raise ResendError(f"chunk of record {sequence}, which is not open")
        if offset + len(data) <= record.filled < record.head.byte_count:
            return None
        if lost:
            record.target, record.reason = None, lost
        self._fill(record, offset, data)
        if record.filled < record.head.byte_count:
            return None
        self._open = None
        ticket = Ticket(self._session_id, sequence)
        if record.repeated:
            return None
        if record.target is None:
            return dropped(ticket, record.head, record.reason)
        return Parcel(ticket, record.head, memoryview(record.target), record.checksum)

    def _fill(self, record: _Open, offset: int, data: Elements) -> None:
        end = offset + len(data)
        if offset != record.filled or end > record.head.byte_count:
            kind = ResendError if offset > record.filled else ProtocolError
            raise kind(
                f"record {record.sequence}: bytes {offset} to {end} after {record.filled} "
                f"of {record.head.byte_count}"
            )
        if record.target is not None:
            record.target[offset:end] = loaded(data)
        record.filled = end


def _data_of(sequence: int, within: bytes, beside: Elements | None) -> Elements:
    if beside is None:
        return memoryview(within)
    if within:
        raise ProtocolError(f"frame {sequence} of a slab has {len(within)} bytes of data in itself")
    return beside

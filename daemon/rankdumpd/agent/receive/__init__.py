"""Frames of one stream to whole parcels and declarations; checks everything, decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rankdump.contract.errors import ProtocolError
from rankdump.contract.exchange import RecordHead
from rankdump.contract.selection import Verdict
from rankdump.wire import convert
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.receive.declared import declaration_again, declaration_from
from rankdumpd.agent.receive.head import LIMIT, check_head
from rankdumpd.agent.values import Declared, Outcome, Parcel, Ticket, dropped

__all__ = ["Assembler", "Received", "declaration_again"]

Received = Parcel | Outcome | Declared
"""What a frame completes: a record to keep, a refused one, or a declaration."""


@dataclass(slots=True)
class _Open:
    """The record whose chunks are coming in."""

    sequence: int
    head: RecordHead
    filled: int = 0
    target: bytearray | None = None
    """None while the bytes are thrown away."""
    reason: str = ""
    repeated: bool = False


class Assembler:
    """Puts the frames of one stream together; not for several threads."""

    def __init__(
        self,
        session_id: str,
        *,
        rank: int,
        net_name: str,
        highest_first: int,
        figures: int | None,
        known: Callable[[int], bool],
        admit: Callable[[RecordHead], Verdict],
    ) -> None:
        """Expect a first frame of at most `highest_first`; `admit` is asked before allocation.

        `figures` is how many stand in the place of a record's elements, None where none may.
        """
        self._session_id = session_id
        self._figures = figures
        self._rank, self._net_name = rank, net_name
        self._known, self._admit = known, admit
        self._highest_first = highest_first
        self._last = 0
        self._open: _Open | None = None

    @property
    def last_sequence(self) -> int:
        """Number of the last frame that came; 0 before the first."""
        return self._last

    def feed(self, frame: agent_pb2.Frame) -> Received | None:
        """Take one frame; return what it completes, None while a record is open or repeated."""
        body = frame.WhichOneof("body")
        if body == "chunk":
            return self._chunk(frame.sequence, frame.chunk)
        self._advance(frame.sequence)
        if body == "record":
            return self._record(frame.sequence, frame.record)
        declared = declaration_from(frame, self._session_id)
        return None if self._known(frame.sequence) else declared

    def finish(self) -> None:
        """Accept the end of the stream; ProtocolError when a record is still open."""
        if self._open:
            raise ProtocolError(
                f"record {self._open.sequence} ended at byte {self._open.filled} "
                f"of {self._open.head.data_bytes}"
            )

    def _advance(self, sequence: int) -> None:
        self.finish()
        if not self._last and not 1 <= sequence <= self._highest_first:
            raise ProtocolError(f"first frame is {sequence}, at most {self._highest_first} is due")
        if self._last and sequence != self._last + 1:
            raise ProtocolError(f"frame {sequence} after {self._last}: numbers rise by one")
        if sequence >= LIMIT:
            raise ProtocolError(f"frame number {sequence} is over {LIMIT - 1}")
        self._last = sequence

    def _record(self, sequence: int, message: agent_pb2.Record) -> Parcel | Outcome | None:
        head = convert.record_from_wire(message, rank=self._rank, net_name=self._net_name)
        check_head(sequence, head, len(message.data), figures=self._figures)
        ticket = Ticket(self._session_id, sequence)
        whole = len(message.data) == head.data_bytes
        if self._known(sequence):
            self._open = None if whole else _Open(sequence, head, len(message.data), repeated=True)
            return None
        answer = self._admit(head)
        if whole:
            if answer.accepted:
                return Parcel(ticket, head, memoryview(message.data))
            return dropped(ticket, head, answer.reason)
        self._open = _Open(sequence, head, reason=answer.reason)
        if answer.accepted:
            self._allocate(self._open)
        self._fill(self._open, 0, message.data)
        return None

    def _allocate(self, record: _Open) -> None:
        try:
            record.target = bytearray(record.head.data_bytes)
        except MemoryError:
            record.reason = "no_memory"

    def _chunk(self, sequence: int, chunk: agent_pb2.Chunk) -> Parcel | Outcome | None:
        record = self._open
        if record is None or record.sequence != sequence:
            raise ProtocolError(f"chunk of record {sequence}, which is not open")
        self._fill(record, chunk.offset, chunk.data)
        if record.filled < record.head.data_bytes:
            return None
        self._open = None
        ticket = Ticket(self._session_id, sequence)
        if record.repeated:
            return None
        if record.target is None:
            return dropped(ticket, record.head, record.reason)
        return Parcel(ticket, record.head, memoryview(record.target))

    def _fill(self, record: _Open, offset: int, data: bytes) -> None:
        end = offset + len(data)
        if offset != record.filled or end > record.head.data_bytes:
            raise ProtocolError(
                f"record {record.sequence}: bytes {offset} to {end} after {record.filled} "
                f"of {record.head.data_bytes}"
            )
        if record.target is not None:
            record.target[offset:end] = data
        record.filled = end

"""Assembly of the frames of one stream into whole records, rows of statistics and metadata frames.
Every frame is checked against the session's plan.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rankdump._core.record import StatisticRows
from rankdump._core.selection import SelectionVerdict
from rankdump._core.session_protocol import RecordHead
from rankdump._wire import session_messages
from rankdump._wire.message_fields import NUMBER_LIMIT
from rankdump.errors import ProtocolError, ResendError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.declarations import (
    UNREADABLE,
    make_unreadable_result,
    read_lost_tensors,
    read_metadata_frame,
)
from rankdumpd.agent.records import (
    FrameId,
    MetadataFrame,
    ReceivedRecord,
    RecordElements,
    RecordOutcome,
    StatisticRowsResult,
    load_elements,
    make_drop_outcome,
)

MAX_STATISTICS = 64
MAX_STATISTIC_CHARACTERS = 64
_TOO_LONG = re.compile(rf"[^,]{{{MAX_STATISTIC_CHARACTERS + 1}}}")


def _check_texts(sequence: int, texts: Sequence[str]) -> None:
    # The texts become fields of a table, so none may contain a separator. They are checked as one
    # text, because thousands arrive with every step.
    joined = ",".join(texts)
    if joined.isprintable() and '"' not in joined and not _TOO_LONG.search(joined):
        return
    for text in joined.split(","):
        if len(text) > MAX_STATISTIC_CHARACTERS or not text.isprintable() or '"' in text:
            raise ProtocolError(
                f"frame {sequence} has the statistic {text[:MAX_STATISTIC_CHARACTERS]!r}: expected "
                f"printable characters without quotes, at most {MAX_STATISTIC_CHARACTERS}"
            )


_MAPPED_BYTES = 1 << 20
"""Size in bytes above which a chunked record is assembled in mapped memory of its own."""

CompletedFrame = ReceivedRecord | RecordOutcome | StatisticRowsResult | MetadataFrame
"""What a frame completes: a record to keep, a drop, rows of statistics or metadata."""


@dataclass(slots=True)
class _OpenRecord:
    """The record whose chunks are arriving."""

    sequence: int
    head: RecordHead
    filled: int = 0
    target: bytearray | mmap.mmap | None = None
    """Memory for the elements; None while they are discarded."""
    reason: str = ""
    repeated: bool = False
    checksum: bytes = b""


class FrameAssembler:
    """Assembles the frames of one stream; not for use from several threads."""

    def __init__(
        self,
        session_id: str,
        *,
        rank: int,
        net_name: str,
        highest_first: int,
        statistic_count: int,
        degrades_records: bool,
        known: Callable[[int], bool],
        admit: Callable[[RecordHead], SelectionVerdict],
    ) -> None:
        """The first frame may have a number of at most `highest_first`; `admit` is called before
        memory is allocated.

        A tensor without its elements has `statistic_count` statistics. Where the plan keeps
        elements, such tensors are rejected, unless the plan degrades tensors for which there is
        no space.
        """
        self._session_id = session_id
        self._statistic_count, self._degrades_records = statistic_count, degrades_records
        self.keeps_elements = True
        """Whether the plan of the next frame keeps elements."""
        self._rank, self._net_name = rank, net_name
        self._known, self._admit = known, admit
        self._highest_first = highest_first
        self.last_sequence = 0
        """Number of the last frame that arrived; 0 before the first frame."""
        self._open: _OpenRecord | None = None

    @property
    def within_record(self) -> bool:
        """Whether chunks of the last record are still missing."""
        return self._open is not None

    def feed(
        self, frame: agent_pb2.Frame, data: RecordElements | None = None, *, lost: str = ""
    ) -> CompletedFrame | None:
        """Accept one frame; return the item that it completes, None if it completes none or repeats
        one.

        ResendError when an earlier frame is missing, ProtocolError when the frame cannot be read.
        Elements are in the frame, or in `data`, which stays readable until they are committed. If
        the elements never arrived, `lost` is the drop reason.
        """
        body, sequence = frame.WhichOneof("body"), frame.sequence
        if body == "chunk":
            data = _select_data(sequence, frame.chunk.data, data)
            return self._handle_chunk(sequence, frame.chunk.offset, data, lost)
        if not self._advance(sequence):
            return None
        if body == "record":
            record = frame.record
            return self._handle_record(
                sequence, record, _select_data(sequence, record.data, data), lost
            )
        if body == "lost":
            result = read_lost_tensors(FrameId(self._session_id, sequence), frame.lost)
            return None if self._known(sequence) else result
        declared = read_metadata_frame(frame, self._session_id)
        if isinstance(declared.declaration, StatisticRows):
            self._check_statistics(sequence, declared.declaration)
        return None if self._known(sequence) else declared

    def finish(self) -> None:
        """Accept the end of the stream; ResendError when a record is still incomplete."""
        if self._open:
            raise ResendError(
                f"record {self._open.sequence} ended at byte {self._open.filled} "
                f"of {self._open.head.byte_count}"
            )

    def cut_off(self, reason: str) -> RecordOutcome | None:
        """Return the incomplete record as dropped, because its remaining chunks will
        never arrive.
        """
        record, self._open = self._open, None
        if record is None or record.repeated:
            return None
        frame_id = FrameId(self._session_id, record.sequence)
        return make_drop_outcome(frame_id, record.head, record.reason or reason)

    def settle_unreadable(self, frame: agent_pb2.Frame) -> CompletedFrame | None:
        """Return a result for a frame that `feed` could not read, so that its number counts as
        received.

        The tensors of the frame are counted as dropped; its other content is lost.
        """
        if self._open:
            return self.cut_off(UNREADABLE)
        if self._known(frame.sequence):
            return None
        frame_id = FrameId(self._session_id, frame.sequence)
        return make_unreadable_result(frame_id, frame)

    def _advance(self, sequence: int) -> bool:
        """Advance to a frame; return whether the frame is new on this stream."""
        last = self.last_sequence
        if sequence == last + 1 < NUMBER_LIMIT and last and self._open is None:
            self.last_sequence = sequence
            return True
        if not 1 <= sequence < NUMBER_LIMIT:
            raise ProtocolError(f"frame number {sequence} is not between 1 and {NUMBER_LIMIT - 1}")
        if last and sequence <= last:
            return False
        self.finish()
        if not last and sequence > self._highest_first:
            raise ResendError(
                f"the first frame is {sequence}, expected at most {self._highest_first}"
            )
        if last and sequence != last + 1:
            raise ResendError(
                f"frame {sequence} follows frame {last}: expected consecutive numbers"
            )
        self.last_sequence = sequence
        return True

    def _handle_record(
        self, sequence: int, message: agent_pb2.Record, data: RecordElements, lost: str
    ) -> ReceivedRecord | RecordOutcome | None:
        head = session_messages.record_from_wire(message, rank=self._rank, net_name=self._net_name)
        received, declared = len(data), head.kind.byte_count
        # Elements that the plan does not keep are no protocol error: `admit` drops them with a
        # reason.
        if received > declared:
            raise ProtocolError(
                f"record {sequence} contains {received} bytes but declares {declared}"
            )
        frame_id = FrameId(self._session_id, sequence)
        # If reading a slab entry failed, the length of its data may be unknown, too.
        whole = received == declared or bool(lost and not data)
        if self._known(sequence):
            self._open = None if whole else _OpenRecord(sequence, head, received, repeated=True)
            return None
        answer = SelectionVerdict(False, lost) if lost and declared else self._admit(head)
        if whole:
            if answer.accepted:
                return ReceivedRecord(frame_id, head, data, message.checksum)
            return make_drop_outcome(frame_id, head, answer.reason)
        self._open = _OpenRecord(sequence, head, reason=answer.reason, checksum=message.checksum)
        if answer.accepted:
            self._allocate(self._open)
        self._fill_record(self._open, 0, data)
        return None

    def _check_statistics(self, sequence: int, rows: StatisticRows) -> None:
        """Raise a ProtocolError for statistics that the plan does not have or that would damage a
        table.
        """
        if rows.degraded and not self._degrades_records:
            raise ProtocolError(
                f"frame {sequence} is degraded, which neither on_full nor max_step_overhead of the "
                "plan allows"
            )
        if self.keeps_elements and not rows.degraded:
            raise ProtocolError(
                f"frame {sequence} contains statistics, but the plan keeps elements"
            )
        expected = self._statistic_count
        if expected > MAX_STATISTICS:
            raise ProtocolError(
                f"frame {sequence}: the plan has {expected} statistics, "
                f"at most {MAX_STATISTICS} are accepted"
            )
        for text in rows.statistics:
            count = text.count(",") + 1 if text else 0
            if count != expected:
                raise ProtocolError(
                    f"frame {sequence} contains {count} statistics, the plan has {expected}"
                )
        _check_texts(sequence, rows.statistics)

    def _allocate(self, record: _OpenRecord) -> None:
        size = record.head.byte_count
        try:
            # A large declared size takes no memory, because pages are allocated as they are filled.
            record.target = mmap.mmap(-1, size) if size > _MAPPED_BYTES else bytearray(size)
        except (MemoryError, OverflowError, OSError, ValueError):
            record.reason = "no_memory"

    def _handle_chunk(
        self, sequence: int, offset: int, data: RecordElements, lost: str
    ) -> ReceivedRecord | RecordOutcome | None:
        record = self._open
        if record is None or record.sequence != sequence:
            if 1 <= sequence <= self.last_sequence:
                return None
            raise ResendError(f"chunk of record {sequence}, which is not open")
        if offset + len(data) <= record.filled < record.head.byte_count:
            return None
        if lost:
            record.target, record.reason = None, lost
        self._fill_record(record, offset, data)
        if record.filled < record.head.byte_count:
            return None
        self._open = None
        frame_id = FrameId(self._session_id, sequence)
        if record.repeated:
            return None
        if record.target is None:
            return make_drop_outcome(frame_id, record.head, record.reason)
        return ReceivedRecord(frame_id, record.head, memoryview(record.target), record.checksum)

    def _fill_record(self, record: _OpenRecord, offset: int, data: RecordElements) -> None:
        end = offset + len(data)
        if offset != record.filled or end > record.head.byte_count:
            kind = ResendError if offset > record.filled else ProtocolError
            raise kind(
                f"record {record.sequence}: bytes {offset} to {end} after {record.filled} "
                f"of {record.head.byte_count}"
            )
        if record.target is not None:
            record.target[offset:end] = load_elements(data)
        record.filled = end


def _select_data(sequence: int, within: bytes, beside: RecordElements | None) -> RecordElements:
    if beside is None:
        return memoryview(within)
    if within:
        raise ProtocolError(
            f"frame {sequence} from a slab carries {len(within)} bytes of data itself"
        )
    return beside

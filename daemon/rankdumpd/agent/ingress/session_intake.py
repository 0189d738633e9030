"""Intake of the frames of one session: they are assembled, admitted, charged to the byte budget and
queued for worker threads or the committer. A frame that fails repeatedly is dropped.

Records are queued in batches: many small records, which one thread writes, or a single large one,
for which there are as many threads as cores. Writing small records is mostly system calls with
little Python between them, so two threads would only contend for the GIL.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from rankdump._core.drop_reasons import SPACE_REASONS
from rankdump._core.events import EventColumns
from rankdump._core.record import StatisticRows
from rankdump._core.selection import ACCEPTED_VERDICT, SelectionVerdict
from rankdump._core.session_protocol import ChangedPlan, RecordHead
from rankdump._wire.frames import make_metadata_frame
from rankdump._wire.message_fields import NUMBER_LIMIT
from rankdump.errors import ProtocolError, ResendError, RetryableError
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.commit.committer import (
    FRAME_COST_BYTES,
    FinishedFrame,
    FrameCommitter,
    compute_cost_bytes,
)
from rankdumpd.agent.declarations import read_metadata_frame
from rankdumpd.agent.ingress.frame_assembler import CompletedFrame, FrameAssembler
from rankdumpd.agent.limits.admission import RecordAdmission, ResourceUsage
from rankdumpd.agent.limits.usage import QueueBudget
from rankdumpd.agent.records import (
    SMALL_RECORD_BYTES,
    MetadataFrame,
    ReceivedRecord,
    RecordElements,
    RecordOutcome,
    StatisticRowsResult,
    make_drop_outcome,
)
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.storage.session_storage import SessionStorage
from rankdumpd.server.background_thread import BackgroundThread

_MAX_SESSIONS = 4096


class FailureCounter:
    """The last failure of each session that failed recently; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, int]] = {}

    def count_failure(self, session_id: str, what: str) -> int:
        """Count a failure; return how many times in a row the session has failed in this way."""
        with self._lock:
            before, count = self._last.pop(session_id, ("", 0))
            count = count + 1 if before == what else 1
            self._last[session_id] = what, count
            if len(self._last) > _MAX_SESSIONS:
                del self._last[next(iter(self._last))]
            return count


_BatchQueue: TypeAlias = "queue.SimpleQueue[tuple[Sequence[ReceivedRecord], SessionStorage] | None]"

_logger = logging.getLogger(__name__)


class RecordWorkers:
    """Threads that write received records; they run until `stop`."""

    def __init__(
        self,
        count: int,
        store: Callable[[Sequence[ReceivedRecord], SessionStorage], Sequence[RecordOutcome]],
        done: Callable[[Sequence[RecordOutcome]], None],
    ) -> None:
        self._store = store
        self._done = done
        self._large: _BatchQueue = queue.SimpleQueue()
        self._small: _BatchQueue = queue.SimpleQueue()
        self._served = [*[self._large] * count, self._small]
        self._threads = [
            BackgroundThread(partial(self._run, batches), f"rankdumpd-worker-{n}", daemon=False)
            for n, batches in enumerate(self._served)
        ]
        self._deadline_s = math.inf

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, records: Sequence[ReceivedRecord], storage: SessionStorage) -> None:
        """Queue a batch of records of one session; never waits."""
        (self._large if len(records) == 1 else self._small).put((records, storage))

    def fault(self) -> str:
        """Return which threads have ended; empty when none has."""
        return "; ".join(filter(None, [thread.fault() for thread in self._threads]))

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Write submitted records until the timeout; return whether the threads have ended.

        May be repeated.
        """
        self._deadline_s = time.monotonic() + timeout_s
        for thread, batches in zip(self._threads, self._served, strict=True):
            thread.request_stop()
            batches.put(None)
        return all(t.join(max(0.0, self._deadline_s - time.monotonic())) for t in self._threads)

    def _run(self, batches: _BatchQueue) -> None:
        while (batch := batches.get()) is not None:
            # Records that are left are not acknowledged, so ranks resend them to the next process.
            if time.monotonic() < self._deadline_s:
                self._done(self._store_logged(*batch))

    def _store_logged(
        self, records: Sequence[ReceivedRecord], storage: SessionStorage
    ) -> Sequence[RecordOutcome]:
        """Store records together; if that fails, store each alone, and drop those that fail again.

        A file that already exists then is recognised as the file of its record.
        """
        try:
            return self._store(records, storage)
        except Exception as error:
            if len(records) > 1:
                _logger.warning("%d records are written one by one: %r", len(records), error)
                return [each for one in records for each in self._store_logged((one,), storage)]
            frame_id, head, *_ = records[0]
            session_id = frame_id.session_id
            _logger.exception(
                "record %d of session %s cannot be written",
                frame_id.sequence,
                session_id,
                extra={"session": session_id},
            )
            return [make_drop_outcome(frame_id, head, "internal_error")]


MAX_GATHERED_FRAMES = 256
MAX_GATHERED_BYTES = 1 << 20
"""Bytes that a stream may gather before they are charged to the budget."""


MAX_UNREADABLE_TRIES = 3
"""Number of failures after which an unreadable frame is dropped."""
MAX_GAPS = 10
"""Number of failures after which a rank that skips a sequence number is rejected, because it does
not have the missing frame.
"""


class SessionIntake:
    """Accepts frames in order, for one thread at a time; blocks while the queue is full.

    Small frames are gathered into batches until `flush`.
    """

    def __init__(
        self,
        session: RankSession,
        *,
        budget: QueueBudget,
        workers: RecordWorkers,
        committer: FrameCommitter,
        look_up_usage: Callable[[], ResourceUsage],
        failures: FailureCounter,
    ) -> None:
        self._session = session
        self._budget, self._workers, self._committer = budget, workers, committer
        self._look_up_usage = look_up_usage
        self._usage: ResourceUsage | None = None
        self._failures = failures
        self._growing = False
        """Whether the budget is charged for a record that is not complete yet."""
        self._piece_bytes = 0
        """Number of bytes of a record that the present frame contains."""
        self._gathered: list[ReceivedRecord | FinishedFrame] = []
        self._gathered_cost = 0
        self._plan_end = 0
        """Sequence number up to which frames belong to the plan in use."""
        storage = session.storage
        self._assembler = FrameAssembler(
            session.request.session_id,
            rank=session.request.rank,
            net_name=session.plan.output.net_name,
            highest_first=session.watermark + 1,
            statistic_count=storage.statistic_count,
            degrades_records=storage.degrades_records,
            known=session.is_known,
            admit=self._admit,
        )
        self._use_plan_of(session.watermark + 1)

    @property
    def last_sequence(self) -> int:
        """Sequence number of the last frame that arrived; 0 before the first frame."""
        return self._assembler.last_sequence

    @property
    def within_record(self) -> bool:
        """Whether chunks of the last record are still missing."""
        return self._assembler.within_record

    def handle_frame(
        self, frame: agent_pb2.Frame, data: RecordElements | None = None, *, lost: str = ""
    ) -> None:
        """Accept a frame. Its data may be passed separately, or be `lost` for a drop reason.

        ResendError when an earlier frame is missing, and for the first few times that a frame
        cannot be read.
        """
        piece = data
        if piece is None:
            piece = frame.chunk.data if frame.HasField("chunk") else frame.record.data
        self._piece_bytes = len(piece)
        if not self._plan_sequence < frame.sequence <= self._plan_end:
            self._use_plan_of(frame.sequence)
        if self._growing and frame.HasField("chunk"):
            self._budget.grow(self, self._piece_bytes)
        try:
            item = self._assembler.feed(frame, data, lost=lost)
            if isinstance(item, MetadataFrame) and isinstance(item.declaration, ChangedPlan):
                changed = item.declaration
                self._session.plans.add(frame.sequence, changed.plan, changed.iteration)
                self._plan_end = frame.sequence
        except ResendError as error:
            raise self._count_gap(error) from None
        except RetryableError:
            raise
        except Exception as error:
            item = self._handle_unreadable(frame, error)
        self._gather(item)

    def handle_last_events(self, events: EventColumns) -> None:
        """Accept the newest events of an exited rank; they take their place behind its
        last frame.
        """
        frame = make_metadata_frame(self._session.find_free_number(), events)
        self._gather(read_metadata_frame(frame, self._session.request.session_id))
        self.flush()

    def cut_off(self, reason: str) -> None:
        """Drop the incomplete record, whose remaining chunks will never arrive."""
        self._gather(self._assembler.cut_off(reason))
        self.flush()

    def finish(self) -> None:
        """Accept the end of the stream; ResendError when a record is still incomplete."""
        try:
            self._assembler.finish()
        except ResendError as error:
            raise self._count_gap(error) from None

    def flush(self) -> None:
        """Submit the gathered frames."""
        gathered, cost = self._gathered, self._gathered_cost
        self._gathered, self._gathered_cost, self._usage = [], 0, None
        if gathered:
            self._budget.acquire(cost, items=len(gathered))
            self._claim(gathered)

    def release_budget(self) -> None:
        """Release the queue budget of a record that was not completed."""
        if self._growing:
            self._budget.abandon(self)
            self._growing = False

    def _use_plan_of(self, sequence: int) -> None:
        """Switch to the plan of a frame, after earlier frames are submitted."""
        self.flush()
        period, end = self._session.plans.find(sequence)
        self._plan_sequence = period.plan_sequence
        self._plan_end = NUMBER_LIMIT if end is None else end
        self._storage = period.storage
        self._admission = RecordAdmission(period.plan, self._session.request.device)
        self._assembler.keeps_elements = period.storage.has_elements

    def _count_gap(self, error: ResendError) -> ResendError | ProtocolError:
        session_id, due = self._session.request.session_id, self._assembler.last_sequence + 1
        failures = self._failures.count_failure(session_id, f"gap before {due}")
        return (
            error if failures < MAX_GAPS else ProtocolError(f"{error} ({failures} times in a row)")
        )

    def _handle_unreadable(self, frame: agent_pb2.Frame, error: Exception) -> CompletedFrame | None:
        """Drop a frame that has failed too often; ResendError while it may be tried again."""
        request, number = self._session.request, frame.sequence
        if not number or number != self._assembler.last_sequence:
            raise error
        if not isinstance(error, ProtocolError):
            _logger.error(
                "session %s: frame %d cannot be read", request.session_id, number, exc_info=error
            )
        failures = self._failures.count_failure(request.session_id, f"frame {number}")
        if failures < MAX_UNREADABLE_TRIES:
            raise ResendError(f"frame {number} cannot be read: {error}") from None
        self._session.add_finding(f"rank {request.rank}: a frame could not be read: {error}")
        return self._assembler.settle_unreadable(frame)

    def _admit(self, head: RecordHead) -> SelectionVerdict:
        large = head.kind.byte_count > SMALL_RECORD_BYTES
        if large:
            self.flush()
        answer = self._admission.check_record(head, self._get_usage())
        if answer.accepted and not large:
            return answer
        if answer.reason in SPACE_REASONS and self._may_be_written(head):
            answer = ACCEPTED_VERDICT
        if answer.accepted and large:
            # Bytes that a rank has declared but not sent are not charged.
            self._budget.begin(self, compute_cost_bytes(min(self._piece_bytes, head.byte_count)))
            self._growing = True
        return answer

    def _may_be_written(self, head: RecordHead) -> bool:
        """Return whether a killed process may have written the record's file. Such a record needs
        no space, and dropping it would leave a file without a row.
        """
        return self._session.restored and self._storage.writer.has(head)

    def _gather(self, item: CompletedFrame | None) -> None:
        if item is None:
            return
        if isinstance(item, ReceivedRecord) and self._growing:
            self._budget.end(self, _compute_cost(item))
            self._growing = False
            self._claim([item])
            return
        if self._growing:
            self.release_budget()
        gathered = self._gathered
        if isinstance(item, ReceivedRecord):
            # `_compute_cost` is not called, because this runs for each small record.
            self._gathered_cost += item.head.kind.byte_count + FRAME_COST_BYTES
            gathered.append(item)
        else:
            frame = self._check_rows(item)
            self._gathered_cost += _compute_cost(frame)
            gathered.append(frame)
        if self._gathered_cost > MAX_GATHERED_BYTES or len(gathered) >= MAX_GATHERED_FRAMES:
            self.flush()

    def _check_rows(
        self, item: RecordOutcome | StatisticRowsResult | MetadataFrame
    ) -> FinishedFrame:
        if not isinstance(item, MetadataFrame) or not isinstance(item.declaration, StatisticRows):
            return item
        refused = self._admission.check_rows(item.declaration, self._get_usage())
        return StatisticRowsResult(item.frame_id, item.declaration, refused, item.raw)

    def _get_usage(self) -> ResourceUsage:
        # Looked up once for a batch, because the few bytes in flight make no difference.
        if self._usage is None:
            self._usage = self._look_up_usage()
        return self._usage

    def _claim(self, items: Sequence[ReceivedRecord | FinishedFrame]) -> None:
        claimed = self._session.claim_frames({item.frame_id.sequence for item in items})
        if len(claimed) < len(items):
            left = [item for item in items if item.frame_id.sequence not in claimed]
            self._budget.release(sum(map(_compute_cost, left)), items=len(left))
            items = [item for item in items if item.frame_id.sequence in claimed]
        records = [item for item in items if isinstance(item, ReceivedRecord)]
        done = [item for item in items if not isinstance(item, ReceivedRecord)]
        if records:
            self._workers.submit(records, self._storage)
        if done:
            self._committer.submit(done, sum(map(_compute_cost, done)))


def _compute_cost(item: ReceivedRecord | FinishedFrame) -> int:
    if isinstance(item, ReceivedRecord):
        return compute_cost_bytes(item.head.kind.byte_count)
    return compute_cost_bytes(0 if isinstance(item, RecordOutcome) else len(item.raw))

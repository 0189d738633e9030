"""The one thread that commits: it enters a batch of frames in the ledger in one transaction, then
applies post-commit actions and acknowledges. A frame that cannot be entered delays no other frame.
"""

from __future__ import annotations

import logging
import queue
import sqlite3
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.session_protocol import RecordHead
from rankdump.errors import UnavailableError
from rankdumpd.agent.commit.post_commit import PostCommitActions, count_frames
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.limits.usage import DumpUsage, QueueBudget
from rankdumpd.agent.records import (
    FrameId,
    MetadataFrame,
    RecordOutcome,
    StatisticRowsResult,
    make_drop_outcome,
)
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import log_about
from rankdumpd.server.metrics import MetricCounters

RETRY_INTERVAL_S = 1.0
MAX_COMMIT_TRIES = 3
INTERNAL_ERROR = "internal_error"
_MAX_NUMBER = (1 << 63) - 1
"""Largest integer that a column of SQLite stores."""

FinishedFrame: TypeAlias = "RecordOutcome | StatisticRowsResult | MetadataFrame"

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SessionBatch:
    """One session's part of a batch."""

    outcomes: list[RecordOutcome] = field(default_factory=list[RecordOutcome])
    row_results: list[StatisticRowsResult] = field(default_factory=list[StatisticRowsResult])
    metadata: list[MetadataFrame] = field(default_factory=list[MetadataFrame])

    @property
    def sequences(self) -> list[int]:
        """Return the sequence numbers of the frames."""
        return [f.frame_id.sequence for f in (*self.outcomes, *self.row_results, *self.metadata)]


SessionBatches: TypeAlias = "dict[RankSession, SessionBatch]"


class BatchCommitter:
    """Commits batches to the ledger from one thread; retries while a disk fails, until the thread
    stops.
    """

    def __init__(
        self,
        ledger: AgentLedger,
        registry: SessionRegistry,
        thread: BackgroundThread,
        counters: MetricCounters,
    ) -> None:
        self._ledger, self._registry, self._thread = ledger, registry, thread
        self._counters = counters
        self.problem = ""
        """Why nothing can be committed at present; empty when commits are possible."""

    def commit_frames(self, frames: Sequence[FinishedFrame]) -> Iterator[SessionBatches]:
        """Commit frames and yield them: all together, or in smaller parts where that fails.

        A frame that cannot be committed even alone is counted as dropped; if counting fails as
        well, its rank resends the frame. UnavailableError when the ledger is damaged.
        """
        try:
            shares = self._group_by_session(frames)
            done = self._commit(shares)
        except UnavailableError:
            raise
        except Exception as error:
            if len(frames) == 1:
                yield from self._commit_alone(frames[0], error)
                return
            _logger.warning(
                "%d frames cannot be committed together and are committed in parts: %r",
                len(frames),
                error,
            )
            half = len(frames) // 2
            yield from self.commit_frames(frames[:half])
            yield from self.commit_frames(frames[half:])
        else:
            if done:
                yield shares

    def _commit_alone(self, frame: FinishedFrame, error: Exception) -> Iterator[SessionBatches]:
        frame_id = frame.frame_id
        session = self._registry.get(frame_id.session_id)
        _logger.error(
            "frame %d of session %s cannot be committed",
            frame_id.sequence,
            frame_id.session_id,
            exc_info=error,
            extra={"session": frame_id.session_id},
        )
        for attempt in [frame] * (MAX_COMMIT_TRIES - 1) + [_make_stand_in(frame)]:
            try:
                shares = self._group_by_session([attempt])
                done = self._commit(shares)
            except UnavailableError:
                raise
            except Exception as another:
                error = another
                continue
            if attempt is not frame:
                kind = type(getattr(frame, "declaration", frame)).__name__
                subject = f"rank {session.request.rank}, frame {frame_id.sequence} ({kind})"
                session.add_finding(
                    f"{subject}: not committed, counted as {INTERNAL_ERROR}: {error}"
                )
            if done:
                yield shares
            return
        session.release_frames(
            [frame_id.sequence], f"frame {frame_id.sequence} was not committed: {error!r}"
        )

    def _group_by_session(self, frames: Sequence[FinishedFrame]) -> SessionBatches:
        shares: defaultdict[str, SessionBatch] = defaultdict(SessionBatch)
        for item in frames:
            share = shares[item.frame_id.session_id]
            if isinstance(item, RecordOutcome):
                share.outcomes.append(item)
            elif isinstance(item, StatisticRowsResult):
                share.row_results.append(item)
            else:
                share.metadata.append(item)
        return {self._registry.get(session_id): share for session_id, share in shares.items()}

    def _commit(self, shares: SessionBatches) -> bool:
        while True:
            begun_s = time.monotonic()
            try:
                self._ledger.commit(
                    [outcome for share in shares.values() for outcome in share.outcomes],
                    [result for share in shares.values() for result in share.row_results],
                    [frame for share in shares.values() for frame in share.metadata],
                    {s.request.session_id: s.watermark for s in shares},
                    synced=any(session.storage.is_synced for session in shares),
                )
            except sqlite3.OperationalError as error:
                self._counters.add("rankdump_agent_commit_errors_total")
                if str(error) != self.problem:
                    _logger.error("the ledger cannot be written; retrying: %s", error)
                self.problem = str(error)
                if self._thread.wait(RETRY_INTERVAL_S):
                    return False
            else:
                self._counters.add_duration(
                    "rankdump_agent_commit_seconds", time.monotonic() - begun_s
                )
                if self.problem:
                    _logger.warning("the ledger can be written again")
                self.problem = ""
                return True


def _make_stand_in(frame: FinishedFrame) -> RecordOutcome | StatisticRowsResult:
    """Return a drop that is committed in place of a frame that the ledger cannot store."""
    if isinstance(frame, StatisticRowsResult):
        rows = replace(frame.rows, iteration=min(frame.rows.iteration, _MAX_NUMBER))
        return StatisticRowsResult(frame.frame_id, rows, {INTERNAL_ERROR: range(len(rows))}, b"")
    if isinstance(frame, RecordOutcome):
        return _make_empty_outcome(frame.frame_id, frame.head.rank, frame.head.iteration)
    return _make_empty_outcome(frame.frame_id, 0, getattr(frame.declaration, "iteration", 0))


def _make_empty_outcome(frame_id: FrameId, rank: int, iteration: int) -> RecordOutcome:
    nothing = TensorKind(0, "", "", TensorSide.OUTPUT, 0, dtype="", shape=(), byte_count=0)
    head = RecordHead(nothing, min(iteration, _MAX_NUMBER), timestamp_us=0, rank=rank)
    return make_drop_outcome(frame_id, head, INTERNAL_ERROR)


MAX_BATCH_FRAMES = 4096
CHECK_INTERVAL_S = 1.0
"""Seconds between two checks for retries and for ledger rows to fold."""
FRAME_COST_BYTES = 1024
"""Memory in bytes of a frame besides its tensor."""


def compute_cost_bytes(item_bytes: int) -> int:
    """Return the memory in bytes that a frame with this item occupies until it is committed."""
    return item_bytes + FRAME_COST_BYTES


@dataclass(slots=True)
class _FrameBatch:
    """Frames that are committed together, and the memory that they occupy."""

    frames: list[FinishedFrame] = field(default_factory=list["FinishedFrame"])
    cost: int = 0


class FrameCommitter:
    """The committer thread: accepts finished frames from any thread until `stop`."""

    def __init__(
        self,
        ledger: AgentLedger,
        registry: SessionRegistry,
        actions: PostCommitActions,
        budget: QueueBudget,
        *,
        counters: MetricCounters,
        usage: DumpUsage,
        on_unpacked: Callable[[], None],
    ) -> None:
        """`on_unpacked` is called when files were entered that are to be packed later."""
        self._ledger, self._registry, self._actions = ledger, registry, actions
        self._budget, self._counters, self._usage = budget, counters, usage
        self._on_unpacked = on_unpacked
        self._done: queue.SimpleQueue[tuple[Sequence[FinishedFrame], int] | None] = (
            queue.SimpleQueue()
        )
        self._unfinished: deque[RankSession] = deque()
        """Sessions whose post-commit actions are not done; each counts as a frame in flight."""
        self.thread = BackgroundThread(self._run, "rankdumpd-committer", daemon=False)
        self._batch_committer = BatchCommitter(ledger, registry, self.thread, counters)
        self._checked_s = time.monotonic()
        self._is_finishing = False
        self._is_finished = threading.Event()
        """Set after `finish` was called, as soon as nothing is deferred any more."""

    def submit(self, frames: Sequence[FinishedFrame], cost: int) -> None:
        """Queue frames, with the memory that they occupy together; never waits."""
        self._done.put((frames, cost))

    def submit_outcomes(self, outcomes: Sequence[RecordOutcome]) -> None:
        """Queue the outcomes of records; never waits."""
        tensor_bytes = sum([outcome.head.kind.byte_count for outcome in outcomes])
        self.submit(outcomes, tensor_bytes + FRAME_COST_BYTES * len(outcomes))

    def findings(self) -> list[str]:
        """Return one sentence while frames cannot be committed; else none."""
        problem = self._batch_committer.problem or self._ledger.problem
        return [f"the ledger cannot be written, and ranks wait: {problem}"] if problem else []

    def finish(self, timeout_s: float) -> None:
        """Retry deferred metadata until all is written, for at most `timeout_s`; log
        what is left.
        """
        self._is_finishing = True
        self._done.put(((), 0))
        if self.thread.is_running and self._is_finished.wait(timeout_s):
            return
        for request in [s.request for s in self._registry.list_sessions() if _is_deferred(s)]:
            log_about(_logger, request).error(
                "rank %d: deferred manifests or tables are not written, and will not be: the agent "
                "ends with its job",
                request.rank,
            )

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Commit the submitted frames without retries; return whether the thread ended within
        `timeout_s`.
        """
        self.thread.request_stop()
        self._done.put(None)
        return self.thread.join(timeout_s)

    def _run(self) -> None:
        running = True
        while running:
            batch, running = self._next_batch(wait=not self._unfinished)
            if batch.frames:
                self._commit_batch(batch)
            # Not at a stop: the next process does the remaining actions.
            if running and self._unfinished:
                self._unfinished.rotate(-1)
                self._apply(self._unfinished[-1])
            is_due = self._is_finishing or time.monotonic() - self._checked_s >= CHECK_INTERVAL_S
            if running and is_due:
                self._check()
                self._checked_s = time.monotonic()

    def _next_batch(self, *, wait: bool) -> tuple[_FrameBatch, bool]:
        batch = _FrameBatch()
        try:
            item = self._done.get(timeout=CHECK_INTERVAL_S) if wait else self._done.get_nowait()
        except queue.Empty:
            return batch, True
        while item is not None:
            frames, cost = item
            batch.frames += frames
            batch.cost += cost
            if len(batch.frames) >= MAX_BATCH_FRAMES or self._done.empty():
                return batch, True
            item = self._done.get()
        return batch, False

    def _commit_batch(self, batch: _FrameBatch) -> None:
        try:
            for shares in self._batch_committer.commit_frames(batch.frames):
                for session, share in shares.items():
                    self._count_committed(session, share)
        except UnavailableError as error:
            # This process is about to end; ranks resend these frames to the next process.
            _logger.error("%d frames are left uncommitted: %s", len(batch.frames), error)
        except Exception:
            # An error in one batch must not prevent the acknowledgements of all other batches.
            _logger.exception("a batch of %d frames was not committed", len(batch.frames))
        finally:
            self._budget.release(batch.cost, items=len(batch.frames))

    def _count_committed(self, session: RankSession, share: SessionBatch) -> None:
        try:
            session.count_committed(share.outcomes, share.row_results, share.metadata)
        except Exception as error:
            request = session.request
            log_about(_logger, request).exception(
                "committed frames of session %s were not counted", request.session_id
            )
            session.release_frames(share.sequences, f"committed frames were not counted: {error!r}")
        else:
            if share.outcomes or share.row_results:
                self._counters.add_all(count_frames(share.outcomes, share.row_results))
            stored = sum(outcome.bytes_stored for outcome in share.outcomes)
            root = str(session.storage.tree.root)
            self._usage.add(session.request.job_id, root, stored)
            for each in share.outcomes:
                if each.baseline is not None and each.baseline.problem is not None:
                    session.add_baseline_problem(each.baseline.problem)
            if any(outcome.unpacked for outcome in share.outcomes):
                self._on_unpacked()
            self._apply(session)

    def _apply(self, session: RankSession) -> None:
        done = True
        try:
            done = self._actions.apply_due(session)
        except Exception as error:
            request = session.request
            log_about(_logger, request).exception(
                "session %s of rank %d: metadata cannot be applied",
                request.session_id,
                request.rank,
            )
            session.add_finding(f"rank {request.rank}: a metadata frame was not applied: {error}")
        if done and session in self._unfinished:
            self._unfinished.remove(session)
            self._budget.release(0)
        elif not done and session not in self._unfinished:
            self._unfinished.append(session)
            self._budget.count_unfinished()

    def _check(self) -> None:
        """Retry failed actions, and fold old rows of the ledger while nothing else is queued."""
        sessions = self._registry.list_sessions()
        for session in self._actions.list_retries(sessions, at_once=self._is_finishing):
            self._apply(session)
        if self._is_finishing and not self._unfinished and not any(map(_is_deferred, sessions)):
            self._is_finished.set()
        self._registry.release_trees()
        try:
            if self._ledger.problem:
                self._ledger.probe()
            self._ledger.note_departed_sessions(
                each.request.session_id for each in sessions if each.over
            )
            while self._done.empty() and not self.thread.is_stopping and self._ledger.fold_some():
                pass
        except (sqlite3.Error, UnavailableError) as error:
            _logger.warning("the ledger cannot be compacted at present: %s", error)


def _is_deferred(session: RankSession) -> bool:
    return not (session.pending.is_complete and session.has_metadata)

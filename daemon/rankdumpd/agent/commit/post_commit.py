"""Post-commit actions: rows of tables are written at once, metadata frames are applied in their
order, and counts for monitoring are updated. A transient failure suspends its session, whose frames
are then retried from the ledger after a growing pause.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager

from rankdump._core.backoff import RetrySchedule
from rankdump._core.drop_reasons import normalize_reason
from rankdump._core.events import EventColumns
from rankdump._core.graph import GraphPart, OperatorGraph
from rankdump._core.plan import UNNAMED_MODEL
from rankdump._core.session_protocol import (
    CallStacks,
    ChangedPlan,
    IterationEnd,
    KernelArguments,
    SessionEnd,
)
from rankdump._core.status import IterationStatus
from rankdump._core.timeouts import RankTimeouts
from rankdump._layout.tree_layouts import GraphPlace
from rankdump._layout.tree_paths import MAX_NAME_BYTES
from rankdump.errors import ExhaustedError
from rankdumpd.agent.commit.iteration_end import (
    IterationJoin,
    iter_committed_rows,
    write_iteration_files,
)
from rankdumpd.agent.declarations import reread_metadata_frame
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.limits.usage import DumpUsage
from rankdumpd.agent.records import (
    FrameId,
    MetadataFrame,
    RecordOutcome,
    RecordStatus,
    StatisticRowsResult,
    read_wall_clock_us,
)
from rankdumpd.agent.report.reporter import CoordinatorReporter
from rankdumpd.agent.session.pending_metadata import ProgramOrder
from rankdumpd.agent.session.rank_session import RankSession, prepare_tree
from rankdumpd.agent.storage import rank_files
from rankdumpd.agent.storage.graph_files import GraphAssembler, render_graph
from rankdumpd.server import state_files
from rankdumpd.server.logs import log_about
from rankdumpd.server.metrics import MetricCounters, SampleKey

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
"""Longest pause in seconds between two attempts for a session whose disk was full or failing."""

_logger = logging.getLogger(__name__)


@contextmanager
def handling_failures(
    session: RankSession,
    what: str,
    end: MetadataFrame | None = None,
    *,
    iteration: int | None = None,
) -> Generator[None]:
    """Suspend the session and raise an ExhaustedError for a transient error of a disk or of the
    ledger; log any other error, and continue after the block.

    `end` is the frame that is being applied, if it ends an iteration or the session. If several
    iterations fail in the same way, that is one finding and one log line.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        what = f"{what}: {state_files.describe_error(error)}"
        numbered = "" if iteration is None else f"iteration {iteration}: "
        message = f"rank {session.request.rank}, {numbered}{what}"
        if state_files.is_transient(error):
            session.pending.suspend(end)
            raise ExhaustedError(f"{message}; the ledger keeps it and it is retried") from None
        # The frame is not marked as applied, so the next start of the agent retries it.
        is_new = session.add_failure(what, iteration)
        # The text of an OSError is sufficient; any other error may be a fault of this program.
        trace = None if isinstance(error, OSError) else error
        level = logging.ERROR if is_new else logging.DEBUG
        log_about(_logger, session.request).log(level, message, exc_info=trace)


def apply_metadata(ledger: AgentLedger, session: RankSession, declared: MetadataFrame) -> None:
    """Apply a metadata frame and mark it as applied; ExhaustedError when it must be retried."""
    declaration = declared.declaration
    if isinstance(declaration, RankTimeouts | ChangedPlan):
        with handling_failures(session, "timeouts or a changed plan not stored"):
            ledger.mark_applied_and_keep(declared.frame_id)
    elif isinstance(declaration, GraphPart):
        graph = session.graphs.add_part(declared.frame_id, declaration)
        if graph:
            _write_graph(ledger, session, graph)
    elif isinstance(declaration, KernelArguments):
        _write_arguments(ledger, session, declared.frame_id, declaration)
    elif isinstance(declaration, CallStacks):
        file, iteration = session.storage.stacks, declaration.iteration
        with handling_failures(session, "stacks not written", iteration=iteration):
            if file is not None:
                file.add(declaration, again=session.pending.was_begun(declared))
            ledger.mark_applied([declared.frame_id], session.program.written)


def _write_graph(ledger: AgentLedger, session: RankSession, graph: OperatorGraph) -> None:
    tree, rank = session.storage.tree, session.request.rank
    with handling_failures(session, f"graph {graph.number}: not written"):
        rank_files.write_graph(tree, rank, render_graph(graph, session.storage.context.profile))
        if graph.compiled:
            names = [node.name for node in graph.nodes]
            rank_files.write_program_order(tree, rank, {graph.number: names})
            session.program.mark_written(graph.number)
        ledger.mark_applied(session.graphs.forget_graph(graph.number), session.program.written)


def _write_arguments(
    ledger: AgentLedger, session: RankSession, frame_id: FrameId, arguments: KernelArguments
) -> None:
    rank, storage = session.request.rank, session.storage

    def folder_of(graph: int) -> str:
        net_name = session.plan.output.net_name or UNNAMED_MODEL
        place = GraphPlace(rank, net_name, graph, arguments.iteration)
        return storage.layout.make_folder(storage.context, place)

    with handling_failures(session, "arguments not written", iteration=arguments.iteration):
        mark = f"{frame_id.session_id}-{frame_id.sequence}"
        unnameable = rank_files.write_arguments(
            storage.tree, arguments, folder_of=folder_of, mark=mark
        )
        ledger.mark_applied([frame_id], session.program.written)
        for name in unnameable:
            session.add_finding(
                f"rank {rank}: arguments of {name!r} not written: "
                f"the file name would be over {MAX_NAME_BYTES} bytes"
            )


_RECORDS = "rankdump_agent_records_total"
_DROPPED = "rankdump_agent_dropped_records_total"
_DEGRADED = "rankdump_agent_degraded_records_total"
_BASELINE = "rankdump_agent_baseline_records_total"
_UNPACKED = "rankdump_agent_stored_unpacked_bytes_total"


def count_frames(
    outcomes: Collection[RecordOutcome], row_results: Iterable[StatisticRowsResult]
) -> dict[SampleKey, float]:
    """Return the metric increments for committed records and rows of statistics."""
    statuses = Counter(outcome.status for outcome in outcomes)
    degraded, reasons = Counter[str](), Counter[str]()
    for outcome in outcomes:
        if outcome.reason:
            is_kept = outcome.status is RecordStatus.DEGRADED
            (degraded if is_kept else reasons)[outcome.reason] += 1
    received = sum(outcome.head.kind.byte_count for outcome in outcomes)
    stored = sum(outcome.bytes_stored for outcome in outcomes)
    unpacked: Counter[str] = Counter()
    for outcome in outcomes:
        if outcome.unpacked:
            unpacked[outcome.unpacked] += outcome.bytes_stored
    for frame in row_results:
        statuses[frame.status] += frame.kept
        if frame.reason:
            degraded[frame.reason] += frame.kept
        for reason, places in frame.refused.items():
            statuses[RecordStatus.DROPPED] += len(places)
            reasons[reason] += len(places)
    found: dict[SampleKey, float] = {
        ("rankdump_agent_received_bytes_total", ()): received,
        ("rankdump_agent_stored_bytes_total", ()): stored,
    }
    verdicts = Counter(each.baseline.verdict for each in outcomes if each.baseline is not None)
    for verdict, count in verdicts.items():
        found[_BASELINE, (("verdict", verdict.value),)] = count
    for cause, byte_count in unpacked.items():
        found[_UNPACKED, (("reason", cause),)] = byte_count
    for reason, count in degraded.items():
        found[_DEGRADED, (("reason", reason),)] = count
    for status, count in statuses.items():
        found[_RECORDS, (("fate", status.value),)] = count
    return found | _count_drops(reasons, "agent")


def count_iteration_end(end: IterationEnd) -> dict[SampleKey, float]:
    """Return the metric increments for a rank's end of an iteration."""
    found: dict[SampleKey, float] = {
        ("rankdump_agent_iterations_total", ()): 1,
        ("rankdump_agent_stall_seconds_total", ()): end.stall_us / 1e6,
        (_RECORDS, (("fate", RecordStatus.DROPPED.value),)): sum(end.dropped.values()),
    }
    return found | _count_drops(end.dropped, "rank")


def _count_drops(reasons: Mapping[str, int], by: str) -> dict[SampleKey, float]:
    """Return drops by known reason, because a rank may send any text as a reason."""
    found: dict[SampleKey, float] = {}
    for reason, count in reasons.items():
        key = _DROPPED, (("by", by), ("reason", normalize_reason(reason)))
        found[key] = found.get(key, 0) + count
    return found


READ_BATCH_FRAMES = 64
"""Number of metadata frames that are reread together, because a session that waited for long has
many.
"""


class PostCommitActions:
    """Applies committed metadata frames in order; called from one thread at a time."""

    def __init__(
        self,
        ledger: AgentLedger,
        reporter: CoordinatorReporter,
        *,
        counters: MetricCounters,
        usage: DumpUsage,
        on_change: Callable[[RankSession], None],
        tree_changes: threading.Lock,
    ) -> None:
        """`on_change` is called for a session that has ended, because its balances may have
        changed.

        `tree_changes` is a lock that is held while a manifest is written from the ledger.
        """
        self._ledger, self._reporter, self._on_change = ledger, reporter, on_change
        self._tree_changes, self._counters, self._usage = tree_changes, counters, usage
        self._retries = RetrySchedule(FIRST_RETRY_S, LAST_RETRY_S)
        self._joining: dict[str, IterationJoin] = {}
        """The iteration whose operators are being joined, by session id."""
        self.finished_count = 0
        """Number of applied frames and of written parts of tables; it shows progress within a long
        batch.
        """

    def apply_due(self, session: RankSession) -> bool:
        """Apply the frames up to the watermark, then acknowledge; return whether all is done.

        Joining operators may take long, so each call joins only some and lets other sessions
        proceed.
        """
        done = session.pending.is_suspended or self._apply_pending(session)
        if session.pending.is_suspended:
            self._report_ends(session)
        if session.has_ended:
            self._on_change(session)
        self._reporter.wake()
        session.acknowledge()
        return done

    def list_retries(
        self, sessions: Iterable[RankSession], *, at_once: bool = False
    ) -> list[RankSession]:
        """Return the sessions for which `apply_due` must be called although no frame has arrived.

        With `at_once` the sessions whose pause is not over are included.
        """
        due = set(self._retries.list_due(now_s=time.monotonic()))
        found: list[RankSession] = []
        for session in sessions:
            is_due = at_once or session.request.session_id in due
            if session.pending.is_suspended and is_due:
                session.pending.resume()
                found.append(session)
            elif not session.has_metadata and not session.pending.is_suspended:
                found.append(session)
        return found

    def _apply_pending(self, session: RankSession) -> bool:
        try:
            self._write_metadata(session)
            self._tabulate(session)
            done = self._apply_some(session)
        except ExhaustedError as error:
            self._postpone(session, str(error))
            return True
        if done and session.pending.is_complete:
            session.pending.problem = ""
            if self._retries.forget(session.request.session_id):
                request = session.request
                log_about(_logger, request).warning(
                    "rank %d: deferred manifests and tables are written", request.rank
                )
        return done

    def _postpone(self, session: RankSession, why: str) -> None:
        session_id = session.request.session_id
        self._retries.postpone(session_id, now_s=time.monotonic())
        self._joining.pop(session_id, None)
        session.program = ProgramOrder(session.program.written)
        session.graphs = GraphAssembler()
        if session.storage.tables is not None:
            session.storage.tables.expect_existing_rows()
        if why != session.pending.problem:
            log_about(_logger, session.request).error(why)
        session.pending.problem = why

    def _report_ends(self, session: RankSession) -> None:
        """Count and report the ends of iterations and of the session while their files are
        deferred.
        """
        while (declared := session.pending.pop_next(session.watermark)) is not None:
            declaration = declared.declaration
            if isinstance(declaration, IterationEnd):
                status = self._count_end(session, declared, declaration)
                self._report_end(declared.frame_id, status)
            elif isinstance(declaration, SessionEnd):
                session.close_by_rank(declaration)
                self._report_session(session)

    def _write_metadata(self, session: RankSession) -> None:
        if session.has_metadata:
            return
        with handling_failures(session, "metadata not written"):
            prepare_tree(session, session.request, read_wall_clock_us())
        session.has_metadata = True

    def _apply_some(self, session: RankSession) -> bool:
        while self._join_some(session):
            declared = self._next_due(session)
            if declared is None:
                return True
            self._apply(session, declared)
            self.finished_count += 1
        return False

    def _next_due(self, session: RankSession) -> MetadataFrame | None:
        while True:
            declared, after = session.pending.pop_next(session.watermark), session.pending.read_to
            if declared is not None or after is None:
                return declared
            with handling_failures(session, "pending metadata frames not read from the ledger"):
                self._read_more(session, after)
                continue
            return None

    def _read_more(self, session: RankSession, after: int) -> None:
        session_id, watermark = session.request.session_id, session.watermark
        found = self._ledger.unapplied(session_id, after, up_to=watermark, limit=READ_BATCH_FRAMES)
        all_there = len(found) < READ_BATCH_FRAMES
        if all_there:
            found += self._ledger.unapplied(session_id, watermark)
        again = [reread_metadata_frame(raw, session_id) for raw in found]
        session.pending.add_from_ledger(again, all_there=all_there)

    def _join_some(self, session: RankSession) -> bool:
        """Join some operators; when none are left, end their iteration and return true."""
        joining = self._joining.pop(session.request.session_id, None)
        if joining is None:
            return True
        joined, iteration = False, joining.end.iteration
        what = "operators not joined"
        with handling_failures(session, what, joining.declared, iteration=iteration):
            joined = joining.join_some()
            if not joined:
                self._joining[session.request.session_id] = joining
                return False
        self._end_iteration(session, joining.declared, joining.end, joined=joined)
        return True

    def _apply(self, session: RankSession, declared: MetadataFrame) -> None:
        declaration = declared.declaration
        if isinstance(declaration, EventColumns):
            session.program.add_events(declaration)
        elif isinstance(declaration, IterationEnd):
            joining = IterationJoin(self._ledger, session, declared, declaration, self._usage)
            self._joining[session.request.session_id] = joining
        elif isinstance(declaration, SessionEnd):
            self._end_session(session, declared, declaration)
        else:
            apply_metadata(self._ledger, session, declared)
            if isinstance(declaration, ChangedPlan):
                # The changed plan decides which iterations are selected, and the status of the
                # session says that.
                self._report_session(session)
                self._on_change(session)

    def _tabulate(self, session: RankSession) -> None:
        """Write the table rows of all frames up to the watermark."""
        tables, session_id = session.storage.tables, session.request.session_id
        if tables is None:
            return
        with handling_failures(session, "tables of statistics: rows not written"):
            while session.tabulated_to < session.watermark:
                found, reached = self._ledger.table_rows(
                    session_id, after=session.tabulated_to, up_to=session.watermark
                )
                for sentence in tables.add(iter_committed_rows(found, session)):
                    session.add_finding(sentence)
                session.tabulated_to = reached
                self.finished_count += 1

    def _end_iteration(
        self,
        session: RankSession,
        declared: MetadataFrame,
        end: IterationEnd,
        *,
        joined: bool,
    ) -> None:
        frame_id, what = declared.frame_id, "no manifest written"
        _check_place(session, end.iteration)
        with self._tree_changes:
            status = self._count_end(session, declared, end)
            with handling_failures(session, what, declared, iteration=end.iteration):
                # A manifest marks an iteration as complete, so the rows of the iteration must be
                # written first.
                if joined and _are_rows_written(session, frame_id):
                    repeated = session.pending.was_begun(declared)
                    write_iteration_files(
                        self._ledger, session, status, frame_id, card=end.card, repeated=repeated
                    )
                    session.program.forget_iterations(end.iteration)
                    written = session.program.written
                    self._ledger.enter_iteration_end(frame_id, end, written, status)
                    return
        self._report_end(frame_id, status)

    def _count_end(
        self, session: RankSession, declared: MetadataFrame, end: IterationEnd
    ) -> IterationStatus:
        if session.is_first_end(declared, end):
            self._counters.add_all(count_iteration_end(end))
        return session.end_iteration(declared, end)

    def _report_end(self, frame_id: FrameId, status: IterationStatus) -> None:
        try:
            self._ledger.enter_waiting_iteration(frame_id, status)
        except sqlite3.Error as error:
            # Only logged, because the balance is reported once the manifest is written.
            log_about(_logger, status, iteration=status.iteration).error(
                "rank %d, iteration %d: not reported: %s", status.rank, status.iteration, error
            )

    def _end_session(self, session: RankSession, declared: MetadataFrame, end: SessionEnd) -> None:
        session.close_by_rank(end)
        with handling_failures(session, "the end of the session is not recorded", declared):
            if _are_rows_written(session, declared.frame_id):
                self._ledger.enter_session_end(declared.frame_id, end)
        self._report_session(session)

    def _report_session(self, session: RankSession) -> None:
        self._reporter.session(session.status(), str(session.storage.tree.root))


def _check_place(session: RankSession, iteration: int) -> None:
    """Note that the tree of a session was moved or removed, and have the new one prepared."""
    lock, request = session.storage.lock, session.request
    if lock.is_in_place():
        return
    text = (
        f"{session.storage.tree.root} was moved or removed while the job wrote to it: of iteration "
        f"{iteration} and earlier ones, what was stored until then is not there"
    )
    log_about(_logger, request).warning("rank %d: %s", request.rank, text)
    session.add_finding(f"rank {request.rank}: {text}")
    session.warn(text)
    lock.release()
    session.has_metadata = False


def _are_rows_written(session: RankSession, frame_id: FrameId) -> bool:
    """Return whether every row before a frame is written to its table."""
    # By the plan of the frame, because a later plan that has tables may have arrived in the
    # meantime.
    period, _ = session.plans.find(frame_id.sequence)
    return period.storage.tables is None or session.tabulated_to >= frame_id.sequence

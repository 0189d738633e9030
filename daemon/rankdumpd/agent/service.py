"""The agent as a component: construction, start, drain and stop of its parts, resumption of the
sessions of an earlier process, and forwarding of warnings between coordinator and ranks.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import grpc

from rankdump._core import tree_root
from rankdump._core.status import MetricSample, StatusView
from rankdump._kernels.kernel_functions import KERNELS
from rankdump._wire.channel import TlsCredentials
from rankdump.errors import CorruptedError
from rankdump.wire.v1 import agent_pb2_grpc
from rankdumpd.agent.backlog.backlog_packer import BacklogPacker, FilePacker
from rankdumpd.agent.blackbox.black_box import BlackBox
from rankdumpd.agent.commit.committer import FrameCommitter
from rankdumpd.agent.commit.post_commit import PostCommitActions
from rankdumpd.agent.ingress.servicer import (
    SERVICE_NAME,
    AgentServicer,
    OpenPushStreams,
    PushStreamReader,
)
from rankdumpd.agent.ingress.session_intake import FailureCounter, RecordWorkers, SessionIntake
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.limits.admission import StorePressure, decide_packing
from rankdumpd.agent.limits.resource_limits import LedgerSpace, ResourceLimits, make_policy
from rankdumpd.agent.limits.usage import DumpUsage, QueueBudget
from rankdumpd.agent.overview import AgentOverview
from rankdumpd.agent.records import ReceivedRecord
from rankdumpd.agent.report.reporter import BlackBoxReports, CoordinatorReporter
from rankdumpd.agent.retention import RetentionManager
from rankdumpd.agent.session.openings import NEVER_OPEN_NOTE, FinalBalance, SessionOpenings
from rankdumpd.agent.session.order_relay import OrderRelay
from rankdumpd.agent.session.rank_session import RankSession, StreamMailbox
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.agent.session.session_files import SessionFiles, find_daemons
from rankdumpd.agent.shm.ring_registry import RingRegistry
from rankdumpd.agent.shm.slab_folder import (
    SlabFolder,
    find_group_id,
    find_slab_folder,
    share_memory,
)
from rankdumpd.agent.storage.baseline import BaselineIndex
from rankdumpd.agent.storage.record_writer import DuplicateIndex
from rankdumpd.agent.storage.session_storage import store_records
from rankdumpd.agent.table.table_writer import TableWriter
from rankdumpd.server import machine, state_files
from rankdumpd.server.audit_log import AuditCallback, ignore_action
from rankdumpd.server.grpc_server import parse_socket_path
from rankdumpd.server.lifecycle import Component, request_stop, wait_while_finishing
from rankdumpd.server.logs import log_about
from rankdumpd.server.metrics import AGENT_PREFIX, MetricCounters
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.settings import AgentSettings, DaemonSettings

_logger = logging.getLogger(__name__)


def resume_sessions(
    registry: SessionRegistry, actions: PostCommitActions, report: Callable[[RankSession], None]
) -> None:
    """Resume every session, then `report` it. A session that cannot be resumed is rejected; the
    remaining ones are resumed.

    Transient errors are not raised here: the frames stay in the ledger and are retried.
    """
    for session in registry.recover():
        try:
            while not actions.apply_due(session):
                pass
            report(session)
        except Exception as error:
            request = session.request
            log_about(_logger, request).exception("pending work of a resumed session failed")
            if not state_files.is_transient(error):
                registry.give_up(request.session_id, error)


MAX_REMEMBERED_TEXTS = 256
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


class SessionNotifier:
    """Forwards warnings between sessions and the reporter; safe to use from several threads."""

    def __init__(
        self,
        registry: SessionRegistry,
        ledger: AgentLedger,
        reporter: CoordinatorReporter,
        limits: Callable[[RankSession], list[str]],
        files: SessionFiles,
    ) -> None:
        """`limits` returns why tensors of a session are dropped at present."""
        self._registry, self._ledger, self._reporter = registry, ledger, reporter
        self._limits, self._files = limits, files
        self._lock = threading.Lock()
        self._wordings: dict[tuple[str, str], str] = {}

    def report_session(self, session: RankSession) -> None:
        """Report a session to the coordinator, and send the warnings of its job to the session."""
        self._reporter.session(session.status(), str(session.storage.tree.root))
        self._files.update(session)
        job_id = session.request.job_id
        audit = self._reporter.warnings(job_id)
        limits = (self._find_first_wording(job_id, text) for text in self._limits(session))
        for text in (*audit, *limits):
            session.warn(text)

    def _find_first_wording(self, job_id: str, text: str) -> str:
        """Return the text that a job got first, of all texts that differ from this one only in
        numbers.
        """
        with self._lock:
            first = self._wordings.setdefault((job_id, _NUMBER.sub("0", text)), text)
            for earliest in list(self._wordings)[: len(self._wordings) - MAX_REMEMBERED_TEXTS]:
                del self._wordings[earliest]
            return first

    def report_all_sessions(self) -> None:
        """Report all sessions again, to a coordinator that has lost its state."""
        for session in self._registry.list_sessions():
            self.report_session(session)
            self._ledger.log.reenter_timeouts(session.request.session_id)
        self._reporter.wake()

    def warn_job(self, job_id: str, text: str) -> None:
        """Send a warning to all ranks of a job."""
        for session in self._registry.list_sessions():
            if session.request.job_id == job_id:
                session.warn(text)


LEDGER_LOST = "the next process will not know what this one has acknowledged"
"""What fails when a state file was removed, as a clause of a finding."""
_STOP_TIMEOUT_S = 3.0
"""Seconds for an orderly end of each thread; a thread that still waits for a disk then is
abandoned.
"""
_DEAD_STREAM_TIMEOUT_S = 5.0
"""Seconds for the streams of killed ranks to end."""


def _count_down(timeout_s: float) -> Callable[[], float]:
    """Return a function that returns how much of a time in seconds is left."""
    deadline_s = time.monotonic() + timeout_s
    return lambda: max(0.0, deadline_s - time.monotonic())


class DumpAgent(Component):
    """One agent; it owns its ledger from its construction until `stop`."""

    service_names: tuple[str, ...] = (SERVICE_NAME,)

    def __init__(
        self,
        settings: AgentSettings,
        credentials: TlsCredentials | None = None,
        *,
        audit: AuditCallback = ignore_action,
        counters: MetricCounters | None = None,
        required: RequiredFiles | None = None,
        ends_with_job: bool = False,
    ) -> None:
        """`audit` is called for removals from trees; `required` watches the files of the ledger.
        With `ends_with_job`, `drain` also packs files and writes table rows that wait.
        """
        self._ends_with_job = ends_with_job
        self._counters = counters or MetricCounters()
        self._counters.start_at_zero(AGENT_PREFIX)
        memory = share_memory(
            settings.memory_bytes,
            machine_bytes=machine.read_memory_bytes(),
            queue_bytes=settings.queue_bytes,
            max_record_bytes=settings.max_record_bytes,
        )
        self._state_dir = settings.state_dir
        self._drain_timeout_s = settings.drain_timeout_s
        self._failures, self._streams = FailureCounter(), OpenPushStreams()
        self._budget, self._usage = QueueBudget(settings.queue_bytes), DumpUsage()
        # The ledger is opened first, so that a second agent fails with its error and no other.
        self._ledger = AgentLedger(
            Path(settings.state_dir),
            report_bytes=settings.report_bytes if settings.coordinator else 0,
        )
        self._ledger.on_damage = request_stop
        self._required = required or RequiredFiles()
        self._required.watch_file(self._ledger.path, LEDGER_LOST)
        self._slabs = SlabFolder(
            find_slab_folder(settings.runtime_dir, parse_socket_path(settings.listen)),
            group=find_group_id(settings.runtime_group),
            ring_bytes=settings.slab_bytes,
            memory=memory,
        )
        policy = make_policy(settings, memory.record_bytes)
        self._limits = ResourceLimits(policy, memory, self._budget, self._usage, self._slabs)
        self._originals = DuplicateIndex()
        self._reporter = self._make_reporter(settings.coordinator, credentials)
        self._registry = SessionRegistry(
            self._ledger,
            max_record_bytes=memory.record_bytes,
            capacity_fault=lambda live: memory.session_fault(
                slab_bytes=self._slabs.held_bytes, sessions=live
            ),
            max_sessions=settings.max_sessions,
            roots=tree_root.split_roots(settings.roots),
            daemons=find_daemons(settings.listen, settings.coordinator),
            counters=self._counters,
        )
        self._make_parts(settings, audit)

    def _make_parts(self, settings: AgentSettings, audit: AuditCallback) -> None:
        """Construct the parts that depend on the registry."""
        self._session_files = SessionFiles(on_end=lambda each: self._notifier.report_session(each))
        self._notifier = SessionNotifier(
            *(self._registry, self._ledger, self._reporter),
            self._limits.warnings,
            self._session_files,
        )
        tree_changes = threading.Lock()
        self._backlog = BacklogPacker(
            *(self._ledger, self._registry, self._limits, self._usage),
            FilePacker(self._originals),
            tree_changes=tree_changes,
            counters=self._counters,
        )
        self._openings = SessionOpenings(self._registry.open, self._accept_balance)
        self._actions = PostCommitActions(
            self._ledger,
            self._reporter,
            counters=self._counters,
            usage=self._usage,
            on_change=self._session_files.update,
            tree_changes=tree_changes,
        )
        self._committer = FrameCommitter(
            *(self._ledger, self._registry, self._actions, self._budget),
            counters=self._counters,
            usage=self._usage,
            on_unpacked=self._backlog.wake,
        )
        self._make_tree_parts(settings, audit)
        self._overview = AgentOverview(
            *(self._registry, self._limits, self._slabs, self._reporter),
            retention=self._ledger.retention,
            ledger=LedgerSpace(Path(settings.state_dir)),
            backlog=self._backlog,
            black_box=self._black_box,
        )
        threads = settings.encode_threads or machine.count_cores()
        self._workers = RecordWorkers(
            threads,
            partial(
                store_records,
                originals=self._originals,
                baselines=BaselineIndex(tree_root.split_roots(settings.roots)),
                find_pressure=self._find_pressure,
            ),
            self._committer.submit_outcomes,
        )
        self._rings = RingRegistry(
            self._slabs,
            intake=self._make_intake,
            live_sessions=self._registry.live,
            changed=self._notifier.report_session,
        )

    def _make_tree_parts(self, settings: AgentSettings, audit: AuditCallback) -> None:
        """Construct the parts that work on trees in the background."""
        self._retention = RetentionManager(
            *(self._ledger, self._registry, self._usage),
            lambda: self._limits.policy,
            audit=audit,
            counters=self._counters,
        )
        self._table = TableWriter(
            *(self._ledger, self._registry, self._limits),
            is_wanted=settings.table,
            counters=self._counters,
        )
        self._black_box = BlackBox(
            *(self._registry, self._limits, Path(settings.state_dir)),
            host=socket.gethostname(),
            audit=audit,
            counters=self._counters,
            report=self._reporter.report_soon,
            on_note=self._notifier.report_session,
        )

    def register(self, server: grpc.Server) -> None:
        """Add the agent's service to a server."""
        servicer = AgentServicer(
            self._registry,
            self._streams,
            self._rings,
            self._openings,
            reader=self._make_reader,
            changed=self._notifier.report_session,
            view=self.view,
            wait_idle=self._wait_idle,
            pin=self._ledger.retention.pin,
            freeze=self._black_box.freeze_on_request,
            take_answer=self._orders.take_answer,
            counters=self._counters,
        )
        agent_pb2_grpc.add_AgentServiceServicer_to_server(servicer, server)

    def start(self) -> None:
        """Finish the work of an earlier process, then start the threads, those of the last stage
        first.

        CorruptedError when the ledger is damaged.
        """
        slowness = KERNELS.explain_slowness()
        if slowness:
            _logger.warning("%s", slowness)
        retention = self._ledger.retention
        self._session_files.start()
        retired = retention.counts()
        self._usage.restore(retention.list_usage(), retired)
        self._counters.add("rankdump_agent_retired_iterations_total", sum(retired.values()))
        # Started before resumed sessions write the first manifest.
        self._table.start()
        resume_sessions(self._registry, self._actions, self._notifier.report_session)
        self._ledger.check()
        self._reporter.start()
        self._committer.thread.start()
        self._workers.start()
        self._rings.restore_rings(self._registry.list_sessions())
        self._slabs.remove_strays(set(self._ledger.unfinished()), self._find_last_committed)
        self._rings.thread.start()
        self._retention.thread.start()
        self._backlog.start()
        self._black_box.start()

    def drain(self, timeout_s: float) -> int:
        """Let ranks finish their streams, then empty the queue; return the number of frames that
        are left.

        CorruptedError when the ledger is damaged, because nothing can be committed then.
        """
        left_s, idle_s = _count_down(timeout_s), min(timeout_s, self._drain_timeout_s)
        self._registry.refuse_sessions()
        self._ledger.check()
        self._black_box.stop_watching()
        # Ranks get half of the time, so that the other half is left to store the frames that they
        # sent.
        self._streams.drain(idle_s / 2)
        self._streams.end("the agent is stopping")
        self._rings.check_rings()
        self._black_box.finish(min(left_s(), idle_s))
        left = self._wait_for(self._budget.wait_idle, left_s)
        # Updates which exited ranks are known completely, so that the flush below reports it.
        self._rings.check_rings()
        unreported = self._wait_for(self._reporter.flush, left_s)
        self._rings.check_rings()
        self._reporter.leave("" if self._ends_with_job else self._state_dir)
        # Nothing is left to report, and the coordinator may stop before this process.
        self._reporter.stop()
        if not self._ends_with_job:
            # Unreported items stay in the ledger and do not count as unfinished.
            return left
        # The ledger of a job's own agent is removed with it, so no later process can do
        # deferred work.
        self._committer.finish(min(left_s(), idle_s / 2))
        self._wait_for(self._backlog.finish, left_s)
        self._wait_for(self._table.finish, left_s)
        return left + unreported

    def _wait_for(self, wait: Callable[[float], int], left_s: Callable[[], float]) -> int:
        """Call `wait`, which waits for a given time and returns how much is left; return its
        result.

        If the ledger is removed with the agent, `wait` is repeated while something is finished
        within each `drain_timeout_s`.
        """
        if not self._ends_with_job:
            return wait(left_s())
        return wait_while_finishing(
            wait, self.count_finished, idle_s=self._drain_timeout_s, left_s=left_s
        )

    def count_finished(self) -> int:
        """Return the number of finished frames, reports, packed files and written table rows."""
        parts = self._budget, self._actions, self._reporter, self._backlog, self._table
        return sum(part.finished_count for part in parts)

    def explain_unfinished(self) -> str:
        """Return for the log what happens to the frames that `drain` left unfinished."""
        exited = self._rings.count_unread()
        if not exited and self._ends_with_job:
            return "they are lost, because the agent ends with its job"
        if not exited:
            return super().explain_unfinished()
        ranks = f"{exited} rank{'s' * (exited > 1)} that ended"
        others = "other ranks send theirs again"
        # The state folder and the shared memory of a job's own agent are removed with it.
        if self._ends_with_job:
            return f"those of {ranks} are lost, {others}"
        return f"the next agent reads those of {ranks} from shared memory, {others}"

    def stop(self) -> None:
        """Stop at once; ranks resend unacknowledged frames to the next agent."""
        left_s = _count_down(_STOP_TIMEOUT_S)
        self._registry.refuse_sessions()
        self._budget.close()
        self._black_box.stop_watching()
        self._streams.end("the agent is stopping")
        self._streams.join(_STOP_TIMEOUT_S / 2)
        self._rings.stop()
        written = self._workers.stop(left_s())
        committed = self._committer.stop(max(_STOP_TIMEOUT_S / 2, left_s()))
        kept = self._retention.thread.stop(_STOP_TIMEOUT_S / 2)
        left = self._backlog.stop(_STOP_TIMEOUT_S / 2)
        tabled = self._table.stop(_STOP_TIMEOUT_S / 2)
        frozen = self._black_box.stop(_STOP_TIMEOUT_S / 2)
        stated = self._session_files.stop(_STOP_TIMEOUT_S / 2)
        self._reporter.stop()
        # These parts are closed only if all threads have ended: a running commit uses the ledger,
        # and elements in slabs may still be read.
        if written and committed and kept and left and tabled and frozen and stated:
            for part in (self._rings, self._registry, self._ledger):
                part.close()
        else:
            _logger.error("a thread is blocked on a disk: the ledger and the slabs are left open")

    def reload(self, settings: DaemonSettings) -> None:
        """Apply new limits, from the next tensor on."""
        largest = self._limits.policy.max_record_bytes
        self._limits.policy = make_policy(settings.agent, largest)

    def fault(self) -> str:
        """Return which essential threads have ended; empty when all of them run."""
        parts = self._committer, self._rings, self._reporter, self._black_box
        faults = (self._workers.fault(), *(part.thread.fault() for part in parts))
        return "; ".join(filter(None, faults))

    def summarize(self) -> str:
        """Return one line with the number of connected ranks and the frames in flight."""
        under_way = f"{self._budget.items} frames of {self._budget.used_bytes:,} bytes under way"
        return f"{self._registry.live()} ranks, {under_way}"

    def view(self) -> StatusView:
        """Return the status of the agent."""
        parts = (
            *(self._registry, self._openings, self._retention, self._backlog, self._table),
            *(self._committer, self._reporter, self._black_box, self._slabs),
        )
        findings = [sentence for part in parts for sentence in part.findings()]
        view = self._overview.view((*self._required.missing, *findings))
        sessions, iterations = self._openings.statuses()
        return dataclasses.replace(
            view, sessions=view.sessions + sessions, iterations=view.iterations + iterations
        )

    def samples(self) -> list[MetricSample]:
        """Return the current metric samples of all parts."""
        waiting = MetricSample("rankdump_agent_waiting_ranks", self._openings.waiting_ranks)
        return [*self._overview.samples(), waiting]

    def _make_reader(self, session: RankSession, mailbox: StreamMailbox) -> PushStreamReader:
        return PushStreamReader(
            *(session, mailbox),
            intake=self._make_intake(session),
            rings=self._rings,
            black_box=self._black_box,
        )

    def _make_intake(self, session: RankSession) -> SessionIntake:
        return SessionIntake(
            session,
            budget=self._budget,
            workers=self._workers,
            committer=self._committer,
            look_up_usage=partial(self._limits.usage_of, session),
            failures=self._failures,
        )

    def _find_pressure(self, record: ReceivedRecord) -> str:
        """Return why the file of a record should be packed later; empty if it should be
        packed now.
        """
        pressure = StorePressure(
            self._rings.find_filled_share(),
            self._budget.used_bytes / self._budget.limit_bytes,
            rank_waits=self._budget.has_waiting,
        )
        decision = decide_packing(
            pressure,
            self._limits.usage_of(self._registry.get(record.frame_id.session_id)),
            waiting_bytes=self._ledger.unpacked.sums[1],
            byte_count=record.head.byte_count,
        )
        return decision.reason if decision.is_later else ""

    def _find_last_committed(self, session_id: str) -> int | None:
        """Return the highest number of a session's committed frames; None for an
        unknown session.
        """
        try:
            row = self._ledger.find(session_id)
            if row is None:
                return None
            beyond = self._ledger.committed_beyond(session_id, row.watermark)
        except CorruptedError:
            return None
        return max(beyond, default=row.watermark)

    def _accept_balance(self, session_id: str, left: FinalBalance) -> None:
        session = self._registry.get(session_id)
        intake = self._make_intake(session)
        for frame in left.frames:
            intake.handle_frame(frame)
        intake.flush()
        session.add_finding(f"rank {session.request.rank}: {NEVER_OPEN_NOTE}")
        session.mark_lost()
        self._notifier.report_session(session)

    def _wait_idle(self, timeout_s: float) -> int:
        """Wait until everything is stored and reported, including what killed ranks left; return
        the number of items that are not.
        """
        left_s = _count_down(timeout_s)
        # The slab of a dead rank is read after the end of its stream, which child processes of the
        # rank can delay.
        self._streams.wait_until(
            lambda: not any(each.outlives_process for each in self._registry.list_sessions()),
            min(_DEAD_STREAM_TIMEOUT_S, timeout_s),
        )
        self._rings.check_rings()
        left = self._budget.wait_idle(left_s())
        # Updates which exited ranks are known completely.
        self._rings.check_rings()
        left += self._black_box.wait_idle(left_s())
        return left + self._reporter.flush(left_s())

    def _make_reporter(
        self, address: str, credentials: TlsCredentials | None
    ) -> CoordinatorReporter:
        self._orders = OrderRelay(
            lambda: self._registry.list_sessions(),
            lambda: self._reporter.report_soon(),
            find_newest=lambda session: self._black_box.find_newest(session),
        )
        return CoordinatorReporter(
            address,
            self._ledger.log,
            load=lambda: self._limits.load_of(self._registry.list_sessions()),
            warn=lambda job_id, text: self._notifier.warn_job(job_id, text),
            on_forgotten=lambda: self._notifier.report_all_sessions(),
            quiet=lambda: filter(
                None, [each.quiet_rank for each in self._registry.list_sessions()]
            ),
            orders=self._orders,
            black_box=BlackBoxReports(
                lambda: self._black_box.recent.list_reported(),
                lambda: self._black_box.rings.pop_compared_steps(),
                lambda relayed: self._black_box.join_freeze(relayed),
            ),
            credentials=credentials,
        )

"""Coordinator component and its gRPC servicer. It collects the reports of all agents, publishes the
order of each job, and answers requests for status, order and hints.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import grpc

from rankdump._config.control_changes import check_values
from rankdump._core import tree_root
from rankdump._core.black_box import FaultKind
from rankdump._core.events import Finding
from rankdump._core.freeze_record import NO_FREEZE_REASON, FreezeReach, FrozenCause, JobFreeze
from rankdump._core.job_control import ControlOrder, ControlResult
from rankdump._core.status import MetricSample, OrderEntry, StatusView
from rankdump._wire.black_box_messages import relayed_freeze_to_wire
from rankdump._wire.control_messages import (
    control_request_from_wire,
    order_to_wire,
    result_to_wire,
)
from rankdump._wire.message_fields import make_printable
from rankdump._wire.status_messages import timeout_hint_to_wire, view_to_wire
from rankdump.errors import RejectedError
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from rankdumpd.coordinator.control import ControlledSession, JobControl, list_sessions
from rankdumpd.coordinator.fleet_views import AgentReport, FleetView, ReportAnswer
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.publish.publisher import OrderPublisher, read_published_entries
from rankdumpd.coordinator.reports.report_reader import ReportReader
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import (
    StateWriter,
    build_status_view,
    collect_fleet_samples,
    paginate_order,
    select_jobs,
)
from rankdumpd.coordinator.service.publication import HintUpdater, IterationPublisher
from rankdumpd.coordinator.state import CoordinatorState
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.grpc_server import abort_on_error
from rankdumpd.server.lifecycle import Component
from rankdumpd.server.metrics import COORDINATOR_PREFIX, MetricCounters
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.settings import CoordinatorSettings, DaemonSettings


class CoordinatorServicer(CoordinatorServiceServicer):
    """The gRPC side of a coordinator."""

    def __init__(self, coordinator: JobCoordinator, counters: MetricCounters) -> None:
        self._coordinator, self._counters = coordinator, counters

    def Report(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[pb.ReportRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReportResponse]:
        """Add the reports of an agent to the store, and answer each."""
        reader, agent_id = ReportReader(), ""
        with abort_on_error(context, self._counters):
            try:
                for message in request_iterator:
                    report = reader.read(message)
                    if not agent_id:
                        self._coordinator.count_stream(report.agent_id, 1)
                        agent_id = report.agent_id
                    answer = self._coordinator.add_report(report)
                    yield _build_report_response(answer, self._coordinator.list_orders())
            finally:
                if agent_id:
                    self._coordinator.count_stream(agent_id, -1)

    def Clock(  # noqa: N802 - the name is the generated base class's
        self, request: pb.ClockRequest, context: grpc.ServicerContext
    ) -> pb.ClockResponse:
        """Return the present time of the coordinator's clock."""
        now_us = time.time_ns() // 1000
        return pb.ClockResponse(received_us=now_us, sent_us=now_us)

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: pb.CoordinatorStatusRequest, context: grpc.ServicerContext
    ) -> pb.CoordinatorStatusResponse:
        """Return the status of one job, or of all jobs."""
        with abort_on_error(context, self._counters):
            view = self._coordinator.build_status(request.job_id)
            return pb.CoordinatorStatusResponse(view=view_to_wire(view))

    def Order(  # noqa: N802 - the name is the generated base class's
        self, request: pb.OrderRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OrderResponse]:
        """Stream the order of a job in pages with its findings, or the findings alone."""
        with abort_on_error(context, self._counters):
            fleet = self._coordinator.build_fleet_view()
            if not fleet.latest:
                raise RejectedError("no job has reported yet")
            (job,) = select_jobs(fleet, request.job_id or fleet.latest)
            if request.findings_only:
                yield from paginate_order(self._coordinator.iter_findings(job.job_id))
            else:
                graph = request.graph if request.one_graph else None
                yield from paginate_order(self._coordinator.iter_order(job.job_id, graph))

    def Hints(  # noqa: N802 - the name is the generated base class's
        self, request: pb.HintsRequest, context: grpc.ServicerContext
    ) -> pb.HintsResponse:
        """Return the hints of one job, or of all jobs."""
        with abort_on_error(context, self._counters):
            jobs = select_jobs(self._coordinator.build_fleet_view(), request.job_id)
            hints = (timeout_hint_to_wire(hint) for job in jobs for hint in job.hints)
            return pb.HintsResponse(hints=hints)

    def Control(  # noqa: N802 - the name is the generated base class's
        self, request: pb.JobControlRequest, context: grpc.ServicerContext
    ) -> pb.JobControlResponse:
        """Change what a job dumps; return which ranks begin with the change in which iteration."""
        with abort_on_error(context, self._counters):
            order = control_request_from_wire(request)
            # The caller has checked the values, too, but they must be valid before any rank is
            # asked.
            check_values(order.action, order.values)
            return result_to_wire(self._coordinator.control_job(order))


def _build_report_response(
    answer: ReportAnswer, orders: Iterable[ControlOrder]
) -> pb.ReportResponse:
    return pb.ReportResponse(
        acknowledged_sequence=answer.acknowledged,
        received_sequence=answer.received,
        warnings=[pb.JobWarning(job_id=job_id, text=text) for job_id, text in answer.warnings],
        control_orders=map(order_to_wire, orders),
        freezes=map(relayed_freeze_to_wire, answer.freezes),
    )


_logger = logging.getLogger(__name__)
_WORK_INTERVAL_S = 0.2
"""Seconds between two rounds of publishing and of writing the state."""
_SEARCH_INTERVAL_S = 1.0
"""Seconds between two searches for open waits and outliers."""
_RETIRE_INTERVAL_S = 3600.0
_MAX_REASON_CHARACTERS = 1024
_CONTROL_GRACE_S = 2.0
"""Seconds that a stop leaves for orders that were given out, because only some ranks
may have them.
"""
_REPORT_ANSWER_TIMEOUT_S = 15.0
"""Longest time in seconds for which the answer to a report is delayed; an agent abandons a stream
after a minute.
"""


class JobCoordinator(Component):
    """Collects the reports of all agents and publishes the order of each job."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ends_with_job: bool = False,
        counters: MetricCounters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """With `ends_with_job`, `drain` publishes incomplete iterations as well.

        The path of the state is added to `required`, which reports when the file disappears.
        """
        self._required = required or RequiredFiles()
        self._counters = counters or MetricCounters()
        self._counters.start_at_zero(COORDINATOR_PREFIX)
        self._settings = settings
        self._ends_with_job = ends_with_job
        self._store = ReportStore(deadline_s=settings.deadline_s)
        self._control = JobControl(self._freeze_job)
        self._roots = tree_root.split_roots(settings.roots)
        self._hints = HintUpdater(self._store, roots=self._roots)
        self._orders = OrderPublisher(
            table_events=settings.table_events,
            trace_events=settings.trace_events,
            roots=self._roots,
        )
        self._state: CoordinatorState | None = None
        self._state_writer: StateWriter | None = None
        self._publisher: IterationPublisher | None = None
        # Held while publishing and while writing the state, and never while a report is added.
        self._publishing_lock = threading.Lock()
        self._is_draining = False
        """Whether `drain` publishes instead of the thread."""
        self._next_search_s = 0.0
        """Time at which the next search for alarms is due."""
        self._thread = BackgroundThread(self._run, "rankdumpd-coordinator")

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of the gRPC services, for health checks and reflection."""
        return tuple(
            service.full_name for service in coordinator_pb2.DESCRIPTOR.services_by_name.values()
        )

    @property
    def problem(self) -> str:
        """Why the state or orders cannot be written; empty when they can be written."""
        state = self._state_writer.problem if self._state_writer else ""
        orders = self._publisher.problems if self._publisher else []
        return "; ".join(filter(None, (*self._required.missing, state, *orders)))

    def register(self, server: grpc.Server) -> None:
        """Add the services to a server that has not started yet."""
        add_CoordinatorServiceServicer_to_server(CoordinatorServicer(self, self._counters), server)

    def start(self) -> None:
        """Restore the state and start publishing; UnavailableError if another process owns the
        state.
        """
        if self._thread.is_running:
            return
        self._state = CoordinatorState(Path(self._settings.state_dir))
        self._required.watch_file(
            self._state.path, "the next process will not know what was reported before"
        )
        self._state_writer = StateWriter(self._store, self._state, self._settings)
        self._publisher = IterationPublisher(
            self._store, self._hints, self._state_writer, self._orders, self._counters
        )
        self._state_writer.restore_store()
        self._hints.restore_states()
        self._publisher.start()
        self._thread.start()

    def drain(self, timeout_s: float) -> int:
        """Publish complete iterations, with `ends_with_job` all; return how many are left."""
        self._control.stop(min(timeout_s, _CONTROL_GRACE_S))
        if self._state_writer is None or self._publisher is None:
            return 0
        deadline_s = time.monotonic() + timeout_s
        lost, self._is_draining = self._publisher.lost, True
        with self._publishing_lock:
            try:
                while self._publisher.publish_next(every=self._ends_with_job):
                    if time.monotonic() >= deadline_s:
                        break
                self._state_writer.write_changes()
            finally:
                self._is_draining = False
        return self._store.backlog + self._publisher.lost - lost

    def explain_unfinished(self) -> str:
        """Return what becomes of the iterations that `drain` left, for the log."""
        if self._ends_with_job:
            return "their order is lost, because the coordinator ends with its job"
        return "the next coordinator publishes those that it or the agents still have"

    def count_finished(self) -> int:
        """Return a number that grows with each iteration that is published, or cannot be."""
        return self._publisher.finished_count if self._publisher else 0

    def stop(self) -> None:
        """Stop at once; agents keep items that were not acknowledged. May be repeated."""
        self._control.stop()
        self._thread.stop()
        if self._publisher is not None:
            self._publisher.stop()
        if self._state is not None:
            self._state.close()
            self._state = None

    def reload(self, settings: DaemonSettings) -> None:
        """Apply changed settings of folders that trees may be in, from the next order
        or hint on.
        """
        self._roots = tree_root.split_roots(settings.coordinator.roots)
        self._hints.roots = self._orders.roots = self._roots

    def fault(self) -> str:
        """Return why nothing is published any more; empty while the publishing thread runs."""
        return self._thread.fault()

    def summarize(self) -> str:
        """Return the number of unpublished iterations."""
        return f"{self._store.backlog} iterations not published"

    def count_stream(self, agent_id: str, change: int) -> None:
        """Note that a stream of an agent has begun (1) or ended (-1)."""
        self._store.count_stream(agent_id, change, now_s=time.monotonic())

    def add_report(self, report: AgentReport) -> ReportAnswer:
        """Add a report to the store; return the answer to its agent.

        The answer is delayed while iterations complete faster than they are published. Agents then
        keep their events on disk, and only a few iterations are in memory. While an order cannot be
        written, the delay begins only with more iterations.
        """
        answer = self._store.add_report(report, now_s=time.monotonic())
        self._control.add_answers(report.control_answers)
        self._counters.add("rankdump_coordinator_reports_total")
        deadline_s = time.monotonic() + _REPORT_ANSWER_TIMEOUT_S
        while (
            report.items
            and self._store.has_unpublished_backlog(report)
            and time.monotonic() < deadline_s
        ):
            # An order is sent with the answer, and should not wait for publications.
            if self._control.list_orders():
                break
            if self._thread.wait(_WORK_INTERVAL_S / 4):
                break
        return answer

    def list_orders(self) -> tuple[ControlOrder, ...]:
        """Return the orders that agents should relay to their ranks now."""
        return self._control.list_orders()

    def control_job(self, order: ControlOrder) -> ControlResult:
        """Let the ranks of a job carry out an order; RejectedError for a job that is
        not running.
        """

        def list_of_job() -> tuple[ControlledSession, ...]:
            (job,) = select_jobs(self.build_fleet_view(), order.job_id)
            return list_sessions(job.job_id, job.sessions)

        return self._control.control(order, list_of_job)

    def _freeze_job(self, order: ControlOrder, iteration: int) -> Callable[[], FreezeReach]:
        """Let all agents of a job freeze an iteration; return a function that returns which agents
        the freeze has reached.
        """
        (job,) = select_jobs(self.build_fleet_view(), order.job_id)
        attempt = max(each.attempt for each in job.sessions)
        text = make_printable("".join(order.values), _MAX_REASON_CHARACTERS) or NO_FREEZE_REASON
        cause = FrozenCause(FaultKind.REQUEST, iteration, text, time.time_ns() // 1000)
        freeze = JobFreeze(order.job_id, attempt, iteration, cause)
        self._store.request_freeze(freeze, now_s=time.monotonic())
        return lambda: self._store.find_freeze_reach(freeze)

    def build_fleet_view(self) -> FleetView:
        """Return a snapshot of all jobs and agents."""
        return self._store.build_fleet_view(now_s=time.monotonic())

    def build_status(self, job_id: str = "") -> StatusView:
        """Return the status of one job, or of all jobs; RejectedError for an unknown job."""
        fleet = self.build_fleet_view()
        return build_status_view(fleet, select_jobs(fleet, job_id), self.problem)

    def samples(self) -> list[MetricSample]:
        """Return the metrics of all jobs and agents."""
        return list(collect_fleet_samples(self.build_fleet_view()))

    def list_trees(self) -> tuple[str, ...]:
        """Return the roots of all jobs' trees that are in the folders that the settings allow."""
        return tuple(filter(self._is_allowed, self._store.list_roots()))

    def _is_allowed(self, root: str) -> bool:
        try:
            tree_root.check_root(root, self._roots, resolve=os.path.realpath)
        except RejectedError:
            return False
        return True

    def iter_order(self, job_id: str, graph: int | None = None) -> Iterator[OrderEntry | Finding]:
        """Yield the findings and the order of a job, then its unpublished iterations, which are
        merged now.

        Findings about an iteration that is still running are provisional.
        """
        yield from self._store.list_findings(job_id)
        offsets, views = self._store.list_unpublished(job_id)
        if offsets is not None:
            yield from read_published_entries(offsets, graph)
        position = 0 if offsets is None else offsets.position
        for view in views:
            order = merge_iteration(view)
            yield from order.findings
            entries = order.entries(position)
            yield from (entry for entry in entries if graph in (None, entry.graph))
            position += len(order)

    def iter_findings(self, job_id: str) -> Iterator[Finding]:
        """Yield the findings about the order of a job."""
        yield from self._store.list_findings(job_id)
        for view in self._store.list_unpublished(job_id)[1]:
            yield from merge_iteration(view).findings

    @property
    def _is_stopping(self) -> bool:
        return self._is_draining or self._thread.is_stopping

    def _run(self) -> None:
        retire_s = time.monotonic()
        while not self._thread.wait(_WORK_INTERVAL_S):
            try:
                now_s = time.monotonic()
                self._work(retire=now_s >= retire_s)
                retire_s = now_s + _RETIRE_INTERVAL_S if now_s >= retire_s else retire_s
            except Exception:
                # An exception must not end the thread, because nothing would be published any more.
                _logger.exception("publishing failed; the next attempt follows")

    def _search_alarms(self) -> None:
        """Search for open waits and outliers, and freeze the jobs in which a wait or an outlier is
        alarming.
        """
        now_s = time.monotonic()
        if now_s >= self._next_search_s:
            self._next_search_s = now_s + _SEARCH_INTERVAL_S
            now_us = time.time_ns() // 1000
            waits = self._hints.update_open_waits(now_us=now_us, now_s=now_s)
            for alarm in (*waits, *self._store.find_outliers(now_us=now_us)):
                self._store.add_alarm(alarm, now_s=now_s)

    def _work(self, *, retire: bool) -> None:
        if self._state_writer is None or self._publisher is None:
            return
        with self._publishing_lock:
            # While a drain waits, the thread stops after the iteration that it is publishing.
            while not self._is_stopping and self._publisher.publish_next():
                # Alarms are searched for in between, because publishing may take long.
                self._search_alarms()
            self._state_writer.write_changes()
            self._search_alarms()
            if retire:
                for job_id in self._state_writer.forget_old_jobs():
                    self._hints.forget_job(job_id)

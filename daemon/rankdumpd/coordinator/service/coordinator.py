"""Coordinator component and its gRPC servicer: takes the reports of all agents, publishes the order
of each job, and answers status, order and hints.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import grpc

from rankdump._core import tree_root
from rankdump._core.events import Finding
from rankdump._core.status import MetricSample, OrderEntry
from rankdump._wire.status_messages import timeout_hint_to_wire, view_to_wire
from rankdump.errors import RejectedError
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import (
    CoordinatorServiceServicer,
    add_CoordinatorServiceServicer_to_server,
)
from rankdumpd.coordinator.fleet_views import AgentReport, FleetView, ReportAnswer
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.publish.publisher import read_published_entries
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
from rankdumpd.coordinator.state.state_file import CoordinatorState
from rankdumpd.server.error_status import abort_on_error
from rankdumpd.server.lifecycle import Component
from rankdumpd.server.metrics import COORDINATOR_PREFIX, MetricCounters
from rankdumpd.server.state_files import RequiredFiles
from rankdumpd.settings import CoordinatorSettings


class CoordinatorApi(Protocol):
    """What the coordinator offers to its callers."""

    @property
    def problem(self) -> str:
        """What is wrong with the coordinator itself; empty when nothing is."""
        ...

    def connected(self, agent_id: str, change: int) -> None:
        """Note that a stream of an agent has begun (1) or ended (-1)."""
        ...

    def take(self, report: AgentReport) -> ReportAnswer:
        """Take a report."""
        ...

    def fleet(self) -> FleetView:
        """Return what is known of all jobs."""
        ...

    def order(self, job_id: str, graph: int | None) -> Iterator[OrderEntry | Finding]:
        """Return the order of a job as far as it is known, of one graph or of all."""
        ...

    def findings(self, job_id: str) -> Iterator[Finding]:
        """Return what is odd about it."""
        ...


class CoordinatorServicer(CoordinatorServiceServicer):
    """The gRPC side of a coordinator."""

    def __init__(self, desk: CoordinatorApi, meters: MetricCounters) -> None:
        self._desk, self._meters = desk, meters

    def Report(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[pb.ReportRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReportResponse]:
        """Take one report after the other, and answer each once it is taken."""
        reader, agent_id = ReportReader(), ""
        with abort_on_error(context, self._meters):
            try:
                for message in request_iterator:
                    report = reader.read(message)
                    if not agent_id:
                        self._desk.connected(report.agent_id, 1)
                        agent_id = report.agent_id
                    yield _build_report_response(self._desk.take(report))
            finally:
                if agent_id:
                    self._desk.connected(agent_id, -1)

    def Clock(  # noqa: N802 - the name is the generated base class's
        self, request: pb.ClockRequest, context: grpc.ServicerContext
    ) -> pb.ClockResponse:
        """Say what time it is here."""
        now_us = time.time_ns() // 1000
        return pb.ClockResponse(received_us=now_us, sent_us=now_us)

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: pb.CoordinatorStatusRequest, context: grpc.ServicerContext
    ) -> pb.CoordinatorStatusResponse:
        """Return the whole picture of one job, or of all."""
        with abort_on_error(context, self._meters):
            fleet = self._desk.fleet()
            view = build_status_view(fleet, select_jobs(fleet, request.job_id), self._desk.problem)
            return pb.CoordinatorStatusResponse(view=view_to_wire(view))

    def Order(  # noqa: N802 - the name is the generated base class's
        self, request: pb.OrderRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OrderResponse]:
        """Stream the order of a job in pages, and its findings; or the findings alone."""
        with abort_on_error(context, self._meters):
            fleet = self._desk.fleet()
            if not fleet.latest:
                raise RejectedError("no job has reported yet")
            (job,) = select_jobs(fleet, request.job_id or fleet.latest)
            if request.findings_only:
                yield from paginate_order(self._desk.findings(job.job_id))
            else:
                graph = request.graph if request.one_graph else None
                yield from paginate_order(self._desk.order(job.job_id, graph))

    def Hints(  # noqa: N802 - the name is the generated base class's
        self, request: pb.HintsRequest, context: grpc.ServicerContext
    ) -> pb.HintsResponse:
        """Return the hints of one job, or of all."""
        with abort_on_error(context, self._meters):
            jobs = select_jobs(self._desk.fleet(), request.job_id)
            hints = (timeout_hint_to_wire(hint) for job in jobs for hint in job.hints)
            return pb.HintsResponse(hints=hints)


def _build_report_response(answer: ReportAnswer) -> pb.ReportResponse:
    return pb.ReportResponse(
        acknowledged_sequence=answer.acknowledged,
        received_sequence=answer.received,
        warnings=[pb.JobWarning(job_id=job_id, text=text) for job_id, text in answer.warnings],
    )


_logger = logging.getLogger(__name__)
_WORK_INTERVAL_S = 0.2
"""Longest wait before what has come is in the state, and what is ready is published."""
_OPEN_WAIT_INTERVAL_S = 1.0
"""Between two looks at who waits at present."""
_RETIRE_INTERVAL_S = 3600.0
_REPORT_ANSWER_TIMEOUT_S = 15.0
"""Longest a report waits for its answer; an agent gives a stream up after a minute."""


class JobCoordinator(Component):
    """Takes the reports of all agents and publishes the order of each job."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ends_with_job: bool = False,
        meters: MetricCounters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """With `ends_with_job` nobody will come back to what is not complete at the end.

        `required` hears where the state stands.
        """
        self._required = required or RequiredFiles()
        self._meters = meters or MetricCounters()
        self._meters.start_at_zero(COORDINATOR_PREFIX)
        self._settings = settings
        self._ends_with_job = ends_with_job
        self._gather = ReportStore(deadline_s=settings.deadline_s)
        self._roots = tree_root.split_roots(settings.roots)
        self._hinting = HintUpdater(self._gather, roots=self._roots)
        self._state: CoordinatorState | None = None
        self._keeping: StateWriter | None = None
        self._publishing: IterationPublisher | None = None
        # Held by whoever publishes and writes the state; never while a report is taken.
        self._working = threading.Lock()
        self._look_s = 0.0
        """When it is time to see again who waits."""
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of the gRPC services, for health and reflection."""
        return tuple(
            service.full_name for service in coordinator_pb2.DESCRIPTOR.services_by_name.values()
        )

    @property
    def problem(self) -> str:
        """Why state or orders cannot be written; empty when they can."""
        state = self._keeping.problem if self._keeping else ""
        orders = self._publishing.problems if self._publishing else []
        return "; ".join(filter(None, (*self._required.missing, state, *orders)))

    def register(self, server: grpc.Server) -> None:
        """Add the services to a server that has not started yet."""
        add_CoordinatorServiceServicer_to_server(CoordinatorServicer(self, self._meters), server)

    def start(self) -> None:
        """Go on where an earlier process ended; ConfigError when another one has its state."""
        if self._thread is not None:
            return
        self._state = CoordinatorState(Path(self._settings.state_dir))
        self._required.watch_file(
            self._state.path, "the next process will not know what came before"
        )
        self._keeping = StateWriter(self._gather, self._state, self._settings)
        self._publishing = IterationPublisher(
            self._gather,
            self._hinting,
            self._keeping,
            table_events=self._settings.table_events,
            trace_events=self._settings.trace_events,
            roots=self._roots,
            meters=self._meters,
        )
        self._keeping.restore_store()
        self._hinting.restore_states()
        self._publishing.start()
        self._thread = threading.Thread(target=self._run, name="rankdumpd-coordinator", daemon=True)
        self._thread.start()

    def drain(self, timeout_s: float) -> int:
        """Publish what is complete, or all when the job ends here; return what is left."""
        if self._keeping is None or self._publishing is None:
            return 0
        deadline_s = time.monotonic() + timeout_s
        lost = self._publishing.lost
        with self._working:
            while self._publishing.publish_next(every=self._ends_with_job):
                if time.monotonic() >= deadline_s:
                    break
            self._keeping.write_changes()
        return self._gather.backlog + self._publishing.lost - lost

    def stop(self) -> None:
        """End at once; agents keep what was not acknowledged. Safe to call again."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._publishing is not None:
            self._publishing.stop()
        if self._state is not None:
            self._state.close()
            self._state = None

    def fault(self) -> str:
        """Say that nobody publishes any more."""
        dead = self._thread is not None and not self._thread.is_alive()
        return "the thread that publishes is dead" if dead else ""

    def brief(self) -> str:
        """Say how much is there that is not published."""
        return f"{self._gather.backlog} iterations not published"

    def connected(self, agent_id: str, change: int) -> None:
        """Note that a stream of an agent has begun (1) or ended (-1)."""
        self._gather.count_stream(agent_id, change, now_s=time.monotonic())

    def take(self, report: AgentReport) -> ReportAnswer:
        """Take a report; return what its agent is to hear.

        The answer waits while iterations are complete faster than they can be published: agents
        keep the rest on disk, and memory holds a few iterations however fast they come.
        """
        answer = self._gather.add_report(report, now_s=time.monotonic())
        self._meters.add("rankdump_coordinator_reports_total")
        patience_s = time.monotonic() + _REPORT_ANSWER_TIMEOUT_S
        while report.items and self._gather.is_crowded(report) and time.monotonic() < patience_s:
            if self._stopping.wait(_WORK_INTERVAL_S / 4):
                break
        return answer

    def fleet(self) -> FleetView:
        """Return what is known of all jobs."""
        return self._gather.build_fleet_view(now_s=time.monotonic())

    def samples(self) -> list[MetricSample]:
        """Return how it stands, for monitoring."""
        return list(collect_fleet_samples(self.fleet()))

    def order(self, job_id: str, graph: int | None = None) -> Iterator[OrderEntry | Finding]:
        """Return the published order of a job, then what is gathered so far, merged as it is.

        Findings of an iteration that still runs are provisional.
        """
        yield from self._gather.list_findings(job_id)
        book, views = self._gather.list_unpublished(job_id)
        if book is not None:
            yield from read_published_entries(book, graph)
        position = 0 if book is None else book.position
        for view in views:
            order = merge_iteration(view)
            yield from order.findings
            entries = order.entries(position)
            yield from (entry for entry in entries if graph in (None, entry.graph))
            position += len(order)

    def findings(self, job_id: str) -> Iterator[Finding]:
        """Return what is odd about the order of a job."""
        yield from self._gather.list_findings(job_id)
        for view in self._gather.list_unpublished(job_id)[1]:
            yield from merge_iteration(view).findings

    def _run(self) -> None:
        retire_s = time.monotonic()
        while not self._stopping.wait(_WORK_INTERVAL_S):
            try:
                now_s = time.monotonic()
                self._work(retire=now_s >= retire_s)
                retire_s = now_s + _RETIRE_INTERVAL_S if now_s >= retire_s else retire_s
            except Exception:
                # The edge of the thread: without it, nothing would be published ever again.
                _logger.exception("publishing failed and goes on with the next iteration")

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _OPEN_WAIT_INTERVAL_S
            self._hinting.update_open_waits(now_us=time.time_ns() // 1000, now_s=now_s)

    def _work(self, *, retire: bool) -> None:
        if self._keeping is None or self._publishing is None:
            return
        with self._working:
            while not self._stopping.is_set() and self._publishing.publish_next():
                # Who waits must be seen however much there is to publish.
                self._look()
            self._keeping.write_changes()
            self._look()
            if retire:
                for job_id in self._keeping.forget_old_jobs():
                    self._hinting.forget_job(job_id)

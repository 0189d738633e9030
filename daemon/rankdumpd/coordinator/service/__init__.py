"""The coordinator, room by room: gather, then merge and hints, then publish, then the state."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

from rankdump.contract import roots
from rankdump.contract.findings import Finding
from rankdump.contract.room import MetricSample
from rankdump.contract.status import OrderEntry
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.publish import published
from rankdumpd.coordinator.service.hinting import Hinting
from rankdumpd.coordinator.service.keeping import Keeping
from rankdumpd.coordinator.service.metered import of_fleet
from rankdumpd.coordinator.service.publishing import Publishing
from rankdumpd.coordinator.service.servicer import CoordinatorServicer
from rankdumpd.coordinator.state import State
from rankdumpd.coordinator.values import Answer, Fleet, Report
from rankdumpd.lifecycle import Room
from rankdumpd.meters import Meters
from rankdumpd.metric_names import COORDINATOR
from rankdumpd.required_files import RequiredFiles
from rankdumpd.settings import CoordinatorSettings

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
"""Longest wait before what has come is in the state, and what is ready is published."""
_LOOK_S = 1.0
"""Between two looks at who waits at present."""
_RETIRE_S = 3600.0
_PATIENCE_S = 15.0
"""Longest a report waits for its answer; an agent gives a stream up after a minute."""


class Coordinator(Room):
    """Takes the reports of all agents and publishes the order of each job."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        ends_with_job: bool = False,
        meters: Meters | None = None,
        required: RequiredFiles | None = None,
    ) -> None:
        """With `ends_with_job` nobody will come back to what is not complete at the end.

        `required` hears where the state stands.
        """
        self._required = required or RequiredFiles()
        self._meters = meters or Meters()
        self._meters.begin(COORDINATOR)
        self._settings = settings
        self._ends_with_job = ends_with_job
        self._gather = Gather(deadline_s=settings.deadline_s)
        self._roots = roots.folders(settings.roots)
        self._hinting = Hinting(self._gather, roots=self._roots)
        self._state: State | None = None
        self._keeping: Keeping | None = None
        self._publishing: Publishing | None = None
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
        return "; ".join(filter(None, (*self._required.gone, state, *orders)))

    def register(self, server: grpc.Server) -> None:
        """Add the services to a server that has not started yet."""
        add_CoordinatorServiceServicer_to_server(CoordinatorServicer(self, self._meters), server)

    def start(self) -> None:
        """Go on where an earlier process ended; ConfigError when another one has its state."""
        if self._thread is not None:
            return
        self._state = State(Path(self._settings.state_dir))
        self._required.keep(self._state.path, "the next process will not know what came before")
        self._keeping = Keeping(self._gather, self._state, self._settings)
        self._publishing = Publishing(
            self._gather,
            self._hinting,
            self._keeping,
            table_events=self._settings.table_events,
            trace_events=self._settings.trace_events,
            roots=self._roots,
            meters=self._meters,
        )
        self._keeping.recall()
        self._hinting.recall()
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
            while self._publishing.next(every=self._ends_with_job):
                if time.monotonic() >= deadline_s:
                    break
            self._keeping.flush()
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
        self._gather.connected(agent_id, change, now_s=time.monotonic())

    def take(self, report: Report) -> Answer:
        """Take a report; return what its agent is to hear.

        The answer waits while iterations are complete faster than they can be published: agents
        keep the rest on disk, and memory holds a few iterations however fast they come.
        """
        answer = self._gather.take(report, now_s=time.monotonic())
        self._meters.add("rankdump_coordinator_reports_total")
        patience_s = time.monotonic() + _PATIENCE_S
        while report.items and self._gather.crowded(report) and time.monotonic() < patience_s:
            if self._stopping.wait(_TICK_S / 4):
                break
        return answer

    def fleet(self) -> Fleet:
        """Return what is known of all jobs."""
        return self._gather.fleet(now_s=time.monotonic())

    def samples(self) -> list[MetricSample]:
        """Return how it stands, for monitoring."""
        return list(of_fleet(self.fleet()))

    def order(self, job_id: str, graph: int | None = None) -> Iterator[OrderEntry | Finding]:
        """Return the published order of a job, then what is gathered so far, merged as it is.

        Findings of an iteration that still runs are provisional.
        """
        yield from self._gather.findings(job_id)
        book, views = self._gather.unpublished(job_id)
        if book is not None:
            yield from published(book, graph)
        position = 0 if book is None else book.position
        for view in views:
            order = merge(view)
            yield from order.findings
            entries = order.entries(position)
            yield from (entry for entry in entries if graph in (None, entry.graph))
            position += len(order)

    def findings(self, job_id: str) -> Iterator[Finding]:
        """Return what is odd about the order of a job."""
        yield from self._gather.findings(job_id)
        for view in self._gather.unpublished(job_id)[1]:
            yield from merge(view).findings

    def _run(self) -> None:
        retire_s = time.monotonic()
        while not self._stopping.wait(_TICK_S):
            try:
                now_s = time.monotonic()
                self._work(retire=now_s >= retire_s)
                retire_s = now_s + _RETIRE_S if now_s >= retire_s else retire_s
            except Exception:
                # The edge of the thread: without it, nothing would be published ever again.
                _LOG.exception("publishing failed and goes on with the next iteration")

    def _look(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._look_s:
            self._look_s = now_s + _LOOK_S
            self._hinting.look(now_us=time.time_ns() // 1000, now_s=now_s)

    def _work(self, *, retire: bool) -> None:
        if self._keeping is None or self._publishing is None:
            return
        with self._working:
            while not self._stopping.is_set() and self._publishing.next():
                # Who waits must be seen however much there is to publish.
                self._look()
            self._keeping.flush()
            self._look()
            if retire:
                for job_id in self._keeping.retire():
                    self._hinting.forget(job_id)

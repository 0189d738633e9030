"""The coordinator, room by room: gather, then merge and hints, then publish."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator

import grpc

from rankdump.contract.status import OrderEntry
from rankdump.wire.v1 import coordinator_pb2
from rankdump.wire.v1.coordinator_pb2_grpc import add_CoordinatorServiceServicer_to_server
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.hints import HintState, hints_of, observed
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.publish import Publisher, published
from rankdumpd.coordinator.service.servicer import CoordinatorServicer
from rankdumpd.coordinator.values import Book, Fleet, GlobalOrder, IterationView, JobFacts, Report

_LOG = logging.getLogger(__name__)
_TICK_S = 0.2
"""Longest wait before an iteration that has become ready is published."""


class Coordinator:
    """Takes the reports of all agents and publishes the order of each job."""

    def __init__(self, *, deadline_s: float) -> None:
        self._gather = Gather(deadline_s=deadline_s)
        self._publisher = Publisher()
        self._books: dict[str, Book] = {}
        # Held from taking an iteration out of the gathered ones until it is in the file.
        self._publishing = threading.Lock()
        self._unpublished = 0
        self._hint_states: dict[str, HintState] = {}
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of the gRPC services, for health and reflection."""
        return tuple(
            service.full_name for service in coordinator_pb2.DESCRIPTOR.services_by_name.values()
        )

    def register(self, server: grpc.Server) -> None:
        """Add the services to a server that has not started yet."""
        add_CoordinatorServiceServicer_to_server(CoordinatorServicer(self), server)

    def start(self) -> None:
        """Begin to publish what is ready, in a thread of its own."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="coordinator", daemon=True)
            self._thread.start()

    def drain(self, timeout_s: float) -> int:
        """Publish all that is gathered, complete or not; return how many iterations are not."""
        deadline_s = time.monotonic() + timeout_s
        before = self._unpublished
        while self._publish_next(every=True):
            if time.monotonic() >= deadline_s:
                break
        return self._gather.backlog + self._unpublished - before

    def stop(self) -> None:
        """Stop publishing; what has not been drained is lost. Safe to call again."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self, report: Report) -> int:
        """Take a report; return the highest number taken of its agent."""
        return self._gather.take(report, now_s=time.monotonic())

    def fleet(self) -> Fleet:
        """Return what is known of all jobs."""
        return self._gather.fleet()

    def order(self, job_id: str) -> Iterator[OrderEntry]:
        """Return the published order of a job, then what is gathered so far, merged as it is."""
        with self._publishing:
            book = self._books.get(job_id, Book("", {}, 0))
            pending = self._gather.pending(job_id)
        return _continued(published(book), pending, book.position)

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            try:
                while not self._stopping.is_set() and self._publish_next():
                    pass
            except Exception:
                # The edge of the thread: without it, nothing would be published ever again.
                _LOG.exception("publishing failed and goes on with the next iteration")

    def _publish_next(self, *, every: bool = False) -> bool:
        """Publish one iteration; return whether there was one."""
        with self._publishing:
            view = self._gather.next_ready(now_s=time.monotonic(), every=every)
            if view is None:
                return False
            try:
                self._publish(view, _merged(view))
            except Exception as error:
                # The edge of the worker: one bad iteration must not hold up the others.
                _LOG.exception("job %s, iteration %d", view.job_id, view.iteration)
                self._unpublished += 1
                lost = f"iteration {view.iteration}: its events are lost: {error!r}"
                self._gather.settle(view.job_id, findings=(lost,))
            return True

    def _publish(self, view: IterationView, order: GlobalOrder) -> None:
        job_id = view.job_id
        findings = [*_lateness(view), *order.findings]
        book, problem = self._publisher.append(
            order, job_id=job_id, root=view.root, book=self._books.get(job_id)
        )
        if book is not None:
            self._books[job_id] = book
        else:
            self._unpublished += 1
            findings.append(problem)
        state = observed(self._hint_states.get(job_id, HintState()), order)
        self._hint_states[job_id] = state
        sessions = self._gather.fleet().jobs[job_id].sessions
        facts = JobFacts(job_id, sessions={session.rank: session for session in sessions})
        self._gather.settle(job_id, findings=findings, hints=hints_of(state, facts))


def _merged(view: IterationView) -> GlobalOrder:
    return merge(view)


def _lateness(view: IterationView) -> Iterator[str]:
    """Say which ranks an iteration is merged without having heard all of."""
    if view.late_count:
        named = " ".join(map(str, view.late))
        more = view.late_count - len(view.late)
        others = f" and {more} more" if more else ""
        yield f"iteration {view.iteration}: merged before rank {named}{others} had finished it"


def _continued(
    published: Iterator[OrderEntry], pending: list[IterationView], position: int
) -> Iterator[OrderEntry]:
    yield from published
    for view in pending:
        order = _merged(view)
        yield from order.entries(position)
        position += len(order)

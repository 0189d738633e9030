"""Answers the coordinator's calls: messages to values, values to messages, errors to codes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from rankdump.contract.errors import RankdumpError, RefusedError
from rankdump.contract.findings import Finding
from rankdump.contract.status import OrderEntry
from rankdump.wire.errors import code_of
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from rankdump.wire.views import timeout_hint_to_wire, view_to_wire
from rankdumpd.coordinator.gather import Reader
from rankdumpd.coordinator.service.answers import chosen, pages, status_of
from rankdumpd.coordinator.values import Answer, Fleet, Report


class Desk(Protocol):
    """What the coordinator offers to its callers."""

    @property
    def problem(self) -> str:
        """What is wrong with the coordinator itself; empty when nothing is."""
        ...

    def connected(self, agent_id: str, change: int) -> None:
        """Note that a stream of an agent has begun (1) or ended (-1)."""
        ...

    def take(self, report: Report) -> Answer:
        """Take a report."""
        ...

    def fleet(self) -> Fleet:
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

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def Report(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[pb.ReportRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReportResponse]:
        """Take one report after the other, and answer each once it is taken."""
        reader, agent_id = Reader(), ""
        with _mapped(context):
            try:
                for message in request_iterator:
                    report = reader.read(message)
                    if not agent_id:
                        self._desk.connected(report.agent_id, 1)
                        agent_id = report.agent_id
                    yield _response(self._desk.take(report))
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
        with _mapped(context):
            fleet = self._desk.fleet()
            view = status_of(fleet, chosen(fleet, request.job_id), self._desk.problem)
            return pb.CoordinatorStatusResponse(view=view_to_wire(view))

    def Order(  # noqa: N802 - the name is the generated base class's
        self, request: pb.OrderRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OrderResponse]:
        """Stream the order of a job in pages, and its findings; or the findings alone."""
        with _mapped(context):
            fleet = self._desk.fleet()
            if not fleet.latest:
                raise RefusedError("no job has reported yet")
            (job,) = chosen(fleet, request.job_id or fleet.latest)
            if request.findings_only:
                yield from pages(self._desk.findings(job.job_id))
            else:
                graph = request.graph if request.one_graph else None
                yield from pages(self._desk.order(job.job_id, graph))

    def Hints(  # noqa: N802 - the name is the generated base class's
        self, request: pb.HintsRequest, context: grpc.ServicerContext
    ) -> pb.HintsResponse:
        """Return the hints of one job, or of all."""
        with _mapped(context):
            jobs = chosen(self._desk.fleet(), request.job_id)
            hints = (timeout_hint_to_wire(hint) for job in jobs for hint in job.hints)
            return pb.HintsResponse(hints=hints)


def _response(answer: Answer) -> pb.ReportResponse:
    return pb.ReportResponse(
        acknowledged_sequence=answer.acknowledged,
        received_sequence=answer.received,
        warnings=[pb.JobWarning(job_id=job_id, text=text) for job_id, text in answer.warnings],
    )


@contextmanager
def _mapped(context: grpc.ServicerContext) -> Generator[None, None, None]:
    """End the call with the code that stands for an error."""
    try:
        yield
    except RankdumpError as error:
        context.abort(code_of(error), str(error))

"""Answers the coordinator's calls: messages to values, values to messages, errors to codes."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Protocol

import grpc

from rankdump.contract.errors import RankdumpError, RefusedError
from rankdump.contract.status import OrderEntry, StatusView
from rankdump.wire.errors import code_of
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdump.wire.v1 import status_pb2
from rankdump.wire.v1.coordinator_pb2_grpc import CoordinatorServiceServicer
from rankdump.wire.views import entry_to_wire, timeout_hint_to_wire, view_to_wire
from rankdumpd.coordinator.gather import report_from_wire
from rankdumpd.coordinator.values import Fleet, JobView, Report

_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1 << 20
_MAX_BALANCES = 20_000
"""Balances in one answer: more of them would pass the limit that gRPC sets for a message."""


class Desk(Protocol):
    """What the coordinator offers to its callers."""

    def take(self, report: Report) -> int:
        """Take a report; return the highest number taken of its agent."""
        ...

    def fleet(self) -> Fleet:
        """Return what is known of all jobs."""
        ...

    def order(self, job_id: str) -> Iterator[OrderEntry]:
        """Return the order of a job as far as it is known."""
        ...


class CoordinatorServicer(CoordinatorServiceServicer):
    """The gRPC side of a coordinator."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def Report(  # noqa: N802 - the name is the generated base class's
        self, request_iterator: Iterator[pb.ReportRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.ReportResponse]:
        """Take one report after the other, and acknowledge each once it is taken."""
        with _mapped(context):
            for message in request_iterator:
                taken = self._desk.take(report_from_wire(message))
                yield pb.ReportResponse(acknowledged_sequence=taken)

    def Clock(  # noqa: N802 - the name is the generated base class's
        self, request: pb.ClockRequest, context: grpc.ServicerContext
    ) -> pb.ClockResponse:
        """Say what time it is here."""
        now_us = time.time_ns() // 1000
        return pb.ClockResponse(received_us=now_us, sent_us=now_us)

    def Status(  # noqa: N802 - the name is the generated base class's
        self, request: pb.CoordinatorStatusRequest, context: grpc.ServicerContext
    ) -> pb.CoordinatorStatusResponse:
        """Return sessions, balances and findings of one job, or of all."""
        with _mapped(context):
            fleet = self._desk.fleet()
            view = _status(fleet, _chosen(fleet, request.job_id))
            return pb.CoordinatorStatusResponse(view=view_to_wire(view))

    def Order(  # noqa: N802 - the name is the generated base class's
        self, request: pb.OrderRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OrderResponse]:
        """Stream the order of a job in pages, its findings on the first; graph 0 means all."""
        with _mapped(context):
            fleet = self._desk.fleet()
            if not fleet.latest:
                raise RefusedError("no job has reported yet")
            (job,) = _chosen(fleet, request.job_id or fleet.latest)
            entries = self._desk.order(job.job_id)
            if request.graph:
                entries = (entry for entry in entries if entry.graph == request.graph)
            yield from _pages(entries, job.findings)

    def Hints(  # noqa: N802 - the name is the generated base class's
        self, request: pb.HintsRequest, context: grpc.ServicerContext
    ) -> pb.HintsResponse:
        """Return the hints of one job, or of all."""
        with _mapped(context):
            jobs = _chosen(self._desk.fleet(), request.job_id)
            return pb.HintsResponse(
                hints=[timeout_hint_to_wire(hint) for job in jobs for hint in job.hints]
            )


@contextmanager
def _mapped(context: grpc.ServicerContext) -> Generator[None, None, None]:
    """End the call with the code that stands for an error."""
    try:
        yield
    except RankdumpError as error:
        context.abort(code_of(error), str(error))


def _chosen(fleet: Fleet, job_id: str) -> list[JobView]:
    """Return the job of that id, or every job when there is no id; RefusedError if unknown."""
    if not job_id:
        return list(fleet.jobs.values())
    if job_id not in fleet.jobs:
        known = ", ".join(fleet.jobs) or "none"
        raise RefusedError(f"job {job_id!r} has not reported; known: {known}")
    return [fleet.jobs[job_id]]


def _status(fleet: Fleet, jobs: list[JobView]) -> StatusView:
    balances = [balance for job in jobs for balance in job.iterations]
    findings = [finding for job in jobs for finding in job.findings]
    if len(balances) > _MAX_BALANCES:
        findings.append(f"{len(balances) - _MAX_BALANCES} older balances are not in this answer")
    return StatusView(
        sessions=tuple(session for job in jobs for session in job.sessions),
        iterations=tuple(balances[-_MAX_BALANCES:]),
        load=fleet.load,
        roots=tuple(dict.fromkeys(root for job in jobs for root in job.roots)),
        findings=tuple(findings),
    )


def _pages(entries: Iterator[OrderEntry], findings: tuple[str, ...]) -> Iterator[pb.OrderResponse]:
    page, size = pb.OrderResponse(findings=[status_pb2.Finding(text=text) for text in findings]), 0
    for entry in entries:
        message = entry_to_wire(entry)
        if len(page.entries) == _PAGE_ENTRIES or size > _PAGE_BYTES:
            yield page
            page, size = pb.OrderResponse(), 0
        page.entries.append(message)
        size += message.ByteSize()
    if page.entries or page.findings:
        yield page

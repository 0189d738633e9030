"""What an agent tells a coordinator that comes late, goes away, or refuses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from rankdump.contract.events import Event, EventColumns, EventKind
from rankdump.contract.status import IterationStatus, Load, RankEvents, SessionState, SessionStatus
from rankdump.wire.events import events_from_wire
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent import report
from rankdumpd.agent.report import Reporter

WAIT_S = 60
SOURCE = RankEvents("job", 3)
SESSION = SessionStatus("job", "s", 3, 4, 3, "here", 1, SessionState.OPEN)


def events(count: int, iteration: int = 0) -> EventColumns:
    return EventColumns.of(
        [Event(0, iteration, n, n, f"op{n}", EventKind.OPERATOR, n, n + 1) for n in range(count)]
    )


class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Takes reports, and breaks off where it is told to."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/c.sock"
        self.reports: list[coordinator_pb2.ReportRequest] = []
        self.faults: list[grpc.StatusCode] = []
        self._server: grpc.Server | None = None

    def Report(self, request_iterator, context) -> Iterator[coordinator_pb2.ReportResponse]:  # noqa: N802 - the generated base class's name
        for request in request_iterator:
            self.reports.append(request)
            if self.faults:
                context.abort(self.faults.pop(0), "failing on purpose")
            yield coordinator_pb2.ReportResponse(acknowledged_sequence=request.sequence)

    def Status(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Order(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Hints(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Clock(self, request, context):  # noqa: N802 - the name is the service's
        raise NotImplementedError

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server:
            self._server.stop(0).wait()
            self._server = None


@pytest.fixture
def coordinator(short_dir: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(short_dir)
    yield coordinator
    coordinator.stop()


@pytest.fixture
def reporter(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reporter]:
    monkeypatch.setattr(report, "LAST_RETRY_S", 0.1)
    reporter = Reporter(coordinator.address, lambda: Load(queued_records=7))
    reporter.start()
    yield reporter
    reporter.stop()
    reporter.stop()


def test_what_was_said_before_the_coordinator_came_arrives_in_order(coordinator, reporter):
    """A late coordinator hears everything, events before the balance of their iteration."""
    reporter.session(SESSION, "/dump")
    reporter.events(SOURCE, events(45_000))
    reporter.iteration(IterationStatus("job", "s", 3, 0, True, expected=1, stored=1))
    coordinator.start()
    assert reporter.flush(WAIT_S) == 0
    reports = coordinator.reports
    assert [r.sequence for r in reports] == list(range(1, len(reports) + 1))
    assert len({r.agent_id for r in reports}) == 1
    assert reports[0].sessions[0].session_id == "s"
    assert dict(reports[0].roots) == {"job": "/dump"}
    assert reports[0].load.queued_records == 7
    columns = [events_from_wire(e.columns) for r in reports for e in r.events]
    positions = [p for column in columns for p in column.columns["position"].tolist()]
    assert positions == list(range(45_000))
    assert columns[0].events()[0].name == "op0"
    balances = [n for n, r in enumerate(reports) if r.iterations]
    assert balances == [max(n for n, r in enumerate(reports) if r.events)]


def test_unanswered_report_is_sent_again_under_its_number(coordinator, reporter):
    """A connection that breaks costs a repetition, which the number gives away, and no report."""
    coordinator.faults = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE]
    coordinator.start()
    reporter.iteration(IterationStatus("job", "s", 3, 5, True))
    assert reporter.flush(WAIT_S) == 0
    told = [r for r in coordinator.reports if r.iterations]
    assert len(told) == 3
    assert len({r.SerializeToString(deterministic=True) for r in told}) == 1
    assert reporter.findings() == []


def test_refused_report_is_counted_and_does_not_block_the_next(coordinator, reporter):
    """What a coordinator refuses for good is given up by number; what follows arrives."""
    coordinator.faults = [grpc.StatusCode.INVALID_ARGUMENT]
    coordinator.start()
    reporter.events(SOURCE, events(10))
    assert reporter.flush(WAIT_S) == 0
    reporter.iteration(IterationStatus("job", "s", 3, 6, True))
    assert reporter.flush(WAIT_S) == 0
    assert coordinator.reports[-1].iterations[0].iteration == 6
    assert reporter.findings() == ["10 events never reached the coordinator"]


def test_memory_for_an_absent_coordinator_is_bounded(reporter, monkeypatch):
    """While nobody listens, what exceeds the bounds is dropped and counted."""
    monkeypatch.setattr(report, "MAX_HELD_EVENTS", 100)
    monkeypatch.setattr(report, "MAX_HELD_NEWS", 3)
    for _ in range(3):
        reporter.events(SOURCE, events(60))
    threads = [threading.Thread(target=reporter.session, args=(SESSION, "/d")) for _ in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "120 events never reached the coordinator" in reporter.findings()
    assert any(f.endswith("states never reached the coordinator") for f in reporter.findings())
    assert reporter.flush(0) > 0


def test_without_a_coordinator_nothing_is_kept():
    """No address, no thread, no memory."""
    reporter = Reporter("", Load)
    reporter.start()
    reporter.session(SESSION, "/dump")
    reporter.events(SOURCE, events(10))
    assert reporter.flush(0) == 0
    reporter.stop()

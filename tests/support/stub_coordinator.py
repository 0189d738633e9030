"""Coordinator that stores every message, and fails on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc

from rankdump._core.events import EventColumns
from rankdump._wire.metadata_messages import events_from_wire
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

Request = coordinator_pb2.ReportRequest


class StubCoordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """Keeps every message with items; acknowledges all of them unless it holds back."""

    def __init__(self, folder: Path) -> None:
        self.address = f"unix:{folder}/c.sock"
        self.changed = threading.Condition()
        self.greetings: list[Request] = []
        self.reports: list[Request] = []
        self.columns: list[tuple[str, int, EventColumns]] = []
        """Session and number of the message with every batch."""
        self.received: dict[str, int] = {}
        self.acknowledged: dict[str, int] = {}
        self.holds_back = False
        """Say that items have arrived and not that they are safe."""
        self.silent = False
        """Answer greetings only."""
        self.fault: Callable[[Request], grpc.StatusCode | None] = lambda request: None
        self.heard: list[tuple[str, int]] = []
        """Sessions, and up to when each is known; sent ones."""
        self.warnings: list[tuple[str, str]] = []
        self.freezes: list[coordinator_pb2.RelayedFreeze] = []
        """Sent with each answer."""
        self.reported: list[Request] = []
        """Requests with freezes or steps."""
        self.ahead_us = 0
        self.asked = 0
        self.unanswered = 0
        self._server: grpc.Server | None = None

    def Report(self, request_iterator, context) -> Iterator[coordinator_pb2.ReportResponse]:  # noqa: N802 - the generated base class's name
        texts = [""]
        for number, request in enumerate(request_iterator):
            code = self.fault(request)
            if code:
                context.abort(code, "failing on purpose")
            with self.changed:
                self._take(request, texts, greeting=number == 0)
                self.changed.notify_all()
                while self.silent and number and context.is_active():
                    self.changed.wait(0.01)
            yield self._answer(request.agent_id)

    def _take(self, request: Request, texts: list[str], *, greeting: bool) -> None:
        if greeting:
            assert not request.sequence
            assert not request.texts.texts
            self.greetings.append(request)
            return
        if request.HasField("texts"):
            assert request.texts.first in (0, len(texts))
            del texts[request.texts.first :]
            texts += request.texts.texts
            assert texts[0] == ""
        if request.freezes or request.steps:
            self.reported.append(request)
        self.heard += [(each.session_id, each.until_us) for each in request.heard]
        if not request.sequence:
            return
        self.reports.append(request)
        agent = request.agent_id
        if request.sequence <= self.received.get(agent, 0):
            return
        self.received[agent] = request.sequence
        if not self.holds_back:
            self.acknowledged[agent] = request.sequence
        for each in request.events:
            assert not each.columns.names
            columns = events_from_wire(each.columns, tuple(texts))
            self.columns.append((each.session_id, request.sequence, columns))

    def _answer(self, agent: str) -> coordinator_pb2.ReportResponse:
        return coordinator_pb2.ReportResponse(
            acknowledged_sequence=self.acknowledged.get(agent, 0),
            received_sequence=self.received.get(agent, 0),
            warnings=[
                coordinator_pb2.JobWarning(job_id=job, text=text) for job, text in self.warnings
            ],
            freezes=self.freezes,
        )

    def Clock(self, request, context) -> coordinator_pb2.ClockResponse:  # noqa: N802 - as above
        self.asked += 1
        now_us = time.time_ns() // 1000 + self.ahead_us
        return coordinator_pb2.ClockResponse(received_us=now_us, sent_us=now_us)

    def Status(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Order(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Hints(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def Control(self, request, context):  # noqa: N802 - as above
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "")

    def positions(self, session_id: str) -> list[int]:
        """Return the positions of all events of a session, as they came."""
        mine = [columns for session, _, columns in self.columns if session == session_id]
        return [p for columns in mine for p in columns.columns["position"].tolist()]

    def wait(self, holds: Callable[[], object], timeout_s: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, timeout_s), "nobody reports"

    def forget(self) -> None:
        """Lose everything, as a new coordinator."""
        with self.changed:
            self.received, self.acknowledged = {}, {}
            self.reports, self.columns, self.greetings = [], [], []

    def start(self) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def stop(self) -> None:
        if self._server:
            self._server.stop(0).wait()
            self._server = None

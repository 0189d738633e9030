"""What the coordinator is told, in numbered reports from a thread of its own; holds nobody up."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import grpc

from rankdump.contract.errors import ProtocolError, UnavailableError
from rankdump.contract.events import EventColumns
from rankdump.contract.status import IterationStatus, Load, RankEvents, SessionStatus
from rankdump.wire import views
from rankdump.wire.errors import error_of
from rankdump.wire.events import events_to_wire
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc

MAX_HELD_EVENTS = 4_000_000
MAX_HELD_NEWS = 100_000
MAX_NEWS_PER_REPORT = 1_000
# A message of this many events stays well under what a server takes.
MAX_EVENTS_PER_REPORT = 20_000
HEARTBEAT_S = 5.0
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 5.0

_log = logging.getLogger(__name__)
_Requests: TypeAlias = "queue.SimpleQueue[coordinator_pb2.ReportRequest | None]"


@dataclass(frozen=True, slots=True)
class _SessionNews:
    """How a session stands, and the root of its tree."""

    status: SessionStatus
    root: str


_News: TypeAlias = "_SessionNews | IterationStatus | tuple[RankEvents, EventColumns]"


class Reporter:
    """Keeps what is not yet acknowledged, within bounds; without an address it keeps nothing."""

    def __init__(self, address: str, load: Callable[[], Load]) -> None:
        self._address = address
        self._load = load
        # A restarted agent counts from one again: it has to be another one to the coordinator.
        self._agent_id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._changed = threading.Condition()
        # One row for all: an iteration may be called complete only after its events.
        self._news: deque[_News] = deque()
        self._held_events = 0
        self._lost_events = 0
        self._lost_states = 0
        self._sequence = 0
        self._pending: coordinator_pb2.ReportRequest | None = None
        self._call: grpc.Call | None = None
        self._said = ""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def findings(self) -> list[str]:
        """Return what was dropped because the coordinator did not take it."""
        lost = {"events": self._lost_events, "states": self._lost_states}
        return [f"{n} {what} never reached the coordinator" for what, n in lost.items() if n]

    def session(self, status: SessionStatus, root: str) -> None:
        """Report how a session stands, and where its tree is."""
        self._offer(_SessionNews(status, root))

    def iteration(self, status: IterationStatus) -> None:
        """Report the balance of an iteration, after everything reported before."""
        self._offer(status)

    def events(self, source: RankEvents, columns: EventColumns) -> None:
        """Report what a rank executed; dropped and counted when too much is held already."""
        if not self._address:
            return
        with self._changed:
            if self._held_events + len(columns) > MAX_HELD_EVENTS:
                self._lost_events += len(columns)
                return
            self._held_events += len(columns)
            self._news.extend((source, piece) for piece in _pieces(columns))
            self._changed.notify_all()

    def _offer(self, state: _SessionNews | IterationStatus) -> None:
        if not self._address:
            return
        with self._changed:
            if len(self._news) >= MAX_HELD_NEWS:
                self._lost_states += 1
                return
            self._news.append(state)
            self._changed.notify_all()

    def start(self) -> None:
        """Begin to report."""
        if self._address:
            self._thread = threading.Thread(target=self._run, name="rankdumpd-reporter")
            self._thread.start()

    def flush(self, timeout_s: float) -> int:
        """Wait until everything is acknowledged; return the parts that are not."""
        with self._changed:
            self._changed.wait_for(lambda: self._left() == 0, timeout_s)
            return self._left()

    def stop(self) -> None:
        """End at once; may be repeated."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            if self._call:
                self._call.cancel()
        if self._thread:
            self._thread.join()
            self._thread = None

    def _left(self) -> int:
        return len(self._news) + (self._pending is not None)

    def _run(self) -> None:
        retry_s = FIRST_RETRY_S
        with self._changed:
            # Nobody needs to be there before there is something to tell.
            self._changed.wait_for(lambda: self._stopping or self._left() > 0)
        while not self._stopping:
            acknowledged = self._sequence if self._pending is None else self._sequence - 1
            try:
                self._converse()
            except grpc.RpcError as failure:
                self._judge(failure)
            except Exception:
                _log.exception("a report to %s failed", self._address)
            went_on = self._sequence - (self._pending is not None) > acknowledged
            retry_s = FIRST_RETRY_S if went_on else min(2 * retry_s, LAST_RETRY_S)
            with self._changed:
                self._changed.wait_for(lambda: self._stopping, retry_s)

    def _judge(self, failure: grpc.RpcError) -> None:
        error = error_of(failure)
        if isinstance(error, UnavailableError):
            # Said when it changes: it is tried again every few seconds.
            if str(error) != self._said:
                self._said = str(error)
                _log.warning("coordinator %s: %s", self._address, error)
            return
        # The same report would fail the same way for ever, and everything behind it with it.
        _log.error("coordinator %s refuses report %d: %s", self._address, self._sequence, error)
        with self._changed:
            pending, self._pending = self._pending, None
            if pending:
                self._lost_events += sum(e.columns.count for e in pending.events)
                self._lost_states += len(pending.sessions) + len(pending.iterations)
            self._changed.notify_all()

    def _converse(self) -> None:
        requests: _Requests = queue.SimpleQueue()
        with grpc.insecure_channel(self._address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            answers = stub.Report(iter(requests.get, None))
            with self._changed:
                self._call = answers
            try:
                self._exchange(requests, answers)
            finally:
                with self._changed:
                    self._call = None
                requests.put(None)
                answers.cancel()

    def _exchange(
        self, requests: _Requests, answers: Iterator[coordinator_pb2.ReportResponse]
    ) -> None:
        while (report := self._next()) is not None:
            requests.put(report)
            answer = next(answers, None)
            if answer is None:
                return
            if answer.acknowledged_sequence < report.sequence:
                raise ProtocolError(
                    f"report {report.sequence} answered with {answer.acknowledged_sequence}"
                )
            with self._changed:
                self._pending = None
                self._changed.notify_all()

    def _next(self) -> coordinator_pb2.ReportRequest | None:
        """Wait for news, or for the next heartbeat; None when it is time to stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._left() > 0, HEARTBEAT_S)
        load = self._load()
        with self._changed:
            if self._stopping:
                return None
            if self._pending is None:
                self._pending = self._gathered(load)
            return self._pending

    def _gathered(self, load: Load) -> coordinator_pb2.ReportRequest:
        self._sequence += 1
        report = coordinator_pb2.ReportRequest(
            agent_id=self._agent_id, sequence=self._sequence, load=views.load_to_wire(load)
        )
        events = 0
        for _ in range(MAX_NEWS_PER_REPORT):
            if not self._news:
                break
            news = self._news[0]
            size = len(news[1]) if isinstance(news, tuple) else 0
            if events + size > MAX_EVENTS_PER_REPORT:
                break
            events += size
            _add(report, self._news.popleft())
        self._held_events -= events
        return report


def _add(report: coordinator_pb2.ReportRequest, news: _News) -> None:
    if isinstance(news, _SessionNews):
        report.sessions.append(views.session_to_wire(news.status))
        report.roots[news.status.job_id] = news.root
    elif isinstance(news, IterationStatus):
        report.iterations.append(views.iteration_to_wire(news))
    else:
        source, columns = news
        wire = events_to_wire(columns)
        report.events.add(job_id=source.job_id, rank=source.rank, columns=wire)


def _pieces(columns: EventColumns) -> Iterator[EventColumns]:
    for start in range(0, len(columns), MAX_EVENTS_PER_REPORT):
        stop = start + MAX_EVENTS_PER_REPORT
        part = {field: column[start:stop] for field, column in columns.columns.items()}
        yield EventColumns(columns.names, columns.groups, part)

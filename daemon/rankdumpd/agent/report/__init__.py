"""What the coordinator is told, from the ledger's log; a thread of its own, it holds nobody up."""

from __future__ import annotations

import logging
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable

import grpc

from rankdump.contract.errors import (
    ConfigError,
    DamagedError,
    ForbiddenError,
    RankdumpError,
    RetryableError,
    UnavailableError,
)
from rankdump.contract.status import ClockEstimate, Load, SessionStatus
from rankdump.wire import views
from rankdump.wire.causes import explained
from rankdump.wire.channel import Credentials, connect
from rankdump.wire.errors import error_of
from rankdump.wire.fields import common
from rankdump.wire.v1 import coordinator_pb2, coordinator_pb2_grpc
from rankdumpd import machine
from rankdumpd.agent.report.hearing import Hearing
from rankdumpd.agent.report.outage import LAST_TRY_S, Outage, hopeless, undelivered
from rankdumpd.agent.report.ports import Log, Times
from rankdumpd.agent.report.stream import Conversation
from rankdumpd.agent.report.timing import Timing
from rankdumpd.agent.values import QuietRank
from rankdumpd.logs import about

MAX_WARNINGS = 256

_log = logging.getLogger(__name__)


class Reporter:
    """Tells what stands in the log until the coordinator has it; without an address, nothing."""

    def __init__(
        self,
        address: str,
        log: Log,
        *,
        load: Callable[[], Load],
        warn: Callable[[str, str], None],
        tell_again: Callable[[], None],
        quiet: Callable[[], Iterable[QuietRank]] = tuple,
        credentials: Credentials | None = None,
        times: Times | None = None,
    ) -> None:
        """Call `warn` with a job and a text, `tell_again` when the coordinator forgot sessions.

        `quiet` returns the ranks of which nothing is under way.
        """
        self._address, self._log = address, log
        self._load, self._warn, self._tell_again = load, warn, tell_again
        self._credentials = credentials
        self._agent_id = log.agent_id()
        self._host_id = machine.host_id()
        self._times = times or Times()
        self._timing = Timing(self._times)
        self._hearing = Hearing(quiet)
        self._changed = threading.Condition()
        self._conversation: Conversation | None = None
        self._call: grpc.Call | None = None
        self._received = self._careful_to = self._woken_to = 0
        self._warnings: dict[tuple[str, str], None] = {}
        self._figures = (0, 0)
        self._unentered = 0
        self._outage: Outage | None = None
        self._failures = 0
        self._again = False
        """Try now: somebody waits for it."""
        self._said = ""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def findings(self) -> list[str]:
        """Return what the coordinator does not take at present, and what was given up so."""
        events, states = self._log.lost()
        lost = {"events": events, "states": states + self._unentered}
        outage = self._outage
        waits = outage is not None and outage.worth_saying(self._now_s())
        return [
            *([self._undelivered(outage)] if outage and waits else []),
            *(f"{n} {what} never reached the coordinator" for what, n in lost.items() if n),
        ]

    def events(self) -> tuple[int, int]:
        """Return how many events wait to be told, and how many were given up."""
        return self._log.waiting(self._received)[1], self._log.lost()[0]

    def session(self, status: SessionStatus, root: str) -> None:
        """Report how a session stands, and where its tree is."""
        if not self._address:
            return
        try:
            self._log.enter_session(status, root)
        except sqlite3.Error as error:
            # The rank is not to blame, and the next state of the session says it again.
            self._unentered += 1
            _log.error(
                "session %s is not reported: %s", status.session_id, error, extra=about(status)
            )
        self.wake()

    def warnings(self, job_id: str) -> list[str]:
        """Return what the ranks of a job should say in their logs."""
        with self._changed:
            return [text for job, text in self._warnings if job == job_id]

    def wake(self) -> None:
        """Look into the log if something was entered."""
        if self._address and self._log.newest != self._woken_to:
            self._woken_to = self._log.newest
            with self._changed:
                if self._conversation:
                    self._conversation.wake()
                self._changed.notify_all()

    def start(self) -> None:
        """Begin to report."""
        if self._address:
            self._thread = threading.Thread(target=self._run, name="rankdumpd-reporter")
            self._thread.start()

    def fault(self) -> str:
        """Say that the thread has died."""
        thread = self._thread
        alive = thread is None or thread.is_alive()
        return "" if alive else "the thread that reports to the coordinator is dead"

    def flush(self, timeout_s: float) -> int:
        """Wait until everything has arrived; return the items that have not.

        A coordinator that does not answer is tried once more, and not waited for.
        """
        if not self._address:
            return 0
        with self._changed:
            failures, self._again = self._failures, True
            self._changed.notify_all()
            if self._outage:
                timeout_s = min(timeout_s, LAST_TRY_S)
            self._changed.wait_for(lambda: self._flushed(failures), timeout_s)
            return self._left()

    def leave(self, folder: str) -> None:
        """Say what stays in the ledger for the next agent of its folder."""
        items = self._left() if self._address else 0
        if items:
            outage = self._outage
            waits = f"messages waiting: {items:,}"
            said = self._undelivered(outage) if outage else waits
            _log.warning("%s; they stay in %s until an agent starts there again", said, folder)

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
        return self._log.waiting(self._received)[0]

    def _flushed(self, failures: int) -> bool:
        tried = self._failures > failures
        return self._left() == 0 or hopeless(self._outage, now_s=self._now_s(), tried=tried)

    def _now_s(self) -> float:
        return self._times.now().wall_us / 1e6

    def _undelivered(self, outage: Outage) -> str:
        items, events = self._log.waiting(self._received)
        return undelivered(self._address, outage, items=items, events=events)

    def _run(self) -> None:
        retry_s = self._times.first_retry_s
        while not self._stopping:
            received, careful_to = self._received, self._careful_to
            try:
                self._knock()
                self._converse()
            except (grpc.RpcError, RankdumpError) as failure:
                self._judge(failure)
            except Exception:
                _log.exception("a report to %s failed", self._address)
            went_on = (self._received, self._careful_to) != (received, careful_to)
            retry_s = (
                self._times.first_retry_s if went_on else min(2 * retry_s, self._times.last_retry_s)
            )
            with self._changed:
                self._failures += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping or self._again, retry_s)
                self._again = False

    def _knock(self) -> None:
        """See that the coordinator is there, and wait until there is something to tell."""
        with self._changed:
            if self._received or self._left():
                return
        with connect(self._address, self._credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            asked = coordinator_pb2.ClockRequest()
            self._call = call = stub.Clock.future(asked, timeout=self._times.knock_s)
            with self._changed:
                if self._stopping:
                    call.cancel()
            try:
                call.result()
            except grpc.FutureCancelledError:
                return
        with self._changed:
            self._call = None
            self._reached()
            self._changed.wait_for(lambda: self._stopping or self._left() > 0)

    def _converse(self) -> None:
        if self._stopping:
            return
        with connect(self._address, self._credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            conversation = Conversation(
                self._log,
                self._changed,
                times=self._times,
                careful_to=self._careful_to,
                prepared=lambda request, told: self._prepare(request, told, stub),
                overdue=self._break_off,
            )
            self._timing.reconnected()
            self._hearing.begin()
            answers = stub.Report(conversation.requests())
            with self._changed:
                self._conversation, self._call = conversation, answers
                if self._stopping:
                    answers.cancel()
            try:
                for number, answer in enumerate(answers):
                    self._take(conversation, answer, greeting=number == 0)
                if conversation.unread:
                    first, last = conversation.unread
                    raise DamagedError(f"items {first} to {last} of the log cannot be read")
            finally:
                with self._changed:
                    self._call = None
                answers.cancel()
                conversation.end()

    def _break_off(self) -> None:
        with self._changed:
            if self._call:
                self._call.cancel()

    def _take(
        self,
        conversation: Conversation,
        answer: coordinator_pb2.ReportResponse,
        *,
        greeting: bool,
    ) -> None:
        if greeting and answer.acknowledged_sequence < self._log.acknowledged_to():
            self._tell_again()
        conversation.take(answer)
        with self._changed:
            self._received = conversation.received
            self._reached()
            given = dict.fromkeys((each.job_id, each.text) for each in answer.warnings)
            new = [each for each in given if each not in self._warnings]
            self._warnings.update(dict.fromkeys(new))
            for earliest in list(self._warnings)[: len(self._warnings) - MAX_WARNINGS]:
                del self._warnings[earliest]
            self._changed.notify_all()
        for job_id, text in new:
            self._warn(job_id, text)

    def _reached(self) -> None:
        outage, self._outage = self._outage, None
        if self._said and outage:
            away_s = self._now_s() - outage.since_s
            _log.info("coordinator %s takes reports again, after %.0f s", self._address, away_s)
        self._said = ""

    def _prepare(
        self,
        request: coordinator_pb2.ReportRequest,
        told: int | None,
        stub: coordinator_pb2_grpc.CoordinatorServiceStub,
    ) -> None:
        """Say who reports, and how this host stands; what costs something, once a second."""
        if told is not None:
            if self._timing.keep_up(stub):
                self._figures = (self._log.waiting(self._received)[1], self._log.lost()[0])
                self._hearing.look(now_us=self._times.now().wall_us, newest=self._log.last)
            heard, until_us = self._hearing.told_to(told)
            for each in heard:
                about = {"job_id": each.job_id, "rank": each.rank, "session_id": each.session_id}
                request.heard.add(until_us=until_us, **about)
        request.agent_id = self._agent_id
        request.host, request.host_id = socket.gethostname(), self._host_id
        request.load.CopyFrom(views.load_to_wire(self._load()))
        clock = common(self._timing.estimate(), ClockEstimate)
        request.clock.CopyFrom(coordinator_pb2.ClockEstimate(**clock))
        request.held_events, request.lost_events = self._figures

    def _judge(self, failure: grpc.RpcError | RankdumpError) -> None:
        """Give up the item that is refused or damaged: it would fail the same way for ever."""
        error = error_of(failure) if isinstance(failure, grpc.RpcError) else failure
        if isinstance(error, UnavailableError):
            error = explained(error, self._address, self._credentials)
        spans = self._conversation.unanswered() if self._conversation else []
        # A certificate that is not believed says nothing about the item.
        passes = isinstance(error, UnavailableError | ForbiddenError | ConfigError)
        refused = not passes and bool(spans)
        if not refused:
            self._note(error)
            return
        if str(error) != self._said and not self._stopping:
            self._said = str(error)
            _log.error("coordinator %s: %s", self._address, error)
        first, last = spans[0]
        if len(spans) == 1 and first == last:
            self._log.give_up(first, last)
        # Which one of several it was shows when each comes alone.
        self._careful_to = max(self._careful_to, spans[-1][1])

    def _note(self, error: RankdumpError) -> None:
        """Remember that nothing is delivered, and say so when that is news."""
        now_s, before = self._now_s(), self._outage
        outage = Outage(
            since_s=before.since_s if before else now_s,
            reason=str(error),
            refused=not isinstance(error, RetryableError),
        )
        self._outage = outage
        if outage.reason != self._said and outage.worth_saying(now_s) and not self._stopping:
            self._said = outage.reason
            _log.warning("%s", self._undelivered(outage))

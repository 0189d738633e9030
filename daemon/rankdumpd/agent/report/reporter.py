"""The reporter thread: sends the report log to the coordinator, and tracks outages, quiet ranks and
the coordinator's clock. It never blocks the agent; without an address it reports nothing.
"""

from __future__ import annotations

import datetime
import logging
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import grpc

from rankdump._core.backoff import RetryBackoff
from rankdump._core.black_box import RankStep
from rankdump._core.freeze_record import JobFreeze, RelayedFreeze
from rankdump._core.job_control import ControlOrder
from rankdump._core.status import AgentLoad, ClockEstimate, SessionStatus
from rankdump._wire import status_messages
from rankdump._wire.black_box_messages import (
    is_known_freeze,
    job_freeze_to_wire,
    rank_step_to_wire,
    relayed_freeze_from_wire,
)
from rankdump._wire.channel import TlsCredentials, explain_failure, open_channel
from rankdump._wire.control_messages import answer_to_wire, order_from_wire
from rankdump._wire.message_fields import make_fields
from rankdump.errors import (
    ConfigError,
    CorruptedError,
    ExhaustedError,
    ForbiddenError,
    ProtocolError,
    RankdumpError,
    RetryableError,
    UnavailableError,
)
from rankdump.wire.v1 import control_pb2, coordinator_pb2, coordinator_pb2_grpc
from rankdumpd.agent.ledger.report_log import ReportLog
from rankdumpd.agent.records import QuietRank
from rankdumpd.agent.report.report_stream import (
    ClockInstant,
    ClockSample,
    ClockWindow,
    ReporterTimes,
    ReportStream,
)
from rankdumpd.agent.session.order_relay import OrderRelay
from rankdumpd.server import machine
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import log_about

WARN_AFTER_S = 2.0
"""Seconds before an outage is logged, because a coordinator may be started together with its
agents.
"""
LAST_TRY_TIMEOUT_S = 2.0
"""Timeout in seconds of the last attempt, at a stop, to reach a coordinator that does
not answer.
"""


@dataclass(frozen=True, slots=True)
class CoordinatorOutage:
    """A period in which no report is delivered."""

    since_s: float
    """Time of the first attempt that failed, in seconds since the epoch."""
    reason: str
    refused: bool
    """Whether the coordinator rejects this agent, or local files are invalid."""
    is_local: bool = False
    """Whether the cause is this agent, which cannot enter the coordinator's answers in
    its ledger.
    """

    def is_worth_logging(self, now_s: float) -> bool:
        """Return whether the outage has lasted long enough to be logged."""
        return self.refused or now_s - self.since_s >= WARN_AFTER_S


def describe_outage(address: str, outage: CoordinatorOutage, *, items: int, events: int) -> str:
    """Return a sentence with the number of undelivered messages, and the start and cause of an
    outage.
    """
    since = datetime.datetime.fromtimestamp(outage.since_s).strftime("%Y-%m-%d %H:%M:%S")
    waits = f"messages waiting: {items:,}, with events: {events:,}"
    wait = waits if items else "no messages are waiting"
    verb = "has rejected this agent" if outage.refused else "has been unreachable"
    verb = "has been sent the same messages again and again" if outage.is_local else verb
    return f"coordinator {address} {verb} since {since}: {outage.reason}; {wait}"


def is_hopeless(outage: CoordinatorOutage | None, *, now_s: float, tried: bool) -> bool:
    """Return whether waiting longer is useless; `tried` says that an attempt was made since the
    wait began.
    """
    return outage is not None and tried and outage.is_worth_logging(now_s)


REPORT_DELAY_US = 2_000_000
"""Longest time, in microseconds, after which a rank reports a call that has begun and not ended."""


class QuietRankTracker:
    """Finds ranks without frames in flight; for one thread at a time. The clock is an argument."""

    def __init__(self, quiet: Callable[[], Iterable[QuietRank]]) -> None:
        self._quiet = quiet
        self._previous: frozenset[QuietRank] = frozenset()
        self._confirmed: tuple[QuietRank, ...] = ()
        self._until_us = self._newest = 0

    def begin(self) -> None:
        """Begin with a new stream; ranks that were quiet in an earlier stream are forgotten."""
        self._previous, self._confirmed = frozenset(), ()

    def update(self, *, now_us: int, newest: Callable[[], int]) -> None:
        """Find the ranks that were quiet at this check and at the one before.

        One check is not enough, because the next frame may be about to arrive. `newest` returns the
        last number of the log.
        """
        quiet = frozenset(self._quiet())
        self._confirmed = tuple(quiet & self._previous)
        # Read after the check, so that the log up to this number has everything that quiet ranks
        # have sent.
        self._previous, self._newest = quiet, newest()
        self._until_us = now_us - REPORT_DELAY_US

    def pop_quiet_ranks(self, number: int) -> tuple[tuple[QuietRank, ...], int]:
        """Return the quiet ranks, each once, and the time until which they were quiet; none before
        the log is sent up to the time of the check.
        """
        if number < self._newest:
            return (), 0
        found, self._confirmed = self._confirmed, ()
        return found, self._until_us


FIRST_SAMPLES = 8


class ClockEstimator:
    """Estimates the clock offset over all connections of a reporter; for one thread at a time."""

    def __init__(self, times: ReporterTimes) -> None:
        self._times = times
        self._window = ClockWindow()
        self._asked: ClockInstant | None = None

    def reconnected(self) -> None:
        """Discard all samples, because after a reconnect another coordinator may answer."""
        self._window = ClockWindow(steps=self._window.steps, last=self._window.last)
        self._asked = None

    def keep_up(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub) -> bool:
        """Take a sample if one is due; return whether one was taken."""
        now = self._times.now()
        known, self._window = self._window, self._window.at(now)
        if self._asked is None or self._window.steps != known.steps:
            self._take_samples(stub, FIRST_SAMPLES)
        elif now.monotonic_us - self._asked.monotonic_us >= self._times.heartbeat_s * 1e6:
            self._take_samples(stub, 1)
        else:
            return False
        return True

    def estimate(self) -> ClockEstimate:
        """Return the present estimate of the clock offset."""
        return self._window.estimate(self._times.now())

    def _take_samples(self, stub: coordinator_pb2_grpc.CoordinatorServiceStub, count: int) -> None:
        for _ in range(count):
            self._asked = sent = self._times.now()
            try:
                answer = stub.Clock(coordinator_pb2.ClockRequest(), timeout=self._times.clock_s)
            except grpc.RpcError:
                # A failed sample is ignored, because reports do not depend on the clock.
                return
            back = self._times.now()
            sample = ClockSample(sent, answer.received_us, answer.sent_us, back)
            self._window = self._window.with_sample(sample)


def _read_orders(messages: Iterable[control_pb2.ControlOrder]) -> Iterator[ControlOrder]:
    """Yield the orders that this release knows; the coordinator reports the ranks of
    other orders.
    """
    for message in messages:
        try:
            yield order_from_wire(message)
        except ProtocolError as error:
            _logger.warning("an order of the coordinator cannot be read: %s", error)


MAX_WARNINGS = 256

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlackBoxReports:
    """Callbacks between the reporter and the black box of the agent."""

    list_freezes: Callable[[], Iterable[JobFreeze]]
    """Returns the freezes that the next request contains."""
    pop_steps: Callable[[], Iterable[RankStep]]
    """Returns finished steps, at most one of each rank; called with each heartbeat."""
    join_freeze: Callable[[RelayedFreeze], None]
    """Takes a freeze that the coordinator relays; called again for each answer that repeats it."""


class CoordinatorReporter:
    """Sends the items of the log until the coordinator has stored them; without an address,
    nothing.
    """

    def __init__(
        self,
        address: str,
        log: ReportLog,
        *,
        load: Callable[[], AgentLoad],
        warn: Callable[[str, str], None],
        on_forgotten: Callable[[], None],
        quiet: Callable[[], Iterable[QuietRank]],
        orders: OrderRelay,
        black_box: BlackBoxReports,
        credentials: TlsCredentials | None = None,
        times: ReporterTimes | None = None,
    ) -> None:
        """`warn` is called with a job and a text, `on_forgotten` when the coordinator has lost its
        sessions.

        `quiet` returns the ranks without frames in flight; `orders` relays the coordinator's
        orders.
        """
        self._address, self._log = address, log
        self._load, self._warn, self._on_forgotten = load, warn, on_forgotten
        self._orders, self._black_box, self._credentials = orders, black_box, credentials
        self._agent_id = log.agent_id()
        self._host_id = machine.read_host_id()
        self._times = times or ReporterTimes()
        self._clock = ClockEstimator(self._times)
        self._quiet_ranks = QuietRankTracker(quiet)
        self._changed = threading.Condition()
        self._stream: ReportStream | None = None
        self._call: grpc.Call | None = None
        self._received = self._careful_to = self._woken_to = 0
        self._warnings: dict[tuple[str, str], None] = {}
        self._event_counts = (0, 0)
        self._unentered = 0
        self._outage: CoordinatorOutage | None = None
        self._failures = 0
        self._retry_now = False
        """Whether to retry at once, because `flush` waits for it."""
        self._logged = ""
        self.thread = BackgroundThread(self._run, "rankdumpd-reporter", daemon=False)

    def findings(self) -> list[str]:
        """Return a finding for an outage, and one for items that were dropped."""
        events, states = self._log.lost()
        lost = {"events": events, "states": states + self._unentered}
        outage = self._outage
        waits = outage is not None and outage.is_worth_logging(self._read_clock_s())
        return [
            *([self._describe_outage(outage)] if outage and waits else []),
            *(f"{n} {what} never reached the coordinator" for what, n in lost.items() if n),
        ]

    def events(self) -> tuple[int, int]:
        """Return how many events wait to be sent, and how many were dropped."""
        return self._log.waiting(self._received)[1], self._log.lost()[0]

    def session(self, status: SessionStatus, root: str) -> None:
        """Report the status of a session and the root of its tree."""
        if not self._address:
            return
        try:
            self._log.enter_session(status, root)
        except sqlite3.Error as error:
            # The rank is not at fault; the next status of the session is reported again.
            self._unentered += 1
            log_about(_logger, status).error(
                "session %s is not reported: %s", status.session_id, error
            )
        self.wake()

    def warnings(self, job_id: str) -> list[str]:
        """Return the warnings that the ranks of a job should log."""
        with self._changed:
            return [text for job, text in self._warnings if job == job_id]

    def wake(self) -> None:
        """Wake the reporter thread if an item was entered in the log."""
        if self._address and self._log.newest != self._woken_to:
            self._woken_to = self._log.newest
            with self._changed:
                if self._stream:
                    self._stream.wake()
                self._changed.notify_all()

    def report_soon(self) -> None:
        """Send the next message at once, even if no item waits for it."""
        with self._changed:
            if self._stream:
                self._stream.wake()

    def start(self) -> None:
        """Start the reporter thread."""
        if self._address:
            self.thread.start()

    def flush(self, timeout_s: float) -> int:
        """Wait until all items are delivered; return how many are not.

        If the coordinator does not answer, one more attempt is made, without waiting any longer.
        """
        if not self._address:
            return 0
        with self._changed:
            failures, self._retry_now = self._failures, True
            self._changed.notify_all()
            if self._outage:
                timeout_s = min(timeout_s, LAST_TRY_TIMEOUT_S)
            self._changed.wait_for(lambda: self._is_flushed(failures), timeout_s)
            return self._count_waiting()

    @property
    def finished_count(self) -> int:
        """Number up to which the coordinator has received all items."""
        return self._received

    def leave(self, folder: str) -> None:
        """Log how many items stay in the ledger for the next agent; without a folder, no item
        stays.
        """
        items = self._count_waiting() if self._address else 0
        if items:
            outage = self._outage
            waits = f"messages waiting: {items:,}"
            message = self._describe_outage(outage) if outage else waits
            stay = f"they stay in {folder} until an agent starts there again"
            _logger.warning("%s; %s", message, stay if folder else "they are lost")

    def stop(self) -> None:
        """Stop the thread at once; may be repeated."""
        with self._changed:
            self.thread.request_stop()
            self._changed.notify_all()
            if self._call:
                self._call.cancel()
        self.thread.join()

    def _count_waiting(self) -> int:
        return self._log.waiting(self._received)[0]

    def _is_flushed(self, failures: int) -> bool:
        tried = self._failures > failures
        return self._count_waiting() == 0 or is_hopeless(
            self._outage, now_s=self._read_clock_s(), tried=tried
        )

    def _read_clock_s(self) -> float:
        return self._times.now().wall_us / 1e6

    def _describe_outage(self, outage: CoordinatorOutage) -> str:
        items, events = self._log.waiting(self._received)
        return describe_outage(self._address, outage, items=items, events=events)

    def _run(self) -> None:
        backoff = RetryBackoff(self._times.first_retry_s, self._times.last_retry_s)
        while not self.thread.is_stopping:
            received, careful_to = self._received, self._careful_to
            try:
                self._wait_for_reports()
                self._report()
            except (grpc.RpcError, RankdumpError) as failure:
                self._handle_failure(failure)
            except sqlite3.OperationalError as error:
                why = f"the ledger cannot be written: {error}"
                self._note_outage(ExhaustedError(why), is_local=True)
            except Exception:
                _logger.exception("a report to coordinator %s failed", self._address)
            if (self._received, self._careful_to) != (received, careful_to):
                backoff.reset()
            pause_s = backoff.next_pause_s()
            with self._changed:
                self._failures += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: self.thread.is_stopping or self._retry_now, pause_s)
                self._retry_now = False

    def _wait_for_reports(self) -> None:
        """Check that the coordinator is reachable, and wait until there is something to report."""
        with self._changed:
            if self._received or self._count_waiting():
                return
        with open_channel(self._address, self._credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            asked = coordinator_pb2.ClockRequest()
            self._call = call = stub.Clock.future(asked, timeout=self._times.probe_s)
            with self._changed:
                if self.thread.is_stopping:
                    call.cancel()
            try:
                call.result()
            except grpc.FutureCancelledError:
                return
        with self._changed:
            self._call = None
            self._note_reachable()
            self._changed.wait_for(lambda: self.thread.is_stopping or self._count_waiting() > 0)

    def _report(self) -> None:
        if self.thread.is_stopping:
            return
        with open_channel(self._address, self._credentials) as channel:
            stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
            stream = ReportStream(
                self._log,
                self._changed,
                times=self._times,
                careful_to=self._careful_to,
                complete=lambda request, sent_to: self._complete_request(request, sent_to, stub),
                on_overdue=self._break_off,
                is_hurried=lambda: self._orders.is_busy,
            )
            self._clock.reconnected()
            self._quiet_ranks.begin()
            # Answers of ranks to an earlier coordinator are outdated.
            self._orders.take_orders(())
            answers = stub.Report(stream.requests())
            with self._changed:
                self._stream, self._call = stream, answers
                if self.thread.is_stopping:
                    answers.cancel()
            try:
                for number, answer in enumerate(answers):
                    self._handle_answer(stream, answer, greeting=number == 0)
                if stream.unread:
                    first, last = stream.unread
                    raise CorruptedError(
                        f"items {first} to {last} of the report log cannot be read"
                    )
            finally:
                with self._changed:
                    self._call = None
                answers.cancel()
                stream.end()

    def _break_off(self) -> None:
        with self._changed:
            if self._call:
                self._call.cancel()

    def _handle_answer(
        self,
        stream: ReportStream,
        answer: coordinator_pb2.ReportResponse,
        *,
        greeting: bool,
    ) -> None:
        if greeting and answer.acknowledged_sequence < self._log.acknowledged_to():
            self._on_forgotten()
        stream.handle_answer(answer)
        with self._changed:
            self._received = stream.received
            self._note_reachable()
            received = dict.fromkeys((each.job_id, each.text) for each in answer.warnings)
            new = [each for each in received if each not in self._warnings]
            self._warnings.update(dict.fromkeys(new))
            for earliest in list(self._warnings)[: len(self._warnings) - MAX_WARNINGS]:
                del self._warnings[earliest]
            self._changed.notify_all()
        for job_id, text in new:
            self._warn(job_id, text)
        self._orders.take_orders(list(_read_orders(answer.control_orders)))
        for message in answer.freezes:
            if is_known_freeze(message.freeze):
                self._black_box.join_freeze(relayed_freeze_from_wire(message))

    def _note_reachable(self) -> None:
        outage, self._outage = self._outage, None
        if self._logged and outage:
            away_s = self._read_clock_s() - outage.since_s
            what = f"coordinator {self._address} accepts reports"
            what = "the ledger can be written" if outage.is_local else what
            _logger.info("%s again after %.0f s", what, away_s)
        self._logged = ""

    def _complete_request(
        self,
        request: coordinator_pb2.ReportRequest,
        sent_to: int | None,
        stub: coordinator_pb2_grpc.CoordinatorServiceStub,
    ) -> None:
        """Fill in identity and status of this host; the expensive parts only once a second."""
        if sent_to is not None:
            request.freezes.extend(map(job_freeze_to_wire, self._black_box.list_freezes()))
            if self._clock.keep_up(stub):
                request.steps.extend(map(rank_step_to_wire, self._black_box.pop_steps()))
                self._event_counts = self.events()
                self._quiet_ranks.update(now_us=self._times.now().wall_us, newest=self._log.last)
            quiet_ranks, until_us = self._quiet_ranks.pop_quiet_ranks(sent_to)
            for each in quiet_ranks:
                about = {"job_id": each.job_id, "rank": each.rank, "session_id": each.session_id}
                request.heard.add(until_us=until_us, **about)
        request.agent_id = self._agent_id
        request.host, request.host_id = socket.gethostname(), self._host_id
        request.load.CopyFrom(status_messages.load_to_wire(self._load()))
        clock = make_fields(self._clock.estimate())
        request.clock.CopyFrom(coordinator_pb2.ClockEstimate(**clock))
        request.held_events, request.lost_events = self._event_counts
        request.control_answers.extend(map(answer_to_wire, self._orders.list_answers()))

    def _handle_failure(self, failure: grpc.RpcError | RankdumpError) -> None:
        """Drop an item that is rejected or damaged, because it would fail in the same way every
        time.
        """
        error = explain_failure(failure, self._address, self._credentials)
        spans = self._stream.unanswered() if self._stream else []
        # An unreachable coordinator or an untrusted certificate is not a fault of the items.
        if not spans or isinstance(error, UnavailableError | ForbiddenError | ConfigError):
            self._note_outage(error)
            return
        if str(error) != self._logged and not self.thread.is_stopping:
            self._logged = str(error)
            _logger.error("coordinator %s: %s", self._address, error)
        first, last = spans[0]
        if len(spans) == 1 and first == last:
            self._log.give_up(first, last)
        # If the message had several items, the one at fault is found by sending each alone.
        self._careful_to = max(self._careful_to, spans[-1][1])

    def _note_outage(self, error: RankdumpError, *, is_local: bool = False) -> None:
        """Remember an outage, and log it when it is new."""
        now_s, before = self._read_clock_s(), self._outage
        outage = CoordinatorOutage(
            since_s=before.since_s if before else now_s,
            reason=str(error),
            refused=not isinstance(error, RetryableError),
            is_local=is_local,
        )
        self._outage = outage
        if (
            outage.reason != self._logged
            and outage.is_worth_logging(now_s)
            and not self.thread.is_stopping
        ):
            self._logged = outage.reason
            _logger.warning("%s", self._describe_outage(outage))

"""One report stream to the coordinator: a greeting, then the items of the report log in order,
where each text is sent only once in a stream; and the offset of the coordinator's clock from this
host's clock, estimated from round-trip times.

gRPC consumes requests in its own thread, which reads the log; the reporter thread handles the
answers.

The network path may be asymmetric: the true offset lies anywhere between the bounds that the
fastest request and the fastest response give. Older samples count less, because clocks drift.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._core.status import ClockEstimate, IterationStatus, SessionState, SessionStatus
from rankdump._wire import status_messages
from rankdump.wire.v1 import agent_pb2, coordinator_pb2, events_pb2
from rankdumpd.agent.ledger.report_log import ReportLog
from rankdumpd.agent.ledger.rows import ReportItem, ReportItemKind

_logger = logging.getLogger(__name__)

MAX_SAMPLES = 64
MAX_AGE_US = 300_000_000
DRIFT_PPM = 100
"""Largest drift in parts per million between two clocks that nobody sets."""
STEP_US = 1_000
STEP_PPM = 500
"""Deviation from the monotonic clock, in parts per million, above which a clock counts as set;
slewing stays below it.
"""


@dataclass(frozen=True, slots=True)
class ClockInstant:
    """One moment on both clocks of this host."""

    wall_us: int
    monotonic_us: int


@dataclass(frozen=True, slots=True)
class ClockSample:
    """One request to the coordinator and its response."""

    sent: ClockInstant
    received_us: int
    """Arrival of the request in microseconds; like `answered_us`, on the coordinator's clock."""
    answered_us: int
    back: ClockInstant

    @property
    def delay_us(self) -> int:
        """Round-trip time without the time that the coordinator took; drift may make it
        negative.
        """
        took_us = self.back.monotonic_us - self.sent.monotonic_us
        return took_us - (self.answered_us - self.received_us)

    @property
    def offset_us(self) -> int:
        """Midpoint of the possible offsets."""
        there = self.received_us - self.sent.wall_us
        return (there + self.answered_us - self.back.wall_us) // 2

    def error_us(self, now: ClockInstant) -> int:
        """Return the largest possible error of the offset at the moment `now`."""
        # The age counts from the request, because clocks drift while it is under way, too.
        age_us = max(0, now.monotonic_us - self.sent.monotonic_us)
        # Plus 1, because both divisions round.
        return (self.delay_us + 1) // 2 + _drift_us(age_us) + 1


@dataclass(frozen=True, slots=True)
class ClockWindow:
    """The samples in use, and the number of times that this host's clock has been set."""

    samples: tuple[ClockSample, ...] = ()
    steps: int = 0
    last: ClockInstant | None = None

    def at(self, now: ClockInstant) -> ClockWindow:
        """Return the window at a later moment; without samples if the clock was set in between."""
        if self.last is not None and _is_stepped(self.last, now):
            return ClockWindow(steps=self.steps + 1, last=now)
        oldest_us = now.monotonic_us - MAX_AGE_US
        young = tuple(s for s in self.samples if s.back.monotonic_us >= oldest_us)
        return replace(self, samples=young, last=now)

    def with_sample(self, sample: ClockSample) -> ClockWindow:
        """Return the window with one more sample; without it if the sample is implausible."""
        window = self.at(sample.sent)
        across = window.at(sample.back)
        if across.steps != window.steps or sample.answered_us < sample.received_us:
            return across
        # Minus 1, because the clocks are rounded to microseconds.
        if sample.delay_us < -_drift_us(sample.back.monotonic_us - sample.sent.monotonic_us) - 1:
            return across
        known = across.estimate(sample.back)
        apart_us = abs(sample.offset_us - known.offset_us)
        if known.known and apart_us > known.error_us + sample.error_us(sample.back):
            # The sample and the estimate exclude each other, so the coordinator's clock was set.
            return replace(across, samples=(sample,))
        return replace(across, samples=(*across.samples, sample)[-MAX_SAMPLES:])

    def estimate(self, now: ClockInstant) -> ClockEstimate:
        """Return the offset of the sample whose error is smallest."""
        if not self.samples:
            return ClockEstimate(steps=self.steps)
        best = min(self.samples, key=lambda sample: sample.error_us(now))
        return ClockEstimate(best.offset_us, best.error_us(now), self.steps, known=True)


def _drift_us(elapsed_us: int) -> int:
    return -(-elapsed_us * DRIFT_PPM // 1_000_000)


def _is_stepped(earlier: ClockInstant, later: ClockInstant) -> bool:
    elapsed_us = later.monotonic_us - earlier.monotonic_us
    jump_us = later.wall_us - earlier.wall_us - elapsed_us
    return abs(jump_us) > STEP_US + elapsed_us * STEP_PPM // 1_000_000


MAX_TEXTS = 65_536
"""Number of texts above which the table is cleared before the next message."""
_INDEX = "<u4"


class StreamTextTable:
    """The text table of one stream; index 0 is always the empty text."""

    def __init__(self) -> None:
        self._indexes = {"": 0}
        self._sent = 1

    def added(self) -> coordinator_pb2.Texts | None:
        """Return the texts that the coordinator does not have yet; called once for each message."""
        texts = list(self._indexes)[self._sent :] if self._sent < len(self._indexes) else []
        first, self._sent = self._sent, len(self._indexes)
        return coordinator_pb2.Texts(first=first, texts=texts) if texts else None

    def renew(self) -> None:
        """Clear the table if it is too large; the next `added` then begins with index 0."""
        if len(self._indexes) > MAX_TEXTS:
            self._indexes, self._sent = {"": 0}, 0

    def point(self, columns: events_pb2.EventColumns) -> None:
        """Replace the names in a batch of events by indexes into this table."""
        places = self._find_indexes(columns.names)
        calls = len(columns.calls) // 4
        for field, count in (("name", columns.count), ("group", calls), ("dtype", calls)):
            setattr(columns, field, _map_indexes(getattr(columns, field), count, places))
        columns.stream_source = _map_indexes(columns.source, calls, places)
        columns.ClearField("source")
        columns.ClearField("names")

    def _find_indexes(self, names: Iterable[str]) -> npt.NDArray[Any]:
        indexes = self._indexes
        found = [indexes.setdefault(name, len(indexes)) for name in names]
        return np.array(found or [0], _INDEX)


def _map_indexes(data: bytes, count: int, places: npt.NDArray[Any]) -> bytes:
    # A column without bytes stands for a column of zeros, in a batch of events as well as in the
    # message.
    indexes = np.frombuffer(data, _INDEX) if data else np.zeros(count, _INDEX)
    mapped = places[indexes]
    return mapped.tobytes() if mapped.any() else b""


class ReportMessages:
    """Builds the messages of one stream; each contains only the names that are new in
    the stream.
    """

    def __init__(self) -> None:
        self._texts = StreamTextTable()

    def of(self, items: Sequence[ReportItem]) -> coordinator_pb2.ReportRequest:
        """Return a message with these items in their order; without items it is a heartbeat."""
        request = coordinator_pb2.ReportRequest()
        if items:
            self._texts.renew()
        for item in items:
            request.sequence = item.number
            self._add(request, item)
        texts = self._texts.added()
        if texts:
            request.texts.CopyFrom(texts)
        return request

    def _add(self, request: coordinator_pb2.ReportRequest, item: ReportItem) -> None:
        if item.kind is ReportItemKind.EVENTS:
            columns = agent_pb2.Frame.FromString(item.body).events
            self._texts.point(columns)
            about = {"job_id": item.job_id, "rank": item.rank, "session_id": item.session_id}
            request.events.add(columns=columns, **about)
        elif item.kind is ReportItemKind.SESSION:
            body = json.loads(item.body)
            about = body["status"]
            about |= {"state": SessionState(about["state"]), "notes": tuple(about["notes"])}
            request.sessions.append(status_messages.session_to_wire(SessionStatus(**about)))
            request.roots[item.job_id] = body["root"]
        elif item.kind is ReportItemKind.TIMEOUTS:
            timeouts = agent_pb2.Frame.FromString(item.body).timeouts
            request.timeouts.add(job_id=item.job_id, rank=item.rank, timeouts=timeouts)
        else:
            status = IterationStatus(**json.loads(item.body))
            request.iterations.append(status_messages.iteration_to_wire(status))


def _read_clocks() -> ClockInstant:
    # The two clocks are read directly after each other, because time between both readings would
    # look like a jump of the clock.
    return ClockInstant(time.time_ns() // 1000, time.monotonic_ns() // 1000)


@dataclass(frozen=True, slots=True)
class ReporterTimes:
    """Timeouts and intervals of the reporter in seconds, and its clocks."""

    heartbeat_s: float = 1.0
    hurry_s: float = 0.1
    """Interval between messages while the coordinator controls a job of this agent."""
    first_retry_s: float = 0.1
    last_retry_s: float = 5.0
    answer_s: float = 60.0
    """Time without an answer of the coordinator after which the stream is cancelled."""
    probe_s: float = 5.0
    """Timeout of the call that checks whether an idle coordinator is reachable."""
    clock_s: float = 0.5
    """Timeout of the call that takes a clock sample; a slower answer would be useless
    as a sample.
    """
    now: Callable[[], ClockInstant] = _read_clocks


MAX_UNANSWERED = 8
MAX_REQUEST_ITEMS = 1_000
# Messages of this size stay well below the server's limit.
MAX_REQUEST_EVENTS = 20_000
MAX_REQUEST_BYTES = 2 << 20
MIN_FORGOTTEN_ITEMS = 64

_Request = coordinator_pb2.ReportRequest
_Span = tuple[int, int]


class ReportStream:
    """State of one report stream: the items that were sent and the answers that were received."""

    def __init__(
        self,
        log: ReportLog,
        changed: threading.Condition,
        *,
        times: ReporterTimes,
        careful_to: int,
        complete: Callable[[_Request, int | None], None],
        on_overdue: Callable[[], None],
        is_hurried: Callable[[], bool],
    ) -> None:
        """Items up to `careful_to` are sent one by one.

        `complete` fills in the rest of each message. Its argument is the number up to which all
        items are sent with this message, or None before the coordinator has answered. Messages are
        sent more often while `is_hurried` returns true.
        """
        self._log, self._changed, self._times = log, changed, times
        self._careful_to = careful_to
        self._complete, self._on_overdue = complete, on_overdue
        self._is_hurried = is_hurried
        self.received = 0
        self.unread: _Span | None = None
        """First and last number of the items among which one cannot be read from the ledger."""
        self._acknowledged = self._forgotten = 0
        self._known = 0
        self._greeted = self._over = False
        self._messages = ReportMessages()
        self._composing = threading.Lock()
        self._read: deque[ReportItem] = deque()
        self._read_to = self._sent_to = 0
        self._news = True
        self._unanswered: deque[_Span] = deque()
        self._answered_us = times.now().monotonic_us

    def requests(self) -> Iterator[_Request]:
        """Yield requests as answers permit; end before an item that cannot be read."""
        request = self._make_request(())
        while request is not None:
            yield request
            request = self._next_request()

    def handle_answer(self, answer: coordinator_pb2.ReportResponse) -> None:
        """Handle the answer to the oldest unanswered request."""
        # After a power loss, or if the folder was restored, the log may lack numbers that the
        # coordinator has received. These numbers must not be given to other items.
        highest = max(answer.acknowledged_sequence, answer.received_sequence)
        renumbered = 0 if self._greeted else self._log.begin_after(highest)
        with self._changed:
            self._answered_us = self._times.now().monotonic_us
            if self._unanswered:
                self._unanswered.popleft()
            self._acknowledged = max(self._acknowledged, answer.acknowledged_sequence)
            self.received = max(self.received, answer.received_sequence, self._acknowledged)
            if not self._greeted:
                self._greeted = True
                if renumbered:
                    _logger.warning(
                        "%d items are renumbered behind %d and reported again",
                        renumbered,
                        self.received,
                    )
                    self._acknowledged = self.received
                self._read_to, self._known = self._acknowledged, self.received
            quiet = not self._unanswered
            self._changed.notify_all()
        more = self._acknowledged - self._forgotten
        if more > 0 and (quiet or more >= MIN_FORGOTTEN_ITEMS):
            self._log.acknowledged(self._acknowledged)
            self._forgotten = self._acknowledged

    def wake(self) -> None:
        """Wake the sender to look for new items; the caller holds the lock."""
        self._news = True
        self._changed.notify_all()

    def end(self) -> None:
        """End the stream; when this returns, the log is not read any more."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        with self._composing:
            pass

    def unanswered(self) -> list[_Span]:
        """Return the first and last number of the items in each unanswered message; if a message
        could not be built, only those of its items.
        """
        if self.unread:
            return [self.unread]
        with self._changed:
            return [span for span in self._unanswered if span[1]]

    def _next_request(self) -> _Request | None:
        with self._composing:
            while True:
                with self._changed:
                    hurried = self._is_hurried()
                    pause_s = self._times.hurry_s if hurried else self._times.heartbeat_s
                    self._changed.wait_for(self._has_work, pause_s)
                    if self._over:
                        return None
                    may_send = self._may_send()
                    silent_us = self._times.now().monotonic_us - self._answered_us
                if may_send:
                    return self._make_request(self._collect_items())
                if silent_us > self._times.answer_s * 1e6:
                    self._on_overdue()

    def _has_work(self) -> bool:
        return self._over or (self._may_send() and (self._news or bool(self._read)))

    def _may_send(self) -> bool:
        careful = bool(self._unanswered) and 0 < self._unanswered[-1][0] <= self._careful_to
        return self._greeted and len(self._unanswered) < (1 if careful else MAX_UNANSWERED)

    def _make_request(self, items: tuple[ReportItem, ...]) -> _Request | None:
        span = (items[0].number, items[-1].number) if items else (0, 0)
        try:
            request = self._messages.of(items)
        except Exception:
            # After any error, because the same item would fail on the next stream as well.
            _logger.debug("items %d to %d cannot be encoded", *span, exc_info=True)
            self.unread = span
            return None
        if items:
            self._sent_to = span[1]
        self._complete(request, max(self._sent_to, self.received) if self._greeted else None)
        with self._changed:
            if not self._unanswered:
                self._answered_us = self._times.now().monotonic_us
            self._unanswered.append(span)
        return request

    def _collect_items(self) -> tuple[ReportItem, ...]:
        if not self._read:
            # Reset before reading, so that items that are entered in the meantime are looked for
            # again.
            self._news = False
            self._read.extend(self._log.items(self._read_to))
            if self._read:
                self._news, self._read_to = True, self._read[-1].number
        found: list[ReportItem] = []
        events = size = 0
        while self._read and len(found) < MAX_REQUEST_ITEMS:
            item = self._read[0]
            events += item.events
            size += len(item.body)
            if found and (
                events > MAX_REQUEST_EVENTS
                or size > MAX_REQUEST_BYTES
                or self._must_separate(found[-1], item)
            ):
                break
            found.append(self._read.popleft())
        return tuple(found)

    def _must_separate(self, earlier: ReportItem, later: ReportItem) -> bool:
        """Return whether two items must not share a message.

        Items that were sent before are resent, and a message that also contained new ones would not
        be recognised as a repetition. A message has only its last number, so the numbers of its
        items must be consecutive.
        """
        careful = earlier.number <= self._careful_to
        gap = earlier.number + 1 < later.number
        return careful or gap or earlier.number <= self._known < later.number

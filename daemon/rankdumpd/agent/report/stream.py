"""One stream to the coordinator: a greeting, then the log from where it was left, in order.

gRPC takes requests on a thread of its own, which reads the log; the reporter's takes the answers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator

from rankdump.wire.v1 import coordinator_pb2
from rankdumpd.agent.report.messages import Messages
from rankdumpd.agent.report.ports import Log, Times
from rankdumpd.agent.values import LogItem

MOST_UNANSWERED = 8
MAX_ITEMS = 1_000
# A message of this much stays well under what a server takes.
MAX_EVENTS = 20_000
MAX_BYTES = 2 << 20
FORGOTTEN_AT_ONCE = 64

_log = logging.getLogger(__name__)

_Request = coordinator_pb2.ReportRequest
_Span = tuple[int, int]


class Conversation:
    """What was said and answered on one stream."""

    def __init__(
        self,
        log: Log,
        changed: threading.Condition,
        *,
        times: Times,
        careful_to: int,
        prepared: Callable[[_Request, int | None], None],
        overdue: Callable[[], None],
    ) -> None:
        """Send items up to `careful_to` one by one.

        `prepared` says the rest of each message, and is told up to which number the log is told
        with it; None before the coordinator has answered.
        """
        self._log, self._changed, self._times = log, changed, times
        self._careful_to = careful_to
        self._prepared, self._overdue = prepared, overdue
        self.received = 0
        self.unread: _Span | None = None
        """Items among which is one that is damaged in the ledger."""
        self._acknowledged = self._forgotten = 0
        self._known = 0
        self._greeted = self._over = False
        self._messages = Messages()
        self._composing = threading.Lock()
        self._read: deque[LogItem] = deque()
        self._read_to = self._told_to = 0
        self._news = True
        self._unanswered: deque[_Span] = deque()
        self._heard_us = times.now().monotonic_us

    def requests(self) -> Iterator[_Request]:
        """Yield what is to be sent, as answers make room for it, and nothing behind an item that
        cannot be read.
        """
        request = self._said(())
        while request is not None:
            yield request
            request = self._next()

    def take(self, answer: coordinator_pb2.ReportResponse) -> None:
        """Take the answer to the oldest request without one."""
        # A power loss, or a folder that was put back, may have taken numbers from the log that the
        # coordinator has heard: nothing else may get them.
        again = 0 if self._greeted else self._log.begin_after(_highest(answer))
        with self._changed:
            self._heard_us = self._times.now().monotonic_us
            if self._unanswered:
                self._unanswered.popleft()
            self._acknowledged = max(self._acknowledged, answer.acknowledged_sequence)
            self.received = max(self.received, answer.received_sequence, self._acknowledged)
            if not self._greeted:
                self._greeted = True
                if again:
                    _log.warning("%d items are told again, behind %d", again, self.received)
                    self._acknowledged = self.received
                self._read_to, self._known = self._acknowledged, self.received
            quiet = not self._unanswered
            self._changed.notify_all()
        more = self._acknowledged - self._forgotten
        if more > 0 and (quiet or more >= FORGOTTEN_AT_ONCE):
            self._log.acknowledged(self._acknowledged)
            self._forgotten = self._acknowledged

    def wake(self) -> None:
        """Look for new items; the caller holds the lock."""
        self._news = True
        self._changed.notify_all()

    def end(self) -> None:
        """Send nothing more; the log is not read any more when this returns."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        with self._composing:
            pass

    def unanswered(self) -> list[_Span]:
        """Return the first and last number of every message with items that has no answer; of one
        that could not even be made, only those.
        """
        if self.unread:
            return [self.unread]
        with self._changed:
            return [span for span in self._unanswered if span[1]]

    def _next(self) -> _Request | None:
        with self._composing:
            while True:
                with self._changed:
                    self._changed.wait_for(self._may_go_on, self._times.heartbeat_s)
                    if self._over:
                        return None
                    room = self._has_room()
                    silent_us = self._times.now().monotonic_us - self._heard_us
                if room:
                    return self._said(self._gathered())
                if silent_us > self._times.answer_s * 1e6:
                    self._overdue()

    def _may_go_on(self) -> bool:
        return self._over or (self._has_room() and (self._news or bool(self._read)))

    def _has_room(self) -> bool:
        careful = bool(self._unanswered) and 0 < self._unanswered[-1][0] <= self._careful_to
        return self._greeted and len(self._unanswered) < (1 if careful else MOST_UNANSWERED)

    def _said(self, items: tuple[LogItem, ...]) -> _Request | None:
        span = (items[0].number, items[-1].number) if items else (0, 0)
        try:
            request = self._messages.of(items)
        except Exception:
            # Whatever it is: the same item would fail the next stream as well.
            _log.debug("items %d to %d", *span, exc_info=True)
            self.unread = span
            return None
        if items:
            self._told_to = span[1]
        self._prepared(request, max(self._told_to, self.received) if self._greeted else None)
        with self._changed:
            if not self._unanswered:
                self._heard_us = self._times.now().monotonic_us
            self._unanswered.append(span)
        return request

    def _gathered(self) -> tuple[LogItem, ...]:
        if not self._read:
            # First: what is entered while this reads is looked for again.
            self._news = False
            self._read.extend(self._log.items(self._read_to))
            if self._read:
                self._news, self._read_to = True, self._read[-1].number
        found: list[LogItem] = []
        events = size = 0
        while self._read and len(found) < MAX_ITEMS:
            item = self._read[0]
            events += item.events
            size += len(item.body)
            if found and (events > MAX_EVENTS or size > MAX_BYTES or self._parts(found[-1], item)):
                break
            found.append(self._read.popleft())
        return tuple(found)

    def _parts(self, earlier: LogItem, later: LogItem) -> bool:
        """Return whether two items must not share a message.

        What has arrived before is told again, and a message that held something new besides would
        not be known as a repetition. Those of a message follow each other: only the last number is
        said.
        """
        careful = earlier.number <= self._careful_to
        gap = earlier.number + 1 < later.number
        return careful or gap or earlier.number <= self._known < later.number


def _highest(answer: coordinator_pb2.ReportResponse) -> int:
    return max(answer.acknowledged_sequence, answer.received_sequence)

"""Trace of a rank's execution: positions and times of its events in the order of execution, and
events that are not sent yet. It never touches tensors.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rankdump._core.events import (
    EVENT_COLUMN_TYPES,
    OPEN_END_POSITION,
    CallOutcome,
    EventColumns,
    EventKind,
    ProcessGroup,
    UnseenCollectives,
    UnseenReason,
)
from rankdump._core.recorder_protocol import CollectiveCall, StartedEvent
from rankdump._shm.event_journal import EventJournal

FLUSH_EVENTS = 4096
OPEN_AFTER_US = 1_000_000
"""Microseconds after which a collective or a message is sent as open, although it has not ended."""
STALL_REPORT_US = 1_000_000
"""Growth of the stall, in microseconds, that is sent even without an event."""
_FAILED = int(CallOutcome.FAILED)
_NO_COLLECTIVE = CollectiveCall(EventKind.OPERATOR, ProcessGroup("", ()), 0)
_NUMBER_FIELDS = (
    "graph",
    "iteration",
    "position",
    "end_position",
    "start_us",
    "end_us",
    "stall_us",
    "outcome",
)
"""Numeric fields of an event in the order of a row; its name and its collective follow them."""

_EventRow = tuple[int, int, int, int, int, int, int, int, str, CollectiveCall]
_CompletedEvent = tuple[StartedEvent, int, int, str, CollectiveCall | None, int]
"""An event's start, end position, end time (us), name, collective and outcome."""


def now_us() -> int:
    """Return the time in microseconds since the epoch."""
    return time.time_ns() // 1000


class EventTrace:
    """Events of one rank; safe to use from several threads. With `keeps=False` it only counts
    events.

    Events of operators take no lock: each access to a counter, a list or a dictionary is one atomic
    step of the interpreter. Every event is returned as complete, or first as open and later as
    complete. When its iteration has ended, no event is left unreturned.
    """

    def __init__(
        self,
        clock_us: Callable[[], int] = now_us,
        *,
        stalled_us: Callable[[], int] = lambda: 0,
        keeps: bool = True,
    ) -> None:
        """`stalled_us` returns the microseconds for which dumping has delayed the rank so far."""
        self._clock_us = clock_us
        self._stalled_us = stalled_us
        self._keeps = keeps
        self._lock = threading.Lock()
        self._positions = itertools.count(1)
        self._position = self._sent_position = 0
        self._boundary = 0
        """Last position of the previous iteration."""
        self._earlier = self._running = 0
        self._ended: list[_CompletedEvent] = []
        self._unreported: dict[int, StartedEvent] = {}
        """Events by position that were returned neither as complete nor as open."""
        self._groups: dict[str, ProcessGroup] = {}
        self._unseen: list[UnseenCollectives] = []
        self._stall_sent_us = 0
        self._journal: EventJournal | None = None
        self.unseen_count: Counter[str] = Counter()
        """Collectives of the whole run for which there is no event, counted by reason."""

    def use_journal(self, journal: EventJournal | None) -> None:
        """Write every event to a journal from now on, first the events that were not taken yet."""
        self._journal = journal
        if journal is None or not self._keeps:
            return
        for begun in list(self._unreported.values()):
            journal.add_event(begun, self._find_iteration(begun))
        # Ends are written after starts: an event that ends meanwhile is in this list.
        for begun, end, end_us, name, call, outcome in self._ended[:]:
            # An event without a duration is only in this list, so its start is written here too.
            journal.add_event(begun, self._find_iteration(begun))
            if name != begun.name or call is not begun.collective:
                journal.rename_event(begun, name, call)
            journal.end_event(begun, end, end_us, outcome)

    def begin_iteration(self, iteration: int) -> None:
        """Assign all events that start from now on to this iteration."""
        self._running = iteration

    def end_iteration(self) -> tuple[int, int]:
        """End the running iteration; return its first and last position, both 0 without events.

        Events of the iteration that are still open are returned by the next `take_events`.
        """
        with self._lock:
            first, self._earlier = self._boundary + 1, self._running
            # If two threads start events at once, the smaller of the two positions may have been
            # stored last.
            self._boundary = max(self._position, self._sent_position)
            last = self._boundary
        return (first, last) if self._keeps and first <= last else (0, 0)

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Start an event at the next position of the rank's order."""
        position = self._position = next(self._positions)
        stall_us = 0 if collective is None else self._stalled_us()
        begun = StartedEvent(position, self._clock_us(), graph, name, collective, stall_us)
        if self._keeps:
            self._unreported[position] = begun
            journal = self._journal
            if journal is not None:
                journal.add_event(begun, self._running)
        return begun

    def record_event(self, *, graph: int, name: str) -> bool:
        """Record an event without a duration; return whether enough events wait to be sent."""
        position = self._position = next(self._positions)
        if not self._keeps:
            return False
        now_us = self._clock_us()
        begun = StartedEvent(position, now_us, graph, name, None, 0)
        self._ended.append((begun, position, now_us, name, None, CallOutcome.UNKNOWN))
        journal = self._journal
        if journal is not None:
            journal.add_event(begun, self._running)
            journal.end_event(begun, position, now_us)
        return len(self._ended) >= FLUSH_EVENTS

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> bool:
        """Record that an event has ended now; return whether enough events wait to be sent.

        A failed event is returned as open, with the time of its failure as its end.
        """
        if not self._keeps:
            return False
        # If two threads start events at once, the smaller of the two positions may be stored.
        failed = outcome == _FAILED
        end = OPEN_END_POSITION if failed else max(begun.position, self._position)
        end_us = self._clock_us()
        call = collective or begun.collective
        self._ended.append((begun, end, end_us, name or begun.name, call, outcome))
        journal = self._journal
        if journal is not None:
            if name or collective is not None:
                journal.rename_event(begun, name or begun.name, call)
            journal.end_event(begun, end, end_us, outcome)
        return len(self._ended) >= FLUSH_EVENTS

    def add_unseen(self, group: str, reason: UnseenReason, count: int) -> None:
        """Report collectives of the running iteration for which there is no event."""
        self.unseen_count[reason.value] += count
        if self._keeps:
            self._unseen.append(UnseenCollectives(self._running, group, count, reason.value))

    def take_events(self) -> EventColumns | None:
        """Return all complete events and the open events that are overdue; None if there are none.

        An open collective is overdue after OPEN_AFTER_US, any other open event at the end of its
        iteration.
        """
        if not self._keeps:
            return None
        stalled_us, sent_us = self._stalled_us(), self._clock_us()
        with self._lock:
            # Complete events are taken first, so that no batch has an event twice.
            rows = self._take_complete_rows()
            rows += self._take_open_rows()
            unseen, self._unseen = tuple(self._unseen), []
            few_stalls = stalled_us - self._stall_sent_us < STALL_REPORT_US
            if not rows and not unseen and few_stalls:
                return None
            self._stall_sent_us = stalled_us
            self._sent_position = max(self._sent_position, *(row[2] for row in rows), 0)
            calls = (row[-1] for row in rows if row[-1] is not _NO_COLLECTIVE)
            self._groups.update((call.group.name, call.group) for call in calls)
            groups = tuple(self._groups.values())
        columns = _make_columns(rows, groups)
        return replace(columns, stalled_us=stalled_us, sent_us=sent_us, unseen=unseen)

    def _take_complete_rows(self) -> list[_EventRow]:
        # The list object is kept: another thread may be about to append to it.
        ended = self._ended[:]
        del self._ended[: len(ended)]
        for begun, *_ in ended:
            self._unreported.pop(begun.position, None)
        return [self._make_row(*each) for each in ended]

    def _take_open_rows(self) -> list[_EventRow]:
        rows: list[_EventRow] = []
        waiting = list(self._unreported.values())
        now = self._clock_us() if waiting else 0
        for begun in waiting:
            if begun.position <= self._boundary or _is_overdue(begun, now):
                del self._unreported[begun.position]
                row = self._make_row(
                    begun,
                    OPEN_END_POSITION,
                    begun.start_us,
                    begun.name,
                    begun.collective,
                    CallOutcome.UNKNOWN,
                )
                begun.iteration = row[1]
                rows.append(row)
        return rows

    def _make_row(
        self,
        begun: StartedEvent,
        end_position: int,
        end_us: int,
        name: str,
        collective: CollectiveCall | None,
        outcome: int,
    ) -> _EventRow:
        iteration = self._find_iteration(begun)
        numbers = (begun.graph, iteration, begun.position, end_position, begun.start_us, end_us)
        return (*numbers, begun.stall_us, outcome, name, collective or _NO_COLLECTIVE)

    def _find_iteration(self, begun: StartedEvent) -> int:
        """Return the iteration in which an event started."""
        if begun.iteration >= 0:
            return begun.iteration
        return self._earlier if begun.position <= self._boundary else self._running


def _is_overdue(begun: StartedEvent, now_us: int) -> bool:
    """Return whether a collective call is to be sent before it is complete.

    If the clock was set back, every open call is overdue.
    """
    return begun.collective is not None and not 0 <= now_us - begun.start_us < OPEN_AFTER_US


def _make_columns(rows: Sequence[_EventRow], groups: tuple[ProcessGroup, ...]) -> EventColumns:
    *numbers, names, calls = zip(*rows, strict=True) if rows else [()] * (len(_NUMBER_FIELDS) + 2)
    table = {"": 0}
    found: dict[str, Sequence[int]] = {}
    found.update(zip(_NUMBER_FIELDS, numbers, strict=True))
    found["name"] = [table.setdefault(name, len(table)) for name in names]
    if any(call is not _NO_COLLECTIVE for call in calls):
        texts = {
            "group": [call.group.name for call in calls],
            "dtype": [call.dtype for call in calls],
            "source": [call.source for call in calls],
        }
        for field, values in texts.items():
            found[field] = [table.setdefault(text, len(table)) for text in values]
        for field in ("kind", "sequence", "element_count", "peer"):
            found[field] = [getattr(call, field) for call in calls]
    usual = {"kind": int(EventKind.OPERATOR), "peer": _NO_COLLECTIVE.peer}
    columns = {
        field: np.array(found[field], code)
        if field in found
        else np.full(len(rows), usual.get(field, 0), code)
        for field, code in EVENT_COLUMN_TYPES.items()
    }
    return EventColumns(tuple(table), groups, columns)

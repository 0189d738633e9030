"""What the rank executed, in the order it did: positions, times, and the pending events.

Beside the hook, which says what an operator read and wrote. Never touches tensors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rankdump.contract.events import Event, EventColumns, EventKind, ProcessGroup
from rankdump.values import Collective

FLUSH_EVENTS = 4096
_OPERATOR = Collective(EventKind.OPERATOR, ProcessGroup("", ()), 0)


def now_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


class Trace:
    """The program of one rank; safe to use from several threads. Without `keeps` it only counts."""

    def __init__(self, clock_us: Callable[[], int] = now_us, *, keeps: bool = True) -> None:
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._position = 0
        self._iteration = 0
        self._before = (0, 0)
        self._keeps = keeps
        self._pending: list[Event] = []
        self._groups: dict[str, ProcessGroup] = {}

    def begin_iteration(self, iteration: int) -> None:
        """Count what starts from now on to that iteration."""
        with self._lock:
            self._before = (self._position, self._iteration)
            self._iteration = iteration

    def started(self) -> tuple[int, int]:
        """Advance the program by one event; return its position and the time."""
        with self._lock:
            self._position += 1
            return self._position, self._clock_us()

    def finished(
        self, begun: tuple[int, int], *, graph: int, name: str, collective: Collective | None
    ) -> bool:
        """Record an event as complete now; return whether it is time to hand over."""
        if not self._keeps:
            return False
        with self._lock:
            boundary, earlier = self._before
            what = collective or _OPERATOR
            if collective is not None:
                self._groups[collective.group.name] = collective.group
            self._pending.append(
                Event(
                    graph=graph,
                    # What began before the step belongs to the iteration it began in.
                    iteration=earlier if begun[0] <= boundary else self._iteration,
                    position=begun[0],
                    end_position=self._position,
                    name=name,
                    kind=what.kind,
                    start_us=begun[1],
                    end_us=self._clock_us(),
                    group=what.group.name,
                    sequence=what.sequence,
                    element_count=what.element_count,
                    dtype=what.dtype,
                    peer=what.peer,
                )
            )
            return len(self._pending) >= FLUSH_EVENTS

    def take(self) -> EventColumns | None:
        """Hand over the pending events; None when there are none."""
        with self._lock:
            events, self._pending = self._pending, []
            groups = tuple(self._groups.values())
        return EventColumns.of(events, groups) if events else None

"""What the rank executed, in the order it did: positions, times, and the pending events.

Beside the hook, which says what an operator read and wrote. Never touches tensors.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from rankdump.contract.events import COLUMN_TYPES, EventColumns, EventKind, ProcessGroup
from rankdump.values import Collective

FLUSH_EVENTS = 4096
_OPERATOR = Collective(EventKind.OPERATOR, ProcessGroup("", ()), 0)
_FIELDS = ("graph", "iteration", "position", "end_position", "start_us", "end_us")
"""What every event has a number for, in the order of a row; after them its name and what it is."""

_Row = tuple[int, int, int, int, int, int, str, Collective]


def now_us() -> int:
    """Return microseconds since the epoch."""
    return time.time_ns() // 1000


class Trace:
    """The program of one rank; safe to use from several threads. Without `keeps` it only counts.

    Operators take no lock: what they do to a counter, a list and a tuple is one step each.
    """

    def __init__(self, clock_us: Callable[[], int] = now_us, *, keeps: bool = True) -> None:
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._positions = itertools.count(1)
        self._position = 0
        self._era = (0, 0, 0)
        """The iteration before, up to which position it went, and the one that runs."""
        self._keeps = keeps
        self._pending: list[_Row] = []
        self._groups: dict[str, ProcessGroup] = {}

    def begin_iteration(self, iteration: int) -> None:
        """Count what starts from now on to that iteration."""
        self._era = (self._era[2], self._position, iteration)

    def started(self) -> tuple[int, int]:
        """Advance the program by one event; return its position and the time."""
        position = self._position = next(self._positions)
        return position, self._clock_us()

    def finished(
        self, begun: tuple[int, int], *, graph: int, name: str, collective: Collective | None
    ) -> bool:
        """Record an event as complete now; return whether it is time to hand over."""
        if not self._keeps:
            return False
        earlier, boundary, running = self._era
        position, start_us = begun
        if collective is not None:
            with self._lock:
                self._groups[collective.group.name] = collective.group
        pending = self._pending
        pending.append(
            (
                graph,
                # What began before the step belongs to the iteration it began in.
                earlier if position <= boundary else running,
                position,
                # Two threads that start at once may leave the smaller of their positions.
                max(position, self._position),
                start_us,
                self._clock_us(),
                name,
                collective or _OPERATOR,
            )
        )
        return len(pending) >= FLUSH_EVENTS

    def take(self) -> EventColumns | None:
        """Hand over the pending events; None when there are none."""
        with self._lock:
            # The list stays the same one: another thread may be about to append to it.
            rows = self._pending[:]
            del self._pending[: len(rows)]
            groups = tuple(self._groups.values())
        return _columns(rows, groups) if rows else None


def _columns(rows: list[_Row], groups: tuple[ProcessGroup, ...]) -> EventColumns:
    *numbers, names, whats = zip(*rows, strict=True)
    table = {"": 0}
    found: dict[str, Sequence[int]] = {}
    found.update(zip(_FIELDS, numbers, strict=True))
    found["name"] = [table.setdefault(name, len(table)) for name in names]
    if any(what is not _OPERATOR for what in whats):
        for field in ("group", "dtype"):
            texts = [what.group.name if field == "group" else what.dtype for what in whats]
            found[field] = [table.setdefault(text, len(table)) for text in texts]
        for field in ("kind", "sequence", "element_count", "peer"):
            found[field] = [getattr(what, field) for what in whats]
    usual = {"kind": int(EventKind.OPERATOR), "peer": _OPERATOR.peer}
    columns = {
        field: np.array(found[field], code)
        if field in found
        else np.full(len(rows), usual.get(field, 0), code)
        for field, code in COLUMN_TYPES.items()
    }
    return EventColumns(tuple(table), groups, columns)

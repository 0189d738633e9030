"""Where calls of APIs came from: gathered, and sent many at once. Never waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump.contract.exchange import CallStacks, Declaration
from rankdump.contract.figure_rows import MAX_ROWS
from rankdump.stage import Stage

MAX_CHARACTERS = 1 << 18
"""Of the stacks of one frame, about: stacks of a deep program are long."""


class Callers:
    """The stacks of one rank's calls, in their order; safe to use from several threads."""

    def __init__(self, stage: Stage, submit: Callable[[Declaration], None]) -> None:
        self._stage = stage
        self._submit = submit
        self._lock = threading.Lock()
        self._iteration = 0
        self._calls: list[str] = []
        self._places: list[int] = []
        self._known: dict[tuple[str, ...], int] = {}
        self._characters = 0
        self.lost = 0
        """Calls whose stacks found no room."""

    def add(self, iteration: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Take the stack of a call."""
        with self._lock:
            if iteration != self._iteration:
                self._send()
                self._iteration = iteration
            self._calls.append(op_name)
            place = self._known.get(stack)
            if place is None:
                place = self._known[stack] = len(self._known)
                self._characters += sum(map(len, stack))
            self._places.append(place)
            if len(self._calls) >= MAX_ROWS or self._characters >= MAX_CHARACTERS:
                self._send()

    def flush(self) -> None:
        """Send what waits for the end of the iteration."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        if not self._calls:
            return
        stacks = CallStacks(
            self._iteration, tuple(self._calls), tuple(self._places), tuple(self._known)
        )
        self._calls, self._places, self._known = [], [], {}
        self._characters = 0
        if self._stage.admit_at_once(stacks):
            self._submit(stacks)
        else:
            self.lost += len(stacks.calls)

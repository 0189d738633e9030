"""What a rank declares beside its tensors: events, graphs, ends of iterations; in order."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump.accounts import Accounts, Stalls
from rankdump.contract.exchange import Declaration
from rankdump.sketch import Sketch
from rankdump.trace import Trace


class Declaring:
    """The declarations of one session; safe to use from several threads."""

    def __init__(
        self,
        *,
        trace: Trace,
        sketch: Sketch,
        accounts: Accounts,
        stalls: Stalls,
        submit: Callable[[Declaration], None],
    ) -> None:
        self._trace = trace
        self._sketch = sketch
        self._accounts = accounts
        self._stalls = stalls
        self._submit = submit
        self._in_order = threading.Lock()
        self._silent = False

    def disarm(self) -> None:
        """Declare nothing any more, in a child of the process: without a lock, it may be held."""
        self._silent = True

    def events(self) -> None:
        """Hand over what waits."""
        if self._silent:
            return
        # Whoever takes them sends them first: the end of an iteration comes after its events.
        with self._in_order:
            events = self._trace.take()
            if events is not None:
                self._submit(events)

    def graphs(self) -> None:
        """Hand over what is new of the graphs."""
        for part in self._sketch.take():
            self._submit(part)

    def end(self, iteration: int, span: tuple[int, int]) -> None:
        """Hand over all there is of an iteration, and that it is over."""
        with self._stalls.counted():
            self.events()
            self.graphs()
        self._accounts.stalled(iteration, self._stalls.settle_ns())
        self._submit(self._accounts.settle(iteration, span))

"""Merges the iteration that comes next while the one before is being written.

The merge of a large iteration runs mostly outside the interpreter's lock. It is pure, so what was
merged ahead counts when the iteration is handed out as it was then, and is merged again when not.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.values import GlobalOrder, IterationView

LEAST_EVENTS = 200_000
"""Smaller iterations are merged in less time than it takes to talk about it."""
_TICK_S = 0.05

_LOG = logging.getLogger(__name__)


class Ahead:
    """One merge ahead; `order_of` is called from one thread at a time."""

    def __init__(self, upcoming: Callable[[int], IterationView | None]) -> None:
        """Ask `upcoming` for a complete iteration of so many events that waits to be handed out."""
        self._upcoming = upcoming
        self._merging = threading.Lock()
        self._ready: tuple[IterationView, GlobalOrder] | None = None
        self._busy = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look out."""
        self._thread = threading.Thread(target=self._run, name="rankdumpd-merge-ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; may be repeated, and called without `start`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def order_of(self, view: IterationView) -> GlobalOrder:
        """Return the order of an iteration, merged already or now."""
        # While it is being merged ahead, waiting for that is the quickest way.
        with self._merging:
            ready, self._ready = self._ready, None
        if ready is not None and _same(ready[0], view):
            return ready[1]
        return merge(view)

    def writing(self, is_writing: bool) -> None:
        """Say whether an iteration is being written: only then there is something to gain."""
        if is_writing:
            self._busy.set()
        else:
            self._busy.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_TICK_S):
            if self._busy.is_set():
                try:
                    self._look()
                except Exception:
                    # Whatever it is, it will be said when the iteration's turn comes.
                    _LOG.debug("merging ahead failed", exc_info=True)

    def _look(self) -> None:
        with self._merging:
            view = self._upcoming(LEAST_EVENTS)
            if view is None or (self._ready and _same(self._ready[0], view)):
                return
            self._ready = None
            self._ready = view, merge(view)


def _same(one: IterationView, other: IterationView) -> bool:
    """Return whether the same order comes out of two views; batches are compared by identity."""
    return all(getattr(one, field) == getattr(other, field) for field in _DECISIVE)


_DECISIVE = (
    "job_id",
    "iteration",
    "events",
    "excluded",
    "late",
    "late_count",
    "spans",
    "clocks",
    "provisional",
)

"""Worker threads between what arrives and what is committed; each record leaves as an outcome.

Records travel in batches: many small ones, which one thread works off, or a large one alone, for
which there are as many threads as cores. Small ones are system calls with a little Python between
them; two threads at that would do nothing but pass the interpreter to each other.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rankdumpd.agent.values import Outcome, Parcel, dropped

_Queue: TypeAlias = "queue.SimpleQueue[Sequence[Parcel] | None]"

_log = logging.getLogger(__name__)


class Workers:
    """Threads that turn parcels into outcomes; nothing ends one but `stop`."""

    def __init__(
        self,
        count: int,
        process: Callable[[Parcel], Outcome],
        done: Callable[[Sequence[Outcome]], None],
    ) -> None:
        self._process = process
        self._done = done
        self._large: _Queue = queue.SimpleQueue()
        self._small: _Queue = queue.SimpleQueue()
        self._served = [*[self._large] * count, self._small]
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work."""
        self._threads = [
            threading.Thread(target=self._run, args=(batches,), name=f"rankdumpd-worker-{number}")
            for number, batches in enumerate(self._served)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, parcels: Sequence[Parcel]) -> None:
        """Hand over a batch; never waits."""
        (self._large if len(parcels) == 1 else self._small).put(parcels)

    def stop(self) -> None:
        """Finish what was submitted and end the threads; may be repeated."""
        for _, batches in zip(self._threads, self._served, strict=False):
            batches.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self, batches: _Queue) -> None:
        while (parcels := batches.get()) is not None:
            self._done([self._outcome(parcel) for parcel in parcels])

    def _outcome(self, parcel: Parcel) -> Outcome:
        try:
            return self._process(parcel)
        except Exception:
            ticket = parcel.ticket
            session_id = ticket.session_id
            extra = {"session": session_id}
            _log.exception("record %d of session %s", ticket.sequence, session_id, extra=extra)
            return dropped(ticket, parcel.head, "internal_error")

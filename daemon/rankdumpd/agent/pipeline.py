"""Worker threads between what arrives and what is committed; each record leaves as an outcome.

Records travel in batches: many small ones, which one thread works off, or a large one alone, for
which there are as many threads as cores. Small ones are system calls with a little Python between
them; two threads at that would do nothing but pass the interpreter to each other.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
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
        self._deadline_s = math.inf

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

    def fault(self) -> str:
        """Say that a thread has died."""
        return "" if all(t.is_alive() for t in self._threads) else "a thread that writes is dead"

    def stop(self, timeout_s: float = 60.0) -> bool:
        """Finish what was submitted, for so long, then leave the rest; return whether the threads
        have ended. May be repeated.
        """
        self._deadline_s = time.monotonic() + timeout_s
        for _, batches in zip(self._threads, self._served, strict=False):
            batches.put(None)
        for thread in self._threads:
            thread.join(max(0.0, self._deadline_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads

    def _run(self, batches: _Queue) -> None:
        while (parcels := batches.get()) is not None:
            # What is left then was not acknowledged, and is sent to the next process.
            if time.monotonic() < self._deadline_s:
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

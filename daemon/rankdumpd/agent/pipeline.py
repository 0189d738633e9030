"""Worker threads between what arrives and what is committed; each record leaves as an outcome."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from rankdumpd.agent.values import Outcome, Parcel, dropped

_log = logging.getLogger(__name__)


class Workers:
    """Threads that turn parcels into outcomes; nothing ends one but `stop`."""

    def __init__(
        self, count: int, process: Callable[[Parcel], Outcome], done: Callable[[Outcome], None]
    ) -> None:
        self._count = count
        self._process = process
        self._done = done
        self._parcels: queue.SimpleQueue[Parcel | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin to work."""
        self._threads = [
            threading.Thread(target=self._run, name=f"rankdumpd-worker-{number}")
            for number in range(self._count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, parcel: Parcel) -> None:
        """Hand over a parcel; never waits."""
        self._parcels.put(parcel)

    def stop(self) -> None:
        """Finish what was submitted and end the threads; may be repeated."""
        for _ in self._threads:
            self._parcels.put(None)
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _run(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            self._done(self._outcome(parcel))

    def _outcome(self, parcel: Parcel) -> Outcome:
        try:
            return self._process(parcel)
        except Exception:
            ticket = parcel.ticket
            _log.exception("record %d of session %s", ticket.sequence, ticket.session_id)
            return dropped(ticket, parcel.head, "internal_error")

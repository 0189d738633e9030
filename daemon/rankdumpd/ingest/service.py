"""The folder that an agent follows as long as it runs, as a room of its process.

Whatever goes wrong here is said and tried again; it never ends the process, nor holds it up.
"""

from __future__ import annotations

import logging
import threading

from rankdump.contract.errors import RankdumpError
from rankdumpd.ingest.run import Run
from rankdumpd.ingest.values import Counts, Task
from rankdumpd.lifecycle import Room

RETRY_S = 10.0
"""How long after a failure it is begun again: the folder may come with the first job."""
TELL_S = 60.0
"""How often the log says what came, where something did."""
_STOP_S = 10.0

_log = logging.getLogger(__name__)


class IngestRoom(Room):
    """Follows one folder from `start` to `drain`."""

    leave_s = Room.leave_s + _STOP_S

    def __init__(self, task: Task, *, retry_s: float = RETRY_S, tell_s: float = TELL_S) -> None:
        self._task, self._retry_s, self._tell_s = task, retry_s, tell_s
        self._asked = threading.Event()
        self._run: Run | None = None
        self._told, self._trouble = Counts(), ""
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, name=f"rankdumpd-{name}", daemon=True)
            for name, work in (("ingest", self._follow), ("ingest-log", self._tell))
        ]

    def start(self) -> None:
        """Begin to follow."""
        for thread in self._threads:
            thread.start()

    def drain(self, timeout_s: float) -> int:
        """Look a last time and finish; return 1 when that is not done by the deadline."""
        self._ask(at_once=False)
        return self._join(timeout_s)

    def stop(self) -> None:
        """Finish the files that were begun, and no others; may be repeated."""
        self._ask(at_once=True)
        self._join(_STOP_S)

    def fault(self) -> str:
        """Say that nobody follows any more."""
        following = self._threads[0]
        dead = following.ident is not None and not following.is_alive()
        return f"nobody follows {self._task.source}" if dead else ""

    def _ask(self, *, at_once: bool) -> None:
        self._asked.set()
        with self._lock:
            if self._run:
                (self._run.abort if at_once else self._run.ask)()

    def _join(self, timeout_s: float) -> int:
        following = self._threads[0]
        if following.ident is not None:
            following.join(timeout_s)
        return int(following.is_alive())

    def _follow(self) -> None:
        while not self._asked.is_set():
            try:
                self._follow_once()
            except RankdumpError as error:
                self._say_trouble(str(error))
            except Exception:
                _log.exception("the ingest of %s ended", self._task.source)
            self._asked.wait(self._retry_s)

    def _follow_once(self) -> None:
        run = Run(self._task, say=self._warn, follow=True)
        _log.info("following %s into %s", self._task.source, self._task.tree)
        self._trouble = ""
        with self._lock:
            self._run, self._told = run, Counts()
            if self._asked.is_set():
                run.ask()
        try:
            run.run()
        finally:
            with self._lock:
                self._run = None
            self._tell_of(run)

    def _say_trouble(self, text: str) -> None:
        """Say what keeps it from beginning, once as long as it is the same."""
        if text != self._trouble:
            self._trouble = text
            _log.error("cannot take over %s: %s", self._task.source, text)

    def _warn(self, text: str) -> None:
        _log.warning("left in %s: %s", self._task.source, text)

    def _tell(self) -> None:
        while not self._asked.wait(self._tell_s):
            with self._lock:
                run = self._run
            if run:
                self._tell_of(run)

    def _tell_of(self, run: Run) -> None:
        counts = run.counts
        if (counts.files, counts.failed) != (self._told.files, self._told.failed):
            self._told = counts
            _log.info(
                "took over %d files: %d bytes in, %d stored, %d linked; %d are left",
                counts.files,
                counts.bytes_in,
                counts.bytes_stored,
                counts.linked,
                counts.failed,
            )

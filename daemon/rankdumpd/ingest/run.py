"""One ingest from beginning to end, on a thread of its own: once over, or as long as a job runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdumpd.ingest.engine import Engine
from rankdumpd.ingest.follow import Follower
from rankdumpd.ingest.values import Counts, Task


class Run:
    """An ingest; it owns its tree from the moment it is made until `run` returns."""

    def __init__(
        self,
        task: Task,
        *,
        say: Callable[[str], None],
        follow: bool = False,
        until_idle_s: float | None = None,
    ) -> None:
        """ConfigError says why it may not begin; `say` is told of each file that is left."""
        self._asked, self._aborted = threading.Event(), threading.Event()
        self._engine = Engine(task, say=say, stopping=self._aborted.is_set)
        self._follower: Follower | None = None
        if follow or until_idle_s is not None:
            try:
                self._follower = Follower(
                    self._engine, stopping=self._asked.is_set, until_idle_s=until_idle_s
                )
            except BaseException:
                self._engine.close()
                raise

    @property
    def counts(self) -> Counts:
        """How it stands; may be asked from any thread."""
        return self._engine.counts

    def run(self) -> bool:
        """Take over what is there, and what comes; return whether it came to its end."""
        try:
            if self._follower:
                self._follower.run()
            self._engine.take_all(self._aborted.wait, first=self._follower is None)
            if not self._aborted.is_set():
                self._engine.finish(self._aborted.wait)
        finally:
            if self._follower:
                self._follower.close()
            self._engine.close()
        return not self._aborted.is_set()

    def ask(self) -> None:
        """Ask one that follows to end, with a last look; one that does not, to end at once."""
        self._asked.set()
        if self._follower:
            self._follower.wake()
        else:
            self.abort()

    def abort(self) -> None:
        """Ask it to begin no file any more."""
        self._aborted.set()
        self._asked.set()
        if self._follower:
            self._follower.wake()

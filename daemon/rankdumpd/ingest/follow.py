"""An ingest that goes on while the folder is written: each file once its writer has closed it.

A folder is watched before it is listed, so nothing that is closed in between is missed; where the
kernel lost events, everything is listed again.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from rankdump.contract.errors import UnavailableError
from rankdumpd.ingest import inotify
from rankdumpd.ingest.contents import kind_of
from rankdumpd.ingest.engine import Engine
from rankdumpd.ingest.inotify import Event, Inotify
from rankdumpd.ingest.settled import Waiting
from rankdumpd.ingest.source import Folder
from rankdumpd.ingest.values import Candidate, Left

QUIET_S = 30.0
"""When nothing came for so long, all is looked at again and manifests are written."""


class Follower:
    """Follows one folder, on one thread; `wake` may be called from any."""

    def __init__(
        self,
        engine: Engine,
        *,
        stopping: Callable[[], bool],
        until_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stopping = engine, stopping
        self._until_idle_s, self._clock = until_idle_s, clock
        self._inotify = Inotify()
        self._folders: dict[int, str] = {}
        self._waiting = Waiting()
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._latest_s = self._swept_s = clock()
        self._swept = False
        self._clear_s = self._latest_s
        """When sources have been left alone for long enough to be removed."""

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()
        with self._lock:
            os.close(self._woken)
            os.close(self._wake)
            self._wake = -1

    def wake(self) -> None:
        """Look at once whether to stop; nothing once closed."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake >= 0:
                os.write(self._wake, b"x")

    def run(self) -> None:
        """Follow until asked to stop, or until nothing has come for as long as was said."""
        self.begin()
        while not self._over():
            self._pause()
            self.look()

    def begin(self) -> None:
        """Watch all folders, and take what is there."""
        self._take(self._below("", first=True), first=True)

    def look(self) -> None:
        """Take what has been closed since the last time, and what waited for long enough.

        UnavailableError when the folder is gone.
        """
        if self._engine.source.gone:
            raise UnavailableError(f"{self._engine.source.path}: the folder was removed")
        events = self._inotify.read()
        if events:
            self._latest_s, self._swept = self._clock(), False
        if any(event.mask & inotify.LOST for event in events):
            self._take(self._below(""))
        else:
            self._take(self._closed(events))
        self._take(self._waiting.take(self._clock(), self._engine.source.stamp))
        if self._clock() >= self._sweep_s():
            self._sweep()
        self._clear_s = self._clock() + self._engine.clear_due()

    def _sweep(self) -> None:
        """Look at everything again: what failed may go better, and links are made unheard."""
        self._swept_s, self._swept = self._clock(), True
        self._take(self._below(""))
        self._engine.index()

    def _sweep_s(self) -> float:
        if self._swept and not self._engine.counts.failed:
            return math.inf
        return max(self._latest_s, self._swept_s) + QUIET_S

    def _over(self) -> bool:
        if self._stopping():
            return True
        limit_s = self._until_idle_s
        idle_s = self._clock() - self._latest_s
        return limit_s is not None and idle_s >= limit_s and not len(self._waiting)

    def _pause(self) -> None:
        """Wait for events, a wish to stop, or the next thing that is due."""
        due_s = min(self._sweep_s(), self._waiting.due_s(), self._clear_s)
        if self._until_idle_s is not None:
            due_s = min(due_s, self._latest_s + self._until_idle_s)
        poll = select.poll()
        poll.register(self._inotify.descriptor, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        left_s = max(0.0, due_s - self._clock())
        # A folder that is removed while it is held open tells nobody.
        poll.poll(min(left_s, QUIET_S) * 1000 + 1)

    def _take(self, candidates: Iterable[Candidate], *, first: bool = False) -> None:
        self._wait_for(self._engine.take(self._settling(candidates), first=first))

    def _settling(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        """Yield what may be taken; a file that is appended to has to be quiet for a while."""
        for candidate in candidates:
            if candidate.aged or kind_of(candidate.path.rpartition("/")[2]).tensors:
                yield candidate
            else:
                self._waiting.touch(candidate.path, self._clock())

    def _wait_for(self, young: Iterable[Left]) -> None:
        for left in young:
            self._waiting.add(left.path, left.stamp, self._clock())

    def _closed(self, events: Iterable[Event]) -> Iterator[Candidate]:
        for event in events:
            folder = self._folders.get(event.watch)
            if folder is None:
                continue
            path = f"{folder}/{event.name}" if folder else event.name
            if event.mask & inotify.GONE:
                del self._folders[event.watch]
            elif event.mask & inotify.FOLDER:
                yield from self._below(path)
            elif event.mask & (inotify.CLOSED | inotify.MOVED_HERE):
                # What was moved here may still be open elsewhere.
                yield Candidate(path, closed=bool(event.mask & inotify.CLOSED))

    def _below(self, path: str, *, first: bool = False) -> Iterator[Candidate]:
        """Yield the files below a folder, and watch all folders on the way."""
        for item in self._engine.scan(path, first=first):
            if isinstance(item, Folder):
                self._watch(item)
            else:
                yield item

    def _watch(self, folder: Folder) -> None:
        try:
            self._folders[self._inotify.watch(folder.descriptor)] = folder.path
        except OSError:
            return  # gone since it was opened

"""Watch on a folder while a job writes to it: each file is ingested once its writer has closed it.
Linux only, because the watch needs inotify.

A folder is watched before it is listed, so no file that is closed in between is missed; when the
kernel has lost events, everything is listed again. The package `watchdog` is not used: it does not
report lost events, nor files that were closed before their folder was watched, and it watches
paths, through links.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from inotify_simple import Event, INotify, flags

from rankdump.errors import ExhaustedError, UnavailableError
from rankdumpd.ingest.dump_file import CandidateFile, classify_file
from rankdumpd.ingest.engine import IngestEngine
from rankdumpd.ingest.file_copy import SettlingFiles
from rankdumpd.ingest.folder import FoundFolder

SWEEP_INTERVAL_S = 30.0
"""Seconds after the last event until the whole folder is listed again and manifests are written."""
_WATCHED_EVENTS = (
    flags.CLOSE_WRITE | flags.MOVED_TO | flags.CREATE | flags.ONLYDIR | flags.EXCL_UNLINK
)


class InotifyQueue:
    """One inotify queue with the events of many folders; not for use from several threads."""

    def __init__(self) -> None:
        """UnavailableError when this user has too many inotify queues."""
        try:
            self._inotify = INotify(nonblocking=True)
        except OSError as error:
            raise UnavailableError(_explain_limit(error, "user_instances")) from None

    def fileno(self) -> int:
        """Return the descriptor for `poll`."""
        return self._inotify.fileno()

    def watch(self, folder: int) -> int:
        """Watch an open folder; return the number that its events carry. OSError when the folder is
        gone, ExhaustedError when there are too many watches.
        """
        try:
            # Watched by its descriptor, because its path may have become a link since the folder
            # was opened.
            return self._inotify.add_watch(f"/proc/self/fd/{folder}", _WATCHED_EVENTS)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise ExhaustedError(_explain_limit(error, "user_watches")) from None
            raise

    def read(self) -> list[Event]:
        """Return the events so far, oldest first, without waiting."""
        return list(self._inotify.read(timeout=0))

    def close(self) -> None:
        """Remove all watches; may be repeated."""
        self._inotify.close()


def _explain_limit(error: OSError, limit: str) -> str:
    return (
        f"inotify: {error.strerror}; the limit is the sysctl setting fs.inotify.max_{limit}, "
        "which an administrator can raise"
    )


class FolderFollower:
    """Follows one folder in one thread; only `wake` may be called from other threads."""

    def __init__(
        self,
        engine: IngestEngine,
        *,
        stopping: Callable[[], bool],
        until_idle_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine, self._stopping = engine, stopping
        self._until_idle_s, self._clock = until_idle_s, clock
        self._events = InotifyQueue()
        self._folders: dict[int, str] = {}
        self._waiting = SettlingFiles()
        self._lock = threading.Lock()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._latest_s = self._swept_s = clock()
        self._swept = False
        self._clear_s = self._latest_s
        """Time at which the next source files are old enough to be removed."""

    def close(self) -> None:
        """Stop watching."""
        self._events.close()
        with self._lock:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_write = -1

    def wake(self) -> None:
        """Make the follower check at once whether to stop; does nothing after `close`."""
        with self._lock, contextlib.suppress(BlockingIOError):
            if self._wake_write >= 0:
                os.write(self._wake_write, b"x")

    def run(self) -> None:
        """Follow until a stop is requested, or until no event has arrived for `until_idle_s`."""
        self.begin()
        while not self._over():
            self._pause()
            self.process_events()

    def begin(self) -> None:
        """Watch all folders, and ingest the existing files."""
        self._ingest(self._scan("", first=True), first=True)

    def process_events(self) -> None:
        """Ingest the files that were closed since the last call, and those that have waited long
        enough.

        UnavailableError when the folder is gone.
        """
        if self._engine.source.is_removed:
            raise UnavailableError(f"{self._engine.source.path}: the folder was removed")
        events = self._events.read()
        if events:
            self._latest_s, self._swept = self._clock(), False
        if any(event.mask & flags.Q_OVERFLOW for event in events):
            self._ingest(self._scan(""))
        else:
            self._ingest(self._find_closed(events))
        self._ingest(self._waiting.pop_settled(self._clock(), self._engine.source.read_stamp))
        if self._clock() >= self._sweep_s():
            self._sweep()
        self._clear_s = self._clock() + self._engine.remove_due()

    def _sweep(self) -> None:
        """Scan the whole folder, because files that failed may succeed now, and links cause no
        events.
        """
        self._swept_s, self._swept = self._clock(), True
        self._ingest(self._scan(""))
        self._engine.write_manifests()

    def _sweep_s(self) -> float:
        if self._swept and not self._engine.counts.failed:
            return math.inf
        return max(self._latest_s, self._swept_s) + SWEEP_INTERVAL_S

    def _over(self) -> bool:
        if self._stopping():
            return True
        limit_s = self._until_idle_s
        idle_s = self._clock() - self._latest_s
        return limit_s is not None and idle_s >= limit_s and not len(self._waiting)

    def _pause(self) -> None:
        """Wait for events, a request to stop, or the time when the next file is due."""
        due_s = min(self._sweep_s(), self._waiting.next_due_s(), self._clear_s)
        if self._until_idle_s is not None:
            due_s = min(due_s, self._latest_s + self._until_idle_s)
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        left_s = max(0.0, due_s - self._clock())
        # Limited to the sweep interval, because the removal of a folder that is held open causes no
        # event.
        poll.poll(min(left_s, SWEEP_INTERVAL_S) * 1000 + 1)

    def _ingest(self, candidates: Iterable[CandidateFile], *, first: bool = False) -> None:
        for young in self._engine.ingest_files(self._settling(candidates), first=first):
            self._waiting.add(young.path, young.stamp, self._clock())

    def _settling(self, candidates: Iterable[CandidateFile]) -> Iterator[CandidateFile]:
        """Yield complete files; files that may be appended to have to wait."""
        for candidate in candidates:
            if candidate.aged or classify_file(candidate.path.rpartition("/")[2]).holds_tensors:
                yield candidate
            else:
                self._waiting.touch(candidate.path, self._clock())

    def _find_closed(self, events: Iterable[Event]) -> Iterator[CandidateFile]:
        for event in events:
            folder = self._folders.get(event.wd)
            if folder is None:
                continue
            path = f"{folder}/{event.name}" if folder else event.name
            if event.mask & flags.IGNORED:
                del self._folders[event.wd]
            elif event.mask & flags.ISDIR:
                yield from self._scan(path)
            elif event.mask & (flags.CLOSE_WRITE | flags.MOVED_TO):
                # A file that was moved into the folder may still be open for writing.
                yield CandidateFile(path, closed=bool(event.mask & flags.CLOSE_WRITE))

    def _scan(self, path: str, *, first: bool = False) -> Iterator[CandidateFile]:
        """Yield the files below a folder, and begin to watch all folders on the way."""
        for item in self._engine.scan(path, first=first):
            if isinstance(item, FoundFolder):
                self._watch(item)
            else:
                yield item

    def _watch(self, folder: FoundFolder) -> None:
        try:
            self._folders[self._events.watch(folder.folder.number)] = folder.path
        except OSError:
            return  # the folder is gone since it was opened

"""Whether a file is still being written: the kernel's word, else time.

A read lease is granted only while nobody has the file open for writing. It is given back at once,
or held while the file is mapped: who opens it for writing then waits until it is given back, and
cannot cut off what is being read.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager

from rankdumpd.agent.values import Stamp
from rankdumpd.ingest.values import Candidate

YOUNG_S = 2.0
"""How long a file has to stay the same where the kernel cannot tell (NFS, FUSE, another owner)."""


@contextmanager
def leased(descriptor: int) -> Generator[bool | None, None, None]:
    """Hold a lease of a file that is open for reading; yield whether nobody writes to it.

    None where this cannot be told.
    """
    try:
        # The usual signal when somebody wants to write would end the process; this one is ignored.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        yield False if error.errno == errno.EAGAIN else None
        return
    try:
        yield True
    finally:
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


class Waiting:
    """Files that are looked at again once they have stayed the same for a while."""

    def __init__(self, stay_s: float = YOUNG_S) -> None:
        self._stay_s = stay_s
        self._since: dict[str, tuple[Stamp | None, float]] = {}

    def __len__(self) -> int:
        return len(self._since)

    def add(self, path: str, stamp: Stamp | None, now_s: float) -> None:
        """Wait for a file from now on, unless it is the one that is waited for already."""
        known = self._since.get(path)
        if known is None or known[0] != stamp:
            self._since[path] = stamp, now_s

    def touch(self, path: str, now_s: float) -> None:
        """Wait for a file from now on: something has happened to it."""
        self._since[path] = None, now_s

    def due_s(self) -> float:
        """Return when the next of them is due; never when there is none."""
        first_s = min((since for _, since in self._since.values()), default=math.inf)
        return first_s + self._stay_s

    def take(self, now_s: float, stamp_now: Callable[[str], Stamp | None]) -> list[Candidate]:
        """Return those that have stayed the same, and forget them; wait on for the others."""
        due = [path for path, (_, since) in self._since.items() if now_s >= since + self._stay_s]
        return list(self._ripe(due, now_s, stamp_now))

    def _ripe(
        self, due: Iterable[str], now_s: float, stamp_now: Callable[[str], Stamp | None]
    ) -> Generator[Candidate, None, None]:
        for path in due:
            seen, _ = self._since.pop(path)
            stamp = stamp_now(path)
            if seen is None or stamp == seen:
                yield Candidate(path, aged=True)
            elif stamp is not None:
                self._since[path] = stamp, now_s


def same_file(descriptor: int, before: os.stat_result) -> bool:
    """Return whether nothing has changed an open file since its facts were asked for."""
    now = os.fstat(descriptor)
    return (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)

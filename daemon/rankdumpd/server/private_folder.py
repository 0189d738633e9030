"""Temporary folder of a process that others cannot enter. Its lock tells that the process lives, so
the next process removes those that killed ones have left.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_MAX_TRIES = 3
_LOCK_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateFolder:
    """One folder, from its creation to `remove`."""

    def __init__(self, prefix: str) -> None:
        """Make a folder; remove those of the same prefix and user whose processes are gone."""
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            lock = _lock_own_folder(path)
            if lock >= 0:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)
        self._lock = -1
        for tries_left in reversed(range(_MAX_TRIES)):
            self.path = Path(tempfile.mkdtemp(prefix=prefix))
            self._lock = _lock_own_folder(self.path)
            # A disk without locks fails each time, and nobody can lock the folder to remove it.
            if self._lock >= 0 or not tries_left:
                return
            shutil.rmtree(self.path, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder with its files; may be repeated."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _lock_own_folder(path: Path) -> int:
    """Return a locked descriptor; -1 when the folder is another user's, in use or removed."""
    with contextlib.suppress(OSError):
        lock = os.open(path, _LOCK_FLAGS)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = os.fstat(lock)
            # Another process may have removed it before it was locked here.
            if found.st_uid == os.geteuid() and found.st_nlink:
                return lock
        except BlockingIOError:
            pass
        os.close(lock)
    return -1

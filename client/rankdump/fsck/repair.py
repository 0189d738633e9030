"""Removes what a check found to be of no use; never a tensor that stands nowhere else."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rankdump.contract.errors import RefusedError
from rankdump.fsck.values import Damage, Report

LOCK = ".rankdump/agent.lock"
"""Whoever writes to a tree holds a lock on it."""
OLD_S = 600.0
"""Where the kernel cannot tell whether a file is being written, it is not when it is that old."""


def mend(root: Path, report: Report) -> Report:
    """Remove what is mendable of a report, and return what is left of it.

    RefusedError while an agent has the tree. What somebody still writes stays.
    """
    with _alone(root):
        mended = [damage for damage in report.damages if damage.mendable and _mended(root, damage)]
    left = tuple(damage for damage in report.damages if damage not in mended)
    return replace(report, damages=left, mended=tuple(mended))


@contextmanager
def _alone(root: Path) -> Generator[None, None, None]:
    try:
        lock = os.open(root / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise RefusedError(
            f"{root}: an agent writes to it; --repair is for when it has left"
        ) from None
    finally:
        os.close(lock)


def _mended(root: Path, damage: Damage) -> bool:
    try:
        with _folder(root, damage.path) as folder:
            name = damage.path.rpartition("/")[2]
            if _in_use(folder, name):
                return False
            os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


@contextmanager
def _folder(root: Path, path: str) -> Generator[int, None, None]:
    """Open the folder of a path, none of its parts through a link."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    opened = os.open(root, flags)
    try:
        for part in path.split("/")[:-1]:
            deeper = os.open(part, flags | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = deeper
        yield opened
    finally:
        os.close(opened)


def _in_use(folder: int, name: str) -> bool:
    """Return whether somebody may be writing to a file."""
    opened = os.open(
        name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=folder
    )
    try:
        # The usual signal when somebody wants to write would end the process; this one is ignored.
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        return time.time() - os.fstat(opened).st_mtime < OLD_S
    finally:
        os.close(opened)
    return False

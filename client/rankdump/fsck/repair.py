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
from rankdump.contract.hold import FOLDER, LOCK_FILE
from rankdump.fsck.values import Damage, Report

_LOCKS = Path("/proc/locks")
OLD_S = 600.0
"""Where the kernel cannot tell whether a file is being written, it is not when it is that old."""
_UNKNOWN = "whether an agent writes to the tree is not known: its disk has no locks (flock)"


def mend(root: Path, report: Report) -> Report:
    """Remove what is mendable of a report, and return what is left of it.

    RefusedError while an agent has the tree; agents that come meanwhile wait. What somebody still
    writes stays.
    """
    with _alone(root) as known:
        mended = [damage for damage in report.damages if damage.mendable and _mended(root, damage)]
    left = tuple(damage for damage in report.damages if damage not in mended)
    unchecked = report.unchecked if known else (*report.unchecked, _UNKNOWN)
    return replace(report, damages=left, mended=tuple(mended), unchecked=unchecked)


def check_left(root: Path) -> None:
    """Raise RefusedError while an agent has the tree: said before hours of reading, not after."""
    with _alone(root):
        pass


@contextmanager
def _alone(root: Path) -> Generator[bool, None, None]:
    """Have the tree alone; give whether that is known, which the disk may not be able to say."""
    lock = _opened(root)
    try:
        yield lock is None or _taken(root, lock)
    finally:
        if lock is not None:
            os.close(lock)


def _opened(root: Path) -> int | None:
    """Open what agents lock; None where none ever wrote."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with _folder(root, f"{FOLDER}/{LOCK_FILE}") as folder:
            try:
                # On NFS nobody has alone what may not be written.
                return os.open(LOCK_FILE, os.O_RDWR | flags, dir_fd=folder)
            except PermissionError:
                return os.open(LOCK_FILE, os.O_RDONLY | flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"{FOLDER}/{LOCK_FILE} cannot be opened: {error.strerror}"
        raise RefusedError(f"{root}: {what}; --repair needs it") from None


def _taken(root: Path, lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        said = f"an agent writes to it{_who(lock)}; --repair is for when it has left"
        raise RefusedError(f"{root}: {said}") from None
    except OSError:
        return False
    return True


def _who(lock: int) -> str:
    """Return the processes of this host that hold a lock, as far as the kernel says."""
    inode = str(os.fstat(lock).st_ino)
    try:
        lines = [line.split() for line in _LOCKS.read_text().splitlines()]
    except OSError:
        return ""
    held = (line for line in lines if line[1:2] == ["FLOCK"] and line[5].endswith(f":{inode}"))
    pids = sorted({int(line[4]) for line in held if int(line[4]) > 0})
    return f" (process {', '.join(map(str, pids))})" if pids else " (of another host or container)"


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

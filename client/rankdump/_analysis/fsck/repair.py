"""Repair of a tree: removal of the leftover and duplicate files that a check has found. The repair
locks the tree exclusively, follows no link, and never removes a tensor that no other file contains.
"""

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

from rankdump._analysis.fsck.damage import CheckReport, FileDamage
from rankdump._core.tree_root import READ_FLAGS, STATE_FOLDER, TREE_LOCK_FILE
from rankdump.errors import RejectedError

_KERNEL_LOCKS = Path("/proc/locks")
MIN_UNWRITTEN_AGE_S = 600.0
"""Age in seconds from which on a file counts as finished, if the kernel cannot tell whether it is
being written.
"""
_LOCKS_UNSUPPORTED = (
    "cannot tell whether an agent writes to the tree: its file system has no locks (flock)"
)


def repair_tree(root: Path, report: CheckReport) -> CheckReport:
    """Remove the mendable damage of a report, and return a report of the remaining damage.

    RejectedError while an agent uses the tree; an agent that starts during the repair waits. Files
    that are still being written are kept.
    """
    with _lock_tree(root) as locked:
        mended = [
            damage for damage in report.damages if damage.mendable and _remove_file(root, damage)
        ]
    left = tuple(damage for damage in report.damages if damage not in mended)
    unchecked = report.unchecked if locked else (*report.unchecked, _LOCKS_UNSUPPORTED)
    return replace(report, damages=left, mended=tuple(mended), unchecked=unchecked)


def check_tree_unlocked(root: Path) -> None:
    """Raise a RejectedError while an agent uses the tree; called before a check that may read for
    hours.
    """
    with _lock_tree(root):
        pass


@contextmanager
def _lock_tree(root: Path) -> Generator[bool, None, None]:
    """Lock the tree exclusively; yield False if the file system does not support locks."""
    lock = _open_lock(root)
    try:
        yield lock is None or _acquire_lock(root, lock)
    finally:
        if lock is not None:
            os.close(lock)


def _open_lock(root: Path) -> int | None:
    """Open the lock file of agents; return None if no agent has ever written the tree."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with _open_folder(root, f"{STATE_FOLDER}/{TREE_LOCK_FILE}") as folder:
            try:
                # On NFS, an exclusive lock needs write access to the file.
                return os.open(TREE_LOCK_FILE, os.O_RDWR | flags, dir_fd=folder)
            except PermissionError:
                return os.open(TREE_LOCK_FILE, os.O_RDONLY | flags, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        what = f"{STATE_FOLDER}/{TREE_LOCK_FILE} cannot be opened: {error.strerror}"
        raise RejectedError(f"{root}: {what}; --repair needs it") from None


def _acquire_lock(root: Path, lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = (
            f"an agent writes to the tree{_name_lock_holders(lock)}; run --repair after "
            "the agent has stopped"
        )
        raise RejectedError(f"{root}: {text}") from None
    except OSError:
        return False
    return True


def _name_lock_holders(lock: int) -> str:
    """Return the processes of this host that hold a lock, as far as /proc/locks lists them."""
    inode = str(os.fstat(lock).st_ino)
    try:
        lines = [line.split() for line in _KERNEL_LOCKS.read_text().splitlines()]
    except OSError:
        return ""
    held = (line for line in lines if line[1:2] == ["FLOCK"] and line[5].endswith(f":{inode}"))
    pids = sorted({int(line[4]) for line in held if int(line[4]) > 0})
    return f" (process {', '.join(map(str, pids))})" if pids else " (of another host or container)"


def _remove_file(root: Path, damage: FileDamage) -> bool:
    try:
        with _open_folder(root, damage.path) as folder:
            name = damage.path.rpartition("/")[2]
            if _is_being_written(folder, name):
                return False
            os.unlink(name, dir_fd=folder)
    except OSError:
        return False
    return True


@contextmanager
def _open_folder(root: Path, path: str) -> Generator[int, None, None]:
    """Open the folder that contains a path, without following links."""
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


def _is_being_written(folder: int, name: str) -> bool:
    """Return whether another process may be writing to a file."""
    opened = os.open(name, READ_FLAGS, dir_fd=folder)
    try:
        # When another process opens the file, the default signal SIGIO would end this process.
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return True
        return time.time() - os.fstat(opened).st_mtime < MIN_UNWRITTEN_AGE_S
    finally:
        os.close(opened)
    return False

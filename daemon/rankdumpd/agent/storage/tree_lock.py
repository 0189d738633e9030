"""Shared locks on dump trees that this process writes to, and the claim of a session on the time
that names its folder.

Several agents may write to a tree. `rankdump fsck --repair` locks it exclusively, and agents wait
for the repair as they wait for a full disk. On a file system without locks nothing waits. In CANN's
trees only the start time, in seconds, and the device number distinguish sessions, and ranks of
several hosts have equal device numbers; so the later session takes the next second.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from dataclasses import replace
from datetime import datetime, timedelta
from weakref import WeakValueDictionary

from rankdump._core.log_once import LogOnce
from rankdump._core.tree_root import STATE_FOLDER, TREE_LOCK_FILE
from rankdump._layout.tree_layouts import format_folder_owner
from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.records import FileDescriptor
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.server import state_files

_logger = logging.getLogger(__name__)
_guard = threading.Lock()
_locks_by_root: WeakValueDictionary[str, FileDescriptor] = WeakValueDictionary()
"""One descriptor of a tree's lock for all sessions, by root; closed when the last session releases
it.
"""
_warnings = LogOnce(_logger)


class TreeLock:
    """The share of one session in the lock on its tree; safe to use from several threads."""

    def __init__(self, tree: DumpTree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._held: FileDescriptor | None = None

    def acquire(self, *, make: bool = True) -> None:
        """Lock the tree, unless this session has locked it already.

        BlockingIOError while the tree is being repaired, OSError of a disk that may recover later.
        A tree that does not exist is not locked, unless `make` is true.
        """
        with self._lock:
            if self._held is None:
                self._held = _lock_tree(self._tree, make=make)

    def reacquire(self) -> bool:
        """Lock a tree that an earlier process had locked; return False if the session has to wait
        for it.
        """
        try:
            self.acquire(make=False)
        except OSError:
            return False
        return True

    def is_in_place(self) -> bool:
        """Return whether the tree is where it was locked; True of one that is not locked."""
        with self._lock:
            held = self._held
        return held is None or _is_in_place(self._tree, held)

    def release(self) -> None:
        """Release the share of this session in the lock."""
        with self._lock:
            self._held = None


def _lock_tree(tree: DumpTree, *, make: bool) -> FileDescriptor | None:
    root = str(tree.root)
    with _guard:
        held = _locks_by_root.get(root)
    # If the tree was moved or removed and created again, the old lock is on a file of the old tree.
    if held is not None and _is_in_place(tree, held):
        return held
    problem = "its lock file cannot be opened"
    try:
        held = tree.open_lock_file(STATE_FOLDER, TREE_LOCK_FILE, make=make)
        problem = "file locks are not supported there"
        fcntl.flock(held.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        message = "the tree is being repaired (rankdump fsck --repair)"
        raise BlockingIOError(errno.EAGAIN, message, root) from None
    except FileNotFoundError:
        if make:
            raise
        return None
    except OSError as error:
        if state_files.is_transient(error):
            raise
        message = f"{root} is written without the tree lock: {problem}: {error.strerror or error}"
        _warnings.log(logging.WARNING, message, about=root)
        return None
    with _guard:
        _locks_by_root[root] = held
    return held


def _is_in_place(tree: DumpTree, held: FileDescriptor) -> bool:
    try:
        found = (tree.root / STATE_FOLDER / TREE_LOCK_FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # a disk that fails says nothing about the tree
    return os.path.samestat(found, os.fstat(held.number))


_TIME_FORMAT = "%Y%m%d%H%M%S"
_MAX_SECONDS = 4096


def claim_tree_context(
    tree: DumpTree, context: TreeContext, *, job_id: str, rank: int
) -> TreeContext:
    """Return a context with a start time that no other rank or job has; the same rank gets the same
    time again.
    """
    try:
        began = datetime.strptime(context.started, _TIME_FORMAT)
        for seconds in range(_MAX_SECONDS):
            started = (began + timedelta(seconds=seconds)).strftime(_TIME_FORMAT)
            owner = format_folder_owner(rank, job_id)
            if tree.claim(STATE_FOLDER, f"{started}.{context.device}", owner):
                return replace(context, started=started)
    except (ValueError, OverflowError, OSError) as error:
        # Only logged, because a disk that cannot be written is reported when the session is opened.
        extra = {"job": job_id, "rank": rank}
        _logger.warning(
            "rank %d of job %r: no folder claimed: %s", rank, job_id, error, extra=extra
        )
    return context

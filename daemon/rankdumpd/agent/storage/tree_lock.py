"""Shared locks on dump trees that this process writes to, and the claim of a session on the second
that names its folder.

Agents may share a tree; `rankdump fsck --repair` wants it for itself, and they wait for it as
for a disk that is full. Where a disk has no such locks, nobody waits. In CANN's trees only that
second and the device's number tell sessions apart, and ranks of several hosts have devices of
one number: whoever comes second takes the next second.
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
from rankdump._layout.tree_paths import TreeContext
from rankdumpd.agent.records import FileDescriptor
from rankdumpd.agent.storage.tree import DumpTree
from rankdumpd.server import state_files

_logger = logging.getLogger(__name__)
_guard = threading.Lock()
_locks_by_root: WeakValueDictionary[str, FileDescriptor] = WeakValueDictionary()
"""By root: one descriptor for all sessions of a tree, closed when the last lets go."""
_warnings = LogOnce(_logger)


class TreeLock:
    """One session's part in the lock on its tree; safe to use from several threads."""

    def __init__(self, tree: DumpTree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._held: FileDescriptor | None = None

    def acquire(self, *, make: bool = True) -> None:
        """Hold the tree from now on; nothing happens where it is held already.

        BlockingIOError while somebody mends it, OSError of a disk that may be well again later.
        Unless it is to be made, a tree that is not there needs no lock.
        """
        with self._lock:
            if self._held is None:
                self._held = _lock_tree(self._tree, make=make)

    def reacquire(self) -> bool:
        """Hold a tree as an earlier process did; return whether that is done, or has to wait."""
        try:
            self.acquire(make=False)
        except OSError:
            return False
        return True

    def release(self) -> None:
        """Hold it no longer."""
        with self._lock:
            self._held = None


def _lock_tree(tree: DumpTree, *, make: bool) -> FileDescriptor | None:
    root = str(tree.root)
    with _guard:
        held = _locks_by_root.get(root)
    # Of a tree that was removed, and made again since, it would be the wrong file.
    if held is not None and os.fstat(held.number).st_nlink:
        return held
    try:
        held = tree.to_lock(STATE_FOLDER, TREE_LOCK_FILE, make=make)
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
        message = "file locks are not supported here; writing without the tree lock"
        _warnings.log(logging.WARNING, f"{root}: {message}: {error}", about=root)
        return None
    with _guard:
        _locks_by_root[root] = held
    return held


_TIME_FORMAT = "%Y%m%d%H%M%S"
_MAX_SECONDS = 4096


def claim_tree_context(
    tree: DumpTree, context: TreeContext, *, job_id: str, rank: int
) -> TreeContext:
    """Return a stand that no other rank or job has; the same again for the same rank."""
    try:
        began = datetime.strptime(context.started, _TIME_FORMAT)
        for seconds in range(_MAX_SECONDS):
            started = (began + timedelta(seconds=seconds)).strftime(_TIME_FORMAT)
            if tree.claim(
                STATE_FOLDER, f"{started}.{context.device}", f"rank {rank} of {job_id!r}"
            ):
                return replace(context, started=started)
    except (ValueError, OverflowError, OSError) as error:
        # A disk that cannot be written is said where the session is let in.
        who = {"job": job_id, "rank": rank}
        _logger.warning("rank %d of job %r: no folder claimed: %s", rank, job_id, error, extra=who)
    return context

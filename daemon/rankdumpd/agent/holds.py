"""That somebody of this process writes to a tree: a shared lock, as long as anybody does.

Agents may share a tree; `rankdump fsck --repair` wants it for itself, and they wait for it as for
a disk that is full. Where a disk has no such locks, nobody waits.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from weakref import WeakValueDictionary

from rankdump.contract.hold import FOLDER, LOCK_FILE
from rankdumpd import faults
from rankdumpd.agent.elements import Descriptor
from rankdumpd.agent.tree import Tree

_MOST_SAID = 1024

_log = logging.getLogger(__name__)
_guard = threading.Lock()
_locked: WeakValueDictionary[str, Descriptor] = WeakValueDictionary()
"""By root: one descriptor for all sessions of a tree, closed when the last lets go."""
_said: set[str] = set()


class Hold:
    """One session's part in the lock on its tree; safe to use from several threads."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._held: Descriptor | None = None

    def take(self, *, make: bool = True) -> None:
        """Hold the tree from now on; nothing happens where it is held already.

        BlockingIOError while somebody mends it, OSError of a disk that may be well again later.
        Unless it is to be made, a tree that is not there needs no lock.
        """
        with self._lock:
            if self._held is None:
                self._held = _lock_of(self._tree, make=make)

    def take_again(self) -> bool:
        """Hold a tree as an earlier process did; return whether that is done, or has to wait."""
        try:
            self.take(make=False)
        except OSError:
            return False
        return True

    def let_go(self) -> None:
        """Hold it no longer."""
        with self._lock:
            self._held = None


def _lock_of(tree: Tree, *, make: bool) -> Descriptor | None:
    root = str(tree.root)
    with _guard:
        held = _locked.get(root)
    # Of a tree that was removed, and made again since, it would be the wrong file.
    if held is not None and os.fstat(held.number).st_nlink:
        return held
    try:
        held = tree.to_lock(FOLDER, LOCK_FILE, make=make)
        fcntl.flock(held.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        said = "the tree is being mended (rankdump fsck --repair)"
        raise BlockingIOError(errno.EAGAIN, said, root) from None
    except FileNotFoundError:
        if make:
            raise
        return None
    except OSError as error:
        if faults.passes(error):
            raise
        _say(root, error)
        return None
    with _guard:
        _locked[root] = held
    return held


def _say(root: str, error: OSError) -> None:
    with _guard:
        known = root in _said
        if len(_said) >= _MOST_SAID:
            _said.clear()
        _said.add(root)
    if not known:
        _log.warning("%s: written to without a lock, which nobody could see: %s", root, error)

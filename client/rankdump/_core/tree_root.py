"""Root of a tree: whether it is in one of the configured folders, the names of its state folder and
its lock file, and flags for opening files that somebody else may have replaced.

Every writer of a tree holds a shared lock (flock) on the lock file; a repair takes the lock
exclusively. The state folder is not part of the dump; it also holds claims on folders and the state
of ingests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rankdump.errors import RejectedError


def split_roots(joined: str) -> tuple[str, ...]:
    """Return the folders of a setting that joins them by `:`; an empty setting allows every root.

    >>> split_roots("/var/dump:/data/dumps/")
    ('/var/dump', '/data/dumps/')
    >>> split_roots("")
    ()
    """
    return tuple(filter(None, joined.split(":")))


def check_root(root: str, allowed: Sequence[str], *, resolve: Callable[[str], str]) -> None:
    """Raise RejectedError if a root is not in one of the allowed folders.

    `resolve` follows links as the system would, also in a path that does not exist yet: a link
    inside an allowed folder may lead out of it. It is not called if every root is allowed.

    >>> check_root("/tmp/a", ["/var/dump", "/data"], resolve=str)
    Traceback (most recent call last):
    rankdump.errors.RejectedError: tree '/tmp/a' is outside of /var/dump and /data
    """
    if not allowed:
        return
    real = resolve(root)
    if any(_is_within(real, resolve(folder)) for folder in allowed):
        return
    really = f", which is {real!r}," if real != root else ""
    raise RejectedError(f"tree {root!r}{really} is outside of {' and '.join(allowed)}")


def _is_within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


STATE_FOLDER = ".rankdump"
TREE_LOCK_FILE = "agent.lock"
"""Name of the lock file, which is always empty: only the locks on it matter."""

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags of `os.open` for reading a file of a tree.

A link in the place of the file, which may lead out of the tree, is an error. A pipe in its place is
opened at once; without O_NONBLOCK the call might wait for a writer for ever. Child processes do not
inherit the descriptor. The caller finds with `os.fstat` whether it is a regular file.
"""

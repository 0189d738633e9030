"""Root of a tree: whether it lies in one of the configured folders, the names of the state folder
and the lock file in it, and flags for opening files that somebody else may have replaced.

Every writer of a tree holds a shared lock (flock) on the lock file; a repair takes the lock
exclusively. The state folder is not part of the dump; it also holds claims on folders and the state
of ingests.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from rankdump.errors import RejectedError


def split_roots(joined: str) -> tuple[str, ...]:
    """Return the folders of a setting, which are joined by `:`; an empty one allows every root.

    >>> split_roots("/var/dump:/data/dumps/")
    ('/var/dump', '/data/dumps/')
    >>> split_roots("")
    ()
    """
    return tuple(filter(None, joined.split(":")))


def check_root(root: str, allowed: Sequence[str], *, resolve: Callable[[str], str]) -> None:
    """Raise RejectedError where a root is not in one of the folders that are allowed.

    `resolve` follows links as the system would, also in a path that does not exist yet: a link
    inside an allowed folder may lead out of it. It is not called where every root is allowed.

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
"""Always empty: only the locks on it count."""

READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags of `os.open` for reading a file.

A link in its place, which may lead out of the tree, is an error. A pipe is opened at once; without
O_NONBLOCK the call would wait for a writer, maybe for ever. Child processes do not inherit the
descriptor. Whether it is a regular file at all, `os.fstat` says.
"""

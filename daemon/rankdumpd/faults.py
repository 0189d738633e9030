"""Which errors of disks and databases pass by themselves, and which do not. Pure."""

from __future__ import annotations

import errno
import sqlite3

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = _NO_SPACE | {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def passes(error: BaseException) -> bool:
    """Return whether what failed may succeed later although nobody changed what was asked."""
    if isinstance(error, OSError):
        return error.errno in _PASSING
    return isinstance(error, (sqlite3.OperationalError, MemoryError))


def no_space(error: BaseException) -> bool:
    """Return whether a disk, or the share of it that one may take, is full."""
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE
    # Of SQLITE_FULL Python 3.10 tells no more than its text.
    return isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error)


def damaged(error: BaseException) -> bool:
    """Return whether a database file is not what SQLite wrote: it never passes.

    Python has no class of its own for that; what is the caller's fault has.
    """
    return type(error) is sqlite3.DatabaseError


def said(error: BaseException) -> str:
    """Return what people read of an error: without paths, so that the same one reads the same."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__

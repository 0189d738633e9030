"""The kernel's word on what happens in folders, through libc; knows nothing of trees.

Of its own, and not `watchdog`: that one does not tell when events were lost, nor when a file was
closed before its folder was watched, and it watches by path, through links.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass

from rankdump.contract.errors import ExhaustedError, UnavailableError

CLOSED = 0x8
"""Somebody who had a file open for writing closed it."""
MOVED_HERE = 0x80
CREATED = 0x100
LOST = 0x4000
"""The kernel's queue was full: events are missing."""
GONE = 0x8000
"""The folder is no longer watched: it was removed, or its disk was."""
FOLDER = 0x4000_0000
"""The event is about a folder."""
_ONLY_FOLDERS, _NOT_REMOVED = 0x0100_0000, 0x0400_0000
_WANTED = CLOSED | MOVED_HERE | CREATED | _ONLY_FOLDERS | _NOT_REMOVED
_HEAD = struct.Struct("iIII")
_READ_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened in a watched folder."""

    watch: int
    """What `watch` returned; -1 for LOST."""
    mask: int
    name: str
    """Of the file or folder in it."""


class Inotify:
    """One queue of events; not for use from several threads."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.descriptor: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.descriptor < 0:
            raise UnavailableError(f"inotify: {_cause('user_instances')}")

    def watch(self, folder: int) -> int:
        """Watch an open folder; return the number its events bear. OSError when it is gone."""
        # By its descriptor: a path could have become a link since the folder was opened.
        path = os.fsencode(f"/proc/self/fd/{folder}")
        number: int = self._libc.inotify_add_watch(self.descriptor, path, _WANTED)
        if number >= 0:
            return number
        if ctypes.get_errno() == errno.ENOSPC:
            raise ExhaustedError(f"inotify: {_cause('user_watches')}")
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def read(self) -> list[Event]:
        """Return what has happened, oldest first, without waiting."""
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return []
        return parse(data)

    def close(self) -> None:
        """Forget all watches; may be repeated."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def parse(data: bytes) -> list[Event]:
    """Return the events in what the kernel hands over."""
    events: list[Event] = []
    at = 0
    while at < len(data):
        watch, mask, _, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        events.append(Event(watch, mask, os.fsdecode(data[at : at + length].rstrip(b"\0"))))
        at += length
    return events


def _cause(limit: str) -> str:
    number = ctypes.get_errno()
    return f"{os.strerror(number)}; the limit is fs.inotify.max_{limit}, which sysctl raises"

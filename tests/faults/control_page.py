"""Page of numbers shared by a process and the schedule player: calls to fail, and counts of hits.

Written by one process, read by the other without a lock; each number is stored atomically.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

CALLS = (
    "open",
    "write",
    "copy_file_range",
    "fsync",
    "rename",
    "replace",
    "link",
    "unlink",
    "statvfs",
    "ftruncate",
    "mkdir",
    "sqlite",
)
"""Calls that can be made to fail."""
_BYTES = 4096
_CLOCK, _STALL, _FLIP, _FLIP_AT = 0, 1, 2, 3
_CALLS_AT, _HITS_AT = 8, 64
HITS = (*CALLS, "clock", "stall", "flip", "descriptors")
"""Events that are counted."""
PLACES = ("data", "frame", "head")
"""Parts of a slab entry in which a bit is flipped."""


class ControlPage:
    """The page, mapped by both processes."""

    def __init__(self, path: str | Path) -> None:
        """Map the page of a file, which is made when it is not there."""
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(opened, _BYTES)
        self._map = mmap.mmap(opened, _BYTES)
        os.close(opened)
        self._numbers = memoryview(self._map).cast("q")

    @property
    def clock_us(self) -> int:
        """Offset of the clock of the process."""
        return self._numbers[_CLOCK]

    @clock_us.setter
    def clock_us(self, value: int) -> None:
        self._numbers[_CLOCK] = value

    @property
    def stalled(self) -> bool:
        """Whether the disk hangs."""
        return bool(self._numbers[_STALL])

    @stalled.setter
    def stalled(self, value: bool) -> None:
        self._numbers[_STALL] = int(value)

    @property
    def flips(self) -> int:
        """Bytes that are still to be flipped."""
        return self._numbers[_FLIP]

    @flips.setter
    def flips(self, value: int) -> None:
        self._numbers[_FLIP] = value

    @property
    def flip_at(self) -> str:
        """Where in their entries they are."""
        return PLACES[self._numbers[_FLIP_AT]]

    @flip_at.setter
    def flip_at(self, place: str) -> None:
        self._numbers[_FLIP_AT] = PLACES.index(place)

    def fail(self, call: str, number: int, per_mille: int) -> None:
        """Let a share of the calls fail with that number; 0 of a thousand ends it."""
        at = _CALLS_AT + 2 * CALLS.index(call)
        self._numbers[at], self._numbers[at + 1] = number, per_mille

    def failing(self, call: str) -> tuple[int, int]:
        """Return the number of an error, and how many of a thousand calls end with it."""
        at = _CALLS_AT + 2 * CALLS.index(call)
        return self._numbers[at], self._numbers[at + 1]

    def hit(self, what: str) -> None:
        """Count something that happened; two threads at once may count one."""
        self._numbers[_HITS_AT + HITS.index(what)] += 1

    def hits(self, what: str) -> int:
        """Return how often it happened."""
        return self._numbers[_HITS_AT + HITS.index(what)]

    def heal(self) -> None:
        """Let nothing fail any more."""
        self.clock_us = self.flips = 0
        self.stalled = False
        for call in CALLS:
            self.fail(call, 0, 0)

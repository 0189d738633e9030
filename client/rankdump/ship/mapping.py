"""The file of a slab, mapped and locked for as long as this process may write into it."""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.exchange import SlabPlace


class Mapping:
    """A mapped file with a POSIX lock on it, by which the agent sees that this process lives.

    The lock ends with *any* descriptor of the file in this process. There are two, the one here
    and the one that `mmap` makes for itself, and `close` ends both.
    """

    def __init__(self, place: SlabPlace) -> None:
        """Map the place; OSError or DamagedError when that cannot be done."""
        self._descriptor = os.open(place.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            facts = os.fstat(self._descriptor)
            if facts.st_size != place.length:
                raise DamagedError(
                    f"slab {place.path} of {facts.st_size} bytes, granted with {place.length}"
                )
            self.identity = (facts.st_dev, facts.st_ino)
            """Which file it is, by device and inode."""
            # Entered into this process's tables at once: a fault for each page of the first lap
            # would cost as much as the copy.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(self._descriptor, place.length, flags=flags)
            # Last: a mapping that failed would take the lock with its descriptor.
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.memory = memoryview(self._map)
        """The whole file."""

    def is_at(self, place: SlabPlace) -> bool:
        """Return whether the place is still this very file."""
        try:
            facts = Path(place.path).stat()
        except OSError:
            return False
        return (facts.st_dev, facts.st_ino) == self.identity

    def close(self) -> None:
        """Give the lock up; the memory goes with the last view of it."""
        os.close(self._descriptor)
        self.memory.release()

"""The file of one slab: made, mapped, looked after, removed. Knows nothing of what is in it.

A rank may write into the file, so it may also truncate it, and touching memory behind the end of
a file is fatal to a process (SIGBUS). Seals would forbid that, but exist only for files without
a name, which cannot go through a bind mount. So the size is checked before every reading; what
slips through in between costs this process a restart, after which the slab is refused as damaged
and every other session goes on where its ledger stands.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.exchange import SlabPlace
from rankdump.contract.slab import format_slab

FILE_MODE = 0o660
_BLOCK = bytes(4 << 20)
# struct flock of a 64-bit Linux: type, whence, start, length, pid, and room the kernel reads.
_FLOCK = struct.Struct("hhqqi4x")


class Slab:
    """A mapped slab; its memory stays readable as long as anybody has a view of it."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Map an open file and own its descriptor; OSError or ValueError when it is empty."""
        self.path = path
        self._descriptor = descriptor
        self.length = os.fstat(descriptor).st_size
        """Bytes of the whole file."""
        # Entered into this process's tables at once, as the rank does with its own.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        self.memory = memoryview(mmap.mmap(descriptor, self.length, flags=flags))
        """The whole file."""

    @property
    def place(self) -> SlabPlace:
        """Where a rank finds it."""
        return SlabPlace(str(self.path), self.length)

    def check(self) -> None:
        """DamagedError when the file is not as long as it was made, or was left."""
        if self._descriptor < 0:
            raise DamagedError(f"slab {self.path} was given up")
        found = os.fstat(self._descriptor).st_size
        if found != self.length:
            raise DamagedError(f"slab {self.path} of {self.length} bytes has {found} now")

    def in_use(self) -> bool:
        """Return whether a process that maps it lives: it holds the lock of the whole file."""
        if self._descriptor < 0:
            return False
        # Asked for this open file and not for this process, whose own ranks count as well.
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked)
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Leave the file to the next process; may be repeated."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Take the file away; the memory goes with the last view of it."""
        if self._descriptor < 0:
            return
        mine = os.fstat(self._descriptor)
        try:
            found = self.path.lstat()
            # Another slab of the session may stand there by now.
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                self.path.unlink()
        except FileNotFoundError:
            pass
        self.close()


def make_slab(path: Path, length: int, *, group: int) -> Slab:
    """Make an empty slab in the place of any other; OSError when there is no room for it.

    Every page is touched here: the first touch costs far more than a copy.
    """
    path.unlink(missing_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length)
        for offset in range(0, length, len(_BLOCK)):
            os.pwrite(descriptor, memoryview(_BLOCK)[: length - offset], offset)
        slab = Slab(path, descriptor)
        format_slab(slab.memory)
        # Last: nobody else may write before it is a slab.
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, FILE_MODE)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return slab


def find_slab(path: Path) -> Slab | None:
    """Return the slab that an earlier process left; None when there is none, OSError or ValueError
    when it cannot be mapped.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        return Slab(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise

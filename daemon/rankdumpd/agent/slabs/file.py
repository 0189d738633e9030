"""The file of one slab: made, read, looked after, removed. Knows nothing of what is in it.

A rank may write into the file, so it may also truncate it, and touching memory behind the end of
a file is fatal to a process (SIGBUS). Seals would forbid that, but exist only for files without
a name, which cannot go through a bind mount. So this side maps nothing: what it reads it copies by
`pread`, which merely comes back short, and what is known of a copy stays true of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Callable
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.exchange import SlabPlace
from rankdump.contract.slab import slab_header
from rankdumpd.agent.elements import Beside, Descriptor, read_at

FILE_MODE = 0o660
UNFINISHED = ".new"
"""End of the name of a slab that is being made."""
_BLOCK = bytes(4 << 20)
# struct flock of a 64-bit Linux: type, whence, start, length, pid, and room the kernel reads.
_FLOCK = struct.Struct("hhqqi4x")
_NUMBER = struct.Struct("=Q")


class Slab:
    """An open slab, as its reader sees it; elements outlive its removal."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Own the descriptor of an open file."""
        self.path = path
        self._file: Descriptor | None = Descriptor(descriptor)
        self.length = os.fstat(descriptor).st_size
        """Bytes of the whole file."""

    @property
    def place(self) -> SlabPlace:
        """Where a rank finds it."""
        return SlabPlace(str(self.path), self.length)

    def check(self) -> None:
        """DamagedError when the file is not as long as it was made, or was left."""
        found = os.fstat(self._opened).st_size
        if found != self.length:
            raise DamagedError(f"slab {self.path} of {self.length} bytes has {found} now")

    def read(self, offset: int, length: int) -> memoryview:
        """Return a copy of some of it; DamagedError when it is not there."""
        return read_at(self._opened, offset, length)

    def beside(self, offset: int, length: int) -> Beside:
        """Return some of it that is copied later, by whoever needs it."""
        if self._file is None:
            raise self._given_up()
        return Beside(self._file, offset, length)

    def number(self, offset: int) -> int:
        """Return a number that the rank may be changing."""
        first = None
        # Nobody promises that a copy of eight bytes is made at one blow.
        while (again := bytes(self.read(offset, _NUMBER.size))) != first:
            first = again
        return _NUMBER.unpack(again)[0]

    def put_number(self, offset: int, value: int) -> None:
        """Change a number."""
        os.pwrite(self._opened, _NUMBER.pack(value), offset)

    def in_use(self) -> bool:
        """Return whether a process that maps it lives: it holds the lock of the whole file."""
        if self._file is None:
            return False
        # Asked for this open file and not for this process, whose own ranks count as well.
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(self._file.number, fcntl.F_OFD_GETLK, asked)
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Leave the file to the next process; may be repeated."""
        self._file = None

    def remove(self) -> None:
        """Take the file away; its memory goes when no elements in it are needed any more."""
        if self._file is None:
            return
        mine = os.fstat(self._file.number)
        try:
            found = self.path.lstat()
            # Another slab of the session may stand there by now.
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                self.path.unlink()
        except FileNotFoundError:
            pass
        self.close()

    @property
    def _opened(self) -> int:
        if self._file is None:
            raise self._given_up()
        return self._file.number

    def _given_up(self) -> DamagedError:
        return DamagedError(f"slab {self.path} was given up")


def make_slab(
    path: Path, length: int, *, group: int, stopping: Callable[[], bool] = lambda: False
) -> Slab:
    """Make an empty slab in the place of any other; OSError when there is no room for it, or when
    `stopping` says that nobody needs it any more.

    Every page is touched here: the first touch costs far more than a copy. It has its name when
    all of it is there.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(unfinished, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length)
        for offset in range(0, length, len(_BLOCK)):
            if stopping():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            os.pwrite(descriptor, memoryview(_BLOCK)[: length - offset], offset)
        os.pwrite(descriptor, slab_header(length), 0)
        # Nobody else may write before it is a slab.
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, FILE_MODE)
        unfinished.rename(path)
    except BaseException:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return Slab(path, descriptor)


def find_slab(path: Path) -> Slab | None:
    """Return the slab that an earlier process left; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    return Slab(path, descriptor)

"""The file of one slab: created, read, checked for use and removed; and the slabs that are being
created, each in a thread of its own. This module does not interpret the content of a slab.

A rank may write to the file, so it may also truncate it, and touching mapped memory behind the end
of a file is fatal to a process (SIGBUS). Seals would forbid that, but exist only for files without
a name, which cannot be bind-mounted. So the agent does not map the file: it copies with `pread`,
which returns fewer bytes from a truncated file, and a copy does not change after it was checked.
Touching every page of a slab may take longer than a rank waits for an answer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rankdump._core.session_protocol import SlabPlace
from rankdump._shm.slab_format import make_slab_header
from rankdump.errors import CorruptedError, ExhaustedError
from rankdumpd.agent.records import DeferredElements, FileDescriptor, read_bytes_at

SLAB_FILE_MODE = 0o660
UNFINISHED_SUFFIX = ".new"
"""Suffix for the name of a slab that is being created."""
_BLOCK = bytes(4 << 20)
# The fields of `struct flock` on 64-bit Linux: type, whence, start, length, pid, padding.
_FLOCK = struct.Struct("hhqqi4x")
_NUMBER = struct.Struct("=Q")


class SlabFile:
    """An open slab for reading; its elements can still be read after `remove`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """Take over the descriptor of an open slab file."""
        self.path = path
        self._file: FileDescriptor | None = FileDescriptor(descriptor)
        self.length = os.fstat(descriptor).st_size
        """Size of the whole file in bytes."""

    @property
    def place(self) -> SlabPlace:
        """Path and length of the file, as the rank receives them."""
        return SlabPlace(str(self.path), self.length)

    def check(self) -> None:
        """Raise CorruptedError when the size of the file has changed, or the file is closed."""
        found = os.fstat(self._opened.number).st_size
        if found != self.length:
            raise CorruptedError(f"slab {self.path} of {self.length} bytes now has {found}")

    def read(self, offset: int, length: int) -> memoryview:
        """Return a copy of a range of the file; CorruptedError when the file is too short."""
        return read_bytes_at(self._opened.number, offset, length)

    def elements_at(self, offset: int, length: int) -> DeferredElements:
        """Return a range of the file whose bytes are copied when they are loaded."""
        return DeferredElements(self._opened, offset, length)

    def read_number(self, offset: int) -> int:
        """Return a number that the rank may be changing at the same time."""
        first = None
        # Read until two copies are equal, because a copy of eight bytes is not guaranteed to be
        # atomic.
        while (again := bytes(self.read(offset, _NUMBER.size))) != first:
            first = again
        return _NUMBER.unpack(again)[0]

    def write_number(self, offset: int, value: int) -> None:
        """Write a number at an offset."""
        os.pwrite(self._opened.number, _NUMBER.pack(value), offset)

    def is_in_use(self) -> bool:
        """Return whether a live process has mapped the slab, which it shows by a lock on the whole
        file.
        """
        if self._file is None:
            return False
        # Locks belong to open files and not to processes, so that ranks in this process are
        # noticed, too.
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(self._file.number, fcntl.F_OFD_GETLK, asked)
        return _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK

    def close(self) -> None:
        """Close the file, which stays on disk for the next process; may be repeated."""
        self._file = None

    def remove(self) -> None:
        """Remove the file; its memory is freed once none of its elements are needed any more."""
        if self._file is None:
            return
        mine = os.fstat(self._file.number)
        with contextlib.suppress(FileNotFoundError):
            found = self.path.lstat()
            # The path may belong to another slab of the same session by now.
            if (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino):
                self.path.unlink()
        self.close()

    @property
    def _opened(self) -> FileDescriptor:
        if self._file is None:
            raise CorruptedError(f"slab {self.path} is closed")
        return self._file


def make_slab(
    path: Path,
    length: int,
    *,
    group: int,
    has_journal: bool = False,
    stopping: Callable[[], bool] = lambda: False,
) -> SlabFile:
    """Create an empty slab that replaces any other at its path; OSError when there is no space for
    it, or when `stopping` returns true.

    Every page is touched here, because the first touch of a page costs far more than a copy. The
    file gets its final name when it is complete.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED_SUFFIX}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(unfinished, flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, length)
        for offset in range(0, length, len(_BLOCK)):
            if stopping():
                raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
            os.pwrite(descriptor, memoryview(_BLOCK)[: length - offset], offset)
        os.pwrite(descriptor, make_slab_header(length, has_journal=has_journal), 0)
        # The group gets access last, because no other process may write before the file is a slab.
        os.fchown(descriptor, -1, group)
        os.fchmod(descriptor, SLAB_FILE_MODE)
        unfinished.rename(path)
    except BaseException:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return SlabFile(path, descriptor)


def open_slab(path: Path) -> SlabFile | None:
    """Return the slab that an earlier process left at a path; None when there is none."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    return SlabFile(path, descriptor)


_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _PendingSlab:
    """A slab that is being created, and its result."""

    late: Callable[[str], None]
    done: threading.Event = field(default_factory=threading.Event)
    slab: SlabFile | None = None
    fault: str = ""
    waiting: int = 0
    """Number of callers that wait for the slab."""
    wanted: bool = True


class SlabMaker:
    """Creates at most one slab for each session; safe to use from several threads."""

    def __init__(self, remove: Callable[[str, SlabFile], None]) -> None:
        """`remove` is called for the slab of a session that is not wanted any more."""
        self._remove = remove
        self._lock = threading.Lock()
        self._slabs: dict[str, _PendingSlab] = {}

    def sessions(self) -> list[str]:
        """Return the sessions whose slab is being created or was not fetched yet."""
        with self._lock:
            return [name for name, pending in self._slabs.items() if pending.wanted]

    def wait_for_slab(
        self,
        session_id: str,
        make: Callable[[], SlabFile],
        *,
        timeout_s: float,
        late: Callable[[str], None],
    ) -> SlabFile | None:
        """Return the slab of a session, once; None when it is not ready within `timeout_s`.

        If the slab becomes ready later, `late` is called once, with an error text or an empty one.
        ExhaustedError when the slab cannot be created.
        """
        with self._lock:
            pending = self._slabs.get(session_id)
            if pending is None:
                pending = self._slabs[session_id] = _PendingSlab(late)
                args = (session_id, pending, make)
                threading.Thread(
                    target=self._run, args=args, name="rankdumpd-slab", daemon=True
                ).start()
            pending.late, pending.wanted = late, True
            pending.waiting += 1
        pending.done.wait(timeout_s)
        with self._lock:
            pending.waiting -= 1
            if not pending.done.is_set() or self._slabs.get(session_id) is not pending:
                return None
            del self._slabs[session_id]
        if pending.fault:
            raise ExhaustedError(pending.fault)
        return pending.slab

    def drop(self, session_id: str) -> None:
        """Remove a slab that is not wanted any more, as soon as it is created."""
        with self._lock:
            pending = self._slabs.get(session_id)
            if pending is None:
                return
            pending.wanted = False
            if pending.done.is_set():
                del self._slabs[session_id]
        if pending.done.is_set() and pending.slab is not None:
            self._remove(session_id, pending.slab)

    def join(self, timeout_s: float) -> None:
        """Wait until no slab is being created, at most `timeout_s` for each."""
        with self._lock:
            slabs = list(self._slabs.values())
        for pending in slabs:
            pending.done.wait(timeout_s)

    def _run(self, session_id: str, pending: _PendingSlab, make: Callable[[], SlabFile]) -> None:
        try:
            pending.slab = make()
        except ExhaustedError as error:
            pending.fault = str(error)
        except Exception as error:  # it is reported to the waiting callers
            _logger.exception("making the slab of session %s failed", session_id)
            pending.fault = f"internal error: {error}"
        with self._lock:
            pending.done.set()
            if not pending.wanted or (pending.fault and not pending.waiting):
                del self._slabs[session_id]
            if pending.wanted and not pending.waiting:
                # Called with the lock held, so that the next caller of `wait_for_slab` comes after
                # it.
                pending.late(pending.fault)
        if not pending.wanted and pending.slab is not None:
            self._remove(session_id, pending.slab)

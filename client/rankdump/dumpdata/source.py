"""The plain bytes of a file, read where they are asked for: packed or not, in memory or on disk.

A file is opened anew for each reading, so nothing has to be closed and values can go to other
processes; one that changed in between is damage.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from rankdump.codec import codec_of, unpacked, unpacked_start
from rankdump.codec.frames import MAX_EXPANSION, Frame, Read, frames
from rankdump.contract.errors import DamagedError

LIMIT_BYTES = 64 << 30
"""Most a packed file may unpack to."""
_START_BYTES = 16 << 20
"""Of a first frame that holds more than a header only these are unpacked, and not checked."""


class Source(Protocol):
    """Where the bytes of a plain file come from."""

    @property
    def size(self) -> int:
        """Bytes of the plain file; of one that was not looked through, the most it can have."""
        ...

    @property
    def held(self) -> int:
        """How many of them, from the first, can be read."""
        ...

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes between two offsets that the file has."""
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """A plain file that is in memory already."""

    data: memoryview

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.data)

    @property
    def held(self) -> int:
        """All of them."""
        return len(self.data)

    def read(self, start: int, end: int) -> memoryview:
        """Return a view."""
        return self.data[start:end]


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A file as it was when first looked at."""

    path: Path
    size: int
    changed_ns: int
    inode: int

    @property
    def held(self) -> int:
        """All of its bytes."""
        return self.size

    @contextmanager
    def open(self) -> Generator[BinaryIO, None, None]:
        """Open the file; DamagedError when it is another one by now."""
        with self.path.open("rb") as file:
            if _facts(self.path, os.fstat(file.fileno())) != self:
                raise DamagedError("changed while it was read")
            yield file

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes, read from the disk."""
        with self.open() as file:
            return memoryview(bytes(_reading(file)(start, end - start)))


class Packed:
    """A packed file; unpacks the frames that are asked for, and keeps the last one."""

    def __init__(self, disk: OnDisk, found: tuple[Frame, ...]) -> None:
        self._disk, self._frames = disk, found
        self._last: tuple[Frame, bytes] | None = None

    @property
    def size(self) -> int:
        """Bytes of the plain file."""
        return self._frames[-1].content_end

    @property
    def held(self) -> int:
        """All of them."""
        return self.size

    def read(self, start: int, end: int) -> memoryview:
        """Return the bytes; those of one frame are not copied."""
        touched = [f for f in self._frames if f.offset < end and start < f.content_end]
        parts = [
            memoryview(self._content(f))[max(start - f.offset, 0) : end - f.offset] for f in touched
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _content(self, frame: Frame) -> bytes:
        last = self._last
        if last is None or last[0] != frame:
            self._last = None  # not two of them at once
            packed = self._disk.read(frame.start, frame.end)
            self._last = last = frame, unpacked(frame, packed)
        return last[1]


@dataclass(frozen=True, slots=True)
class Start:
    """The first bytes of a packed file, and how large the whole can be at most."""

    data: memoryview
    size: int

    @property
    def held(self) -> int:
        """Bytes that are here."""
        return len(self.data)

    def read(self, start: int, end: int) -> memoryview:
        """Return a view."""
        return self.data[start:end]


def source_of(path: Path) -> Source:
    """Return the bytes of a file, packed if its name says so; its frames are checked."""
    disk = _facts(path, path.stat())
    if not codec_of(path.name).suffix:
        return disk
    with disk.open() as file:
        return Packed(disk, tuple(frames(_reading(file), disk.size, limit_bytes=LIMIT_BYTES)))


def start_of(path: Path) -> Source:
    """Return the bytes at the start of a file, without looking at what stands behind them."""
    disk = _facts(path, path.stat())
    return _start(disk) if codec_of(path.name).suffix else disk


def _start(disk: OnDisk) -> Start:
    with disk.open() as file:
        first = next(frames(_reading(file), disk.size, limit_bytes=LIMIT_BYTES))
        file.seek(first.start)
        if first.content_bytes <= _START_BYTES:
            held = unpacked(first, file.read(first.end - first.start))
        else:
            held = unpacked_start(file, _START_BYTES)
    behind = (disk.size - first.end) * MAX_EXPANSION
    return Start(memoryview(held), first.content_bytes + behind)


def _facts(path: Path, found: os.stat_result) -> OnDisk:
    if not stat.S_ISREG(found.st_mode):
        raise DamagedError("no regular file")
    return OnDisk(path, found.st_size, found.st_mtime_ns, found.st_ino)


def _reading(file: BinaryIO) -> Read:
    def read(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    return read

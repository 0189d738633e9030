"""Files of the published order: never through links, no more open than the tree, all or nothing."""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from rankdump.contract.errors import DamagedError


def make_folder(folder: Path) -> None:
    """Make a folder with what its parent's mode leaves; DamagedError when it is a link."""
    if folder.is_symlink():
        raise DamagedError(f"{folder} is a symbolic link: it may lead out of the tree")
    folder.mkdir(mode=open_as(folder.parent, 0o755) | 0o700, exist_ok=True)


def not_through_links(path: str, flags: int) -> int:
    """Open a file as `open(opener=...)` wants it, with what its folder's mode leaves."""
    mode = open_as(Path(path).parent, 0o644) | 0o600
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def open_as(folder: Path, mode: int) -> int:
    """Return what a folder's own mode leaves of another: the tree's owner chose who may read."""
    return folder.stat().st_mode & mode


def append(path: Path, chunks: Iterable[bytes], *, size_bytes: int) -> int:
    """Write chunks after the first bytes of a file, for good; return its new size.

    When that fails, the file is cut back: half an iteration would look like a whole one.
    """
    with open(path, "ab", buffering=0, opener=not_through_links) as file:
        file.truncate(size_bytes)
        try:
            size = size_bytes + sum(write_all(file, chunk) for chunk in chunks)
            # The book says how much there is, and outlives a power loss: so must that.
            os.fsync(file.fileno())
            return size
        except BaseException:
            file.truncate(size_bytes)
            raise


def cut(path: Path, size_bytes: int) -> None:
    """Cut a file to its first bytes, or remove it when none are left."""
    if not size_bytes:
        path.unlink(missing_ok=True)
        return
    with open(path, "r+b", opener=not_through_links) as file:
        file.truncate(size_bytes)


@contextmanager
def write_whole_with(path: Path) -> Generator[io.BufferedWriter, None, None]:
    """Open a file for writing that is there as a whole in the end, or not at all."""
    unfinished = path.with_name(f".{path.name}.tmp")
    try:
        with open(unfinished, "wb", opener=not_through_links) as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_whole(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file that is there as a whole or not at all."""
    with write_whole_with(path) as file:
        file.writelines(chunks)


def write_all(file: io.FileIO, data: bytes) -> int:
    """Write all of the data: one call may take only a part when the disk is nearly full."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]
    return len(data)

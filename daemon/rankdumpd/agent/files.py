"""What is done to single files, by descriptor."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence

from rankdump.codec import Buffer

WriteAll = Callable[[int, Sequence[Buffer]], None]
"""Writes all parts to an open file."""

_JOINED_BYTES = 64 << 10
_LOOK_BACK_BYTES = 4096
_KERNEL_BYTES = 1 << 30
"""What the kernel is asked to copy at once."""
_BLOCK_BYTES = 1 << 20
_NOT_HERE = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""What a kernel or a disk says that cannot copy within itself."""


def write_all(descriptor: int, parts: Sequence[Buffer]) -> None:
    """Write every byte of every part."""
    if len(parts) > 1 and sum(map(len, parts)) <= _JOINED_BYTES:
        parts = (b"".join(parts),)
    for part in parts:
        rest = memoryview(part)
        while len(rest):
            rest = rest[os.write(descriptor, rest) :]


def copy_end(source: int, target: int, start: int, length: int, write: WriteAll) -> None:
    """Append the last bytes of one open file to another; OSError when they are not so many.

    The kernel copies where it can, so that nothing of a large file comes into memory.
    """
    size = os.fstat(source).st_size
    if size != start + length:
        raise OSError(errno.ESTALE, f"{size} bytes in a file that had {start + length}")
    end = start + length
    while start < end:
        try:
            count = os.copy_file_range(source, target, min(end - start, _KERNEL_BYTES), start)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            block = os.pread(source, min(end - start, _BLOCK_BYTES), start)
            write(target, (block,))
            count = len(block)
        if not count:
            raise OSError(errno.ESTALE, f"a file ended {end - start} bytes early")
        start += count


def cut_torn(descriptor: int) -> int:
    """Cut off a last line without an end; return the bytes that are left."""
    size = end = os.fstat(descriptor).st_size
    while end:
        start = max(end - _LOOK_BACK_BYTES, 0)
        found = os.pread(descriptor, end - start, start).rfind(b"\n")
        end = start + found + 1 if found >= 0 else start
        if found >= 0:
            break
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def rename_new(present: str, name: str, at: int) -> None:
    """Rename a file within an open folder; FileExistsError when something has that name already.

    By a second name and the end of the first, where a disk has such; else nobody looks twice.
    """
    try:
        os.link(present, name, src_dir_fd=at, dst_dir_fd=at, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (*_NOT_HERE, errno.EMLINK):
            raise
        with contextlib.suppress(FileNotFoundError):
            os.stat(name, dir_fd=at, follow_symlinks=False)
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from None
        os.rename(present, name, src_dir_fd=at, dst_dir_fd=at)
        return
    discard(present, at)


def discard(name: str, folder: int) -> None:
    """Remove a file of an open folder, if that is possible."""
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)

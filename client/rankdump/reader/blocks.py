"""The elements of a tensor's file a block at a time, into memory that is used again and again.

What is read once and not kept needs no memory of its size: that would have to be found, cleared,
written and read, which takes longer than copying the file.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump.contract.errors import DamagedError
from rankdump.contract.npy_forms import form_of
from rankdump.reader.entry import Entry
from rankdump.reader.load import check_shape, load

_PLAIN = ".npy"
_START_BYTES = 4096
"""Longer headers are not read in blocks; nobody writes them."""


@dataclass(frozen=True, slots=True)
class FileElements:
    """The elements of an open file, in C order."""

    entry: Entry
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    descriptor: int
    data_offset: int

    @property
    def size(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    def part(self, at: int, count: int, room: memoryview) -> npt.NDArray[Any]:
        """Read as many elements from `at` on into memory for bytes, and return them there.

        DamagedError where the file ends before.
        """
        item_bytes = self.dtype.itemsize
        room = room[: count * item_bytes]
        offset = self.data_offset + at * item_bytes
        filled = 0
        try:
            while filled < len(room):
                found = os.preadv(self.descriptor, [room[filled:]], offset + filled)
                if not found:
                    raise DamagedError(f"{self.entry.path}: was cut while it was read")
                filled += found
        except OSError as error:
            raise DamagedError(f"{self.entry.path}: cannot be read: {error.strerror}") from None
        return np.frombuffer(room, dtype=self.dtype)


Opened: TypeAlias = "FileElements | npt.NDArray[Any]"


@contextmanager
def opened(entry: Entry) -> Generator[Opened, None, None]:
    """Lend the elements of a tensor: its open file where they lie there as they are, else an array.

    Raises what `load` raises.
    """
    with ExitStack() as files:
        found = None if entry.member or not entry.relative.endswith(_PLAIN) else _open(entry, files)
        yield load(entry) if found is None else found


def _open(entry: Entry, files: ExitStack) -> FileElements | None:
    try:
        path = f"{entry.root}/{entry.relative}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, descriptor)
        start = os.pread(descriptor, _START_BYTES, 0)
        form = form_of(start, os.fstat(descriptor).st_size)
    except (OSError, DamagedError, TypeError, ValueError):
        # Whoever loads it says what is wrong with it, if anything is.
        return None
    header = form.header
    if form.bfloat16 or header.fortran_order:
        return None
    check_shape(entry, header.shape)
    where = descriptor, header.data_offset
    return FileElements(entry, np.dtype(header.descr), header.shape, *where)

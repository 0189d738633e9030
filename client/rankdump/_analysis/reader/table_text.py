"""Text of tables of statistics, packed or not, and their lines from the end: what is wanted of a
table that grows is usually what came last.
"""

from __future__ import annotations

import io
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO, NamedTuple

from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.table.tree_access import TreeAccess
from rankdump._codec.file_codec import select_codec
from rankdump.errors import CorruptedError

BLOCK_BYTES = 4 << 20
MAX_HEADER_BYTES = 1 << 16
_MAX_TABLE_BYTES = 4 << 30
"""Largest unpacked size of a table that is read whole."""


def read_table(access: TreeAccess, folder: str, name: str) -> bytes:
    """Return the unpacked bytes of a table; CorruptedError when it cannot be read."""
    with named_errors(access.root / folder / name):
        packed = access.read(folder, name)
        return bytes(select_codec(name).decode(packed, limit_bytes=_MAX_TABLE_BYTES))


@contextmanager
def open_table(access: TreeAccess, folder: str, name: str) -> Generator[BinaryIO]:
    """Open a table for reading; CorruptedError when it cannot be read, packed or not.

    What is wrong in its lines is for those who read them to say, with its path.
    """
    if select_codec(name).suffix:
        yield io.BytesIO(read_table(access, folder, name))
        return
    path = access.root / folder / name
    with ExitStack() as stack:
        with named_errors(path):
            file = stack.enter_context(access.open(folder, name))
        try:
            yield file
        except OSError as error:
            raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None


class LineBlock(NamedTuple):
    """Whole lines of a file."""

    start: int
    """Place of the first one, in bytes."""
    lines: bytes


def read_blocks_backward(file: BinaryIO, *, start: int = 0) -> Iterator[LineBlock]:
    """Yield the lines behind a place in blocks, the last block first, each in the file's order.

    The last line is left out when it has no end: it is being written.
    """
    place, rest, has_end = file.seek(0, os.SEEK_END), b"", False
    while place > start:
        first = max(start, place - BLOCK_BYTES)
        file.seek(first)
        data = file.read(place - first) + rest
        place = first
        if not has_end:
            data = data[: data.rfind(b"\n") + 1]
            has_end = bool(data)
        # What comes before the first line end belongs to a line that begins in the block before.
        cut = data.find(b"\n") + 1 if place > start else 0
        rest = data[:cut]
        if len(data) > cut:
            yield LineBlock(place + cut, data[cut:])

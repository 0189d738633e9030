"""Lines of a growing text file from its end: what is wanted of it is usually what came last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

BLOCK_BYTES = 4 << 20


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

"""Memory that blocks are worked on in: in use already, so that it costs no page faults."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from rankdump.diff.measures.narrow import Floats

BLOCK = 1 << 17
"""Numbers worked on at a time.

Of fewer, calling numpy takes as long as its work; of more, five buffers leave the cache.
"""
_ROW = 1 << 13
"""Numbers in one product: of more, libraries for linear algebra start threads of their own."""
_LINE_BYTES = 64
_ROOMS = 5


class Room:
    """Five buffers of a block each, which begin where lines of the cache do."""

    def __init__(self) -> None:
        memory = np.empty(_ROOMS * BLOCK + _LINE_BYTES // 8)
        first = -memory.ctypes.data % _LINE_BYTES // 8
        self._buffers = memory[first : first + _ROOMS * BLOCK].reshape(_ROOMS, BLOCK)
        self.marks = np.empty(BLOCK, dtype=np.bool_)

    def buffers(self, count: int) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """Return the buffers, as long as that."""
        x, y, d, t, u = (each[:count] for each in self._buffers)
        return x, y, d, t, u


def product(left: Floats, right: Floats) -> float:
    """Return the scalar product of two blocks."""
    whole = left.size - left.size % _ROW
    if not whole:
        return float(left.dot(right))
    rows = np.matmul(left[:whole].reshape(-1, 1, _ROW), right[:whole].reshape(-1, _ROW, 1))
    return float(rows.sum()) + float(left[whole:].dot(right[whole:]))


_IDLE: list[Room] = []
"""As many as threads ever needed at once."""


@contextmanager
def lent() -> Generator[Room, None, None]:
    """Lend a room to one thread."""
    try:
        room = _IDLE.pop()
    except IndexError:
        room = Room()
    try:
        yield room
    finally:
        _IDLE.append(room)

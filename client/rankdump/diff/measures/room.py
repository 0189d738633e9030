"""Memory that blocks are worked on in: in use already, so that it costs no page faults."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.narrow import Floats

Numbers: TypeAlias = "npt.NDArray[np.float64] | npt.NDArray[np.float32]"
"""A block in the type that it is worked on in."""

BLOCK = 1 << 17
"""Numbers worked on at a time.

Of fewer, calling numpy takes as long as its work; of more, the buffers leave the cache.
"""
_ROW = 1 << 9
"""Numbers in one product of a row: what float32 adds up before float64 does.

Of more than 8192, libraries for linear algebra start threads of their own.
"""
_LINE_BYTES = 64
_ROOMS = 11
_KINDS = (np.float32, np.float64)
_ONES: dict[np.dtype[Any], npt.NDArray[Any]] = {
    np.dtype(kind): np.ones((1, _ROW, 1), kind) for kind in _KINDS
}


@dataclass(frozen=True, slots=True)
class Buffers:
    """What one block is worked on in."""

    x: npt.NDArray[Any]
    y: npt.NDArray[Any]
    d: npt.NDArray[Any]
    size: npt.NDArray[Any]
    free: npt.NDArray[Any]


class Room:
    """Buffers of a block each, which begin where lines of the cache do."""

    def __init__(self) -> None:
        memory = np.empty(_ROOMS * BLOCK + _LINE_BYTES // 8)
        first = -memory.ctypes.data % _LINE_BYTES // 8
        rows = memory[first : first + _ROOMS * BLOCK].reshape(_ROOMS, BLOCK)
        self._rows = rows
        self.file_a, self.file_b = (memoryview(rows[at]).cast("B") for at in (5, 6))
        """For bytes of files."""
        self.marks = np.empty(BLOCK, dtype=np.bool_)
        self._full = {
            kind: Buffers(*(row.view(kind)[:BLOCK] for row in rows[:5])) for kind in _KINDS
        }

    def buffers(self, count: int, kind: type[np.float32 | np.float64]) -> Buffers:
        """Return buffers of as many numbers, in float32 or float64."""
        full = self._full[kind]
        if count == BLOCK:
            return full
        x, y, d = full.x[:count], full.y[:count], full.d[:count]
        return Buffers(x, y, d, full.size[:count], full.free[:count])

    def wide(self, count: int) -> list[Floats]:
        """Return four more, in float64."""
        return [row[:count] for row in self._rows[7:]]


def product(left: Numbers, right: Numbers) -> float:
    """Return the scalar product of two blocks.

    Of float32 numbers a relative error of at most 2**-15 of the sum of the terms' sizes: rows of
    2**9 are added up in any order, each addition off by 2**-24, and the rows in float64. Mostly it
    is less than 2**-22.
    """
    whole = left.size - left.size % _ROW
    if whole == left.size:
        return _of_rows(left.reshape(-1, 1, _ROW), right.reshape(-1, _ROW, 1))
    rows = left[:whole].reshape(-1, 1, _ROW), right[:whole].reshape(-1, _ROW, 1)
    return _of_rows(*rows) + float(left[whole:].dot(right[whole:]))


def total(values: Numbers) -> float:
    """Return the sum of a block, as exact as a product; three times as fast as numpy's own."""
    whole = values.size - values.size % _ROW
    if whole == values.size:
        return _of_rows(values.reshape(-1, 1, _ROW), _ONES[values.dtype])
    rows = _of_rows(values[:whole].reshape(-1, 1, _ROW), _ONES[values.dtype])
    return rows + float(np.add.reduce(values[whole:], dtype=np.float64))


def _of_rows(left: Numbers, right: Numbers) -> float:
    return float(np.add.reduce(np.matmul(left, right), axis=None, dtype=np.float64))


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

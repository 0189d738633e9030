"""Sums over elements of any real type, each of which counts as a float64; for any thread."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import numpy.typing as npt

_PART = 1 << 16
"""Elements held as float64 at a time: few enough for a core's cache."""
_ROW = 1 << 13
"""Elements in one product: of more, libraries for linear algebra start threads of their own."""
_LINE = 64
"""Bytes of a line of the cache."""


def total(values: npt.NDArray[Any]) -> float:
    """Return the sum of the elements of a flat array."""
    return _with_room(_Wide.total, values)


def squares(values: npt.NDArray[Any]) -> float:
    """Return the sum of the squares of a flat array."""
    return _with_room(_Wide.squares, values)


class _Wide:
    """Where elements are put as float64: memory in use already, which costs no page faults."""

    def __init__(self) -> None:
        # Products of rows that begin within a line of the cache take a third longer.
        room = np.empty(_PART + _LINE // 8)
        first = -room.ctypes.data % _LINE // 8
        self._room = room[first : first + _PART]
        self._rows = self._room.reshape(-1, 1, _ROW)
        self._columns = self._room.reshape(-1, _ROW, 1)
        self._products = np.empty((len(self._rows), 1, 1))

    def total(self, values: npt.NDArray[Any]) -> float:
        """Return the sum of the elements."""
        return sum(float(np.add.reduce(part)) for part in self._parts(values))

    def squares(self, values: npt.NDArray[Any]) -> float:
        """Return the sum of the squares: each row multiplied with itself."""
        return sum(map(self._product, self._parts(values)))

    def _parts(self, values: npt.NDArray[Any]) -> Generator[npt.NDArray[np.float64]]:
        """Yield the elements as float64, each part in the place of the one before."""
        for at in range(0, values.size, _PART):
            part = values[at : at + _PART]
            held = self._room[: part.size]
            held[...] = part
            yield held

    def _product(self, held: npt.NDArray[np.float64]) -> float:
        if held.size <= _ROW:
            return float(held.dot(held))
        count = held.size // _ROW
        products = np.matmul(self._rows[:count], self._columns[:count], self._products[:count])
        last = held[count * _ROW :]
        return sum(products.ravel().tolist(), float(last.dot(last)))


_IDLE: list[_Wide] = []
"""As many as threads ever needed at once."""


def _with_room(work: Callable[[_Wide, npt.NDArray[Any]], float], values: npt.NDArray[Any]) -> float:
    try:
        wide = _IDLE.pop()
    except IndexError:
        wide = _Wide()
    try:
        return work(wide, values)
    finally:
        _IDLE.append(wide)

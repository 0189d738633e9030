"""Two arrays as float64, a block at a time; between blocks the elements stay in their types. Pure.

A complex element is two numbers, its parts. Whole numbers of 64 bits that float64 cannot hold are
subtracted as what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.narrow import Floats, rounded

_EXACT = 1 << 53
"""Up to here, every whole number is a float64."""

_START = 64
"""Words that are looked at before all."""


@dataclass(frozen=True, slots=True)
class Operands:
    """Two flat arrays of one length."""

    a: npt.NDArray[Any]
    b: npt.NDArray[Any]
    terms_a: str = ""
    """Type that elements of side a are rounded to; empty to leave them."""
    terms_b: str = ""

    @property
    def width(self) -> int:
        """Numbers of one element: 2 where either side is complex."""
        return 2 if "c" in (self.a.dtype.kind, self.b.dtype.kind) else 1

    @property
    def raw(self) -> bool:
        """Whether equal bytes mean equal elements."""
        return self.a.dtype == self.b.dtype and not (self.terms_a or self.terms_b)

    @property
    def whole(self) -> bool:
        """Whether both are whole numbers, and float64 may be too small for one."""
        kinds, sizes = self.a.dtype.kind + self.b.dtype.kind, (self.a.itemsize, self.b.itemsize)
        return all(kind in "iu" for kind in kinds) and 8 in sizes

    def same_bytes(self, at: int, count: int) -> bool:
        """Return whether as many elements, from `at` on, are the same on both sides byte by byte.

        Without `raw` they never are.
        """
        if not self.raw:
            return False
        a, b = self.a[at : at + count], self.b[at : at + count]
        words = np.uint64 if a.nbytes % 8 == 0 else np.uint8
        a, b = a.view(words), b.view(words)
        # Where blocks differ they mostly do so from the start.
        return bool((a[:_START] == b[:_START]).all() and (a == b).all())

    def read_a(self, at: int, room: Floats) -> None:
        """Fill a buffer with the numbers of side a, from element `at` on."""
        self._read(self.a, self.terms_a, at, room)

    def read_b(self, at: int, room: Floats) -> None:
        """Fill a buffer with the numbers of side b, from element `at` on."""
        self._read(self.b, self.terms_b, at, room)

    def _read(self, flat: npt.NDArray[Any], terms: str, at: int, room: Floats) -> None:
        part = flat[at : at + len(room) // self.width]
        numbers = room.view(np.complex128) if self.width == 2 else room
        numbers[...] = rounded(part, terms) if terms else part

    def subtract(self, at: int, x: Floats, y: Floats, out: Floats) -> None:
        """Put `x - y` into a buffer, from the numbers that those two hold."""
        np.subtract(x, y, out=out)
        if self.whole:
            a, b = self.a[at : at + len(x)], self.b[at : at + len(x)]
            if not (_small(a) and _small(b)):
                np.copyto(out, _exact_distance(a, b, out))


def flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements in C order; a view wherever that is how they lie."""
    return array.reshape(-1)


def _small(values: npt.NDArray[Any]) -> bool:
    if values.itemsize < 8 or not values.size:
        return True
    return int(values.max()) <= _EXACT and int(values.min()) >= -_EXACT


def _exact_distance(
    a: npt.NDArray[Any], b: npt.NDArray[Any], rough: Floats
) -> npt.NDArray[np.float64]:
    """Return distances that are 0 only between equal numbers: 64 unsigned bits hold any."""
    if "u" not in (a.dtype.kind, b.dtype.kind) or a.dtype.kind == b.dtype.kind:
        kind = np.result_type(a, b)
        a, b = a.astype(kind, copy=False), b.astype(kind, copy=False)
        # Two's complement: the difference of the bits is right even where that of numbers wraps.
        distance = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return distance.astype(np.float64)
    # Signed against unsigned: a number below 0 is 1 and more away from any of the other side.
    left, right = a.astype(np.uint64), b.astype(np.uint64)
    below = (a < 0) | (b < 0)
    distance = np.maximum(left, right) - np.minimum(left, right)
    return np.where(below, np.abs(rough), distance.astype(np.float64))

"""Two tensors as numbers, a block at a time; between blocks the elements stay in their types. Pure.

A complex element is two numbers, its parts. Whole numbers of 64 bits that float64 cannot hold are
subtracted as what they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.narrow import rounded
from rankdump.diff.measures.room import Numbers

_EXACT = 1 << 53
"""Up to here, every whole number is a float64."""

_START = 64
"""Words that are looked at before all."""
_NARROW = frozenset((np.dtype(np.float32), np.dtype(np.float16)))


class Elements(Protocol):
    """The elements of a tensor in C order, wherever they are."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their type, as they are stored."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def part(self, at: int, count: int, room: memoryview) -> npt.NDArray[Any]:
        """Return as many elements from `at` on, in memory of their own or in the room for them."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """Elements that are in memory."""

    flat: npt.NDArray[Any]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their type."""
        return self.flat.dtype

    @property
    def size(self) -> int:
        """How many there are."""
        return self.flat.size

    def part(self, at: int, count: int, room: memoryview) -> npt.NDArray[Any]:
        """Return a view of as many elements from `at` on."""
        return self.flat[at : at + count]


@dataclass(frozen=True, slots=True)
class Operands:
    """Two tensors of as many elements each."""

    a: Elements
    b: Elements
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
    def narrow(self) -> bool:
        """Whether every element is a float32."""
        return {self.a.dtype.newbyteorder("="), self.b.dtype.newbyteorder("=")} <= _NARROW

    @property
    def whole(self) -> bool:
        """Whether both are whole numbers, and float64 may be too small for one."""
        kinds, sizes = (
            self.a.dtype.kind + self.b.dtype.kind,
            (self.a.dtype.itemsize, self.b.dtype.itemsize),
        )
        return all(kind in "iu" for kind in kinds) and 8 in sizes

    def numbers_a(self, part: npt.NDArray[Any], room: Numbers) -> Numbers:
        """Return the numbers of a part of side a: itself, or in the room for them."""
        return self._numbers(part, self.terms_a, room)

    def numbers_b(self, part: npt.NDArray[Any], room: Numbers) -> Numbers:
        """Return the numbers of a part of side b: itself, or in the room for them."""
        return self._numbers(part, self.terms_b, room)

    def _numbers(self, part: npt.NDArray[Any], terms: str, room: Numbers) -> Numbers:
        if part.dtype == np.float16 and room.dtype == np.float32 and not terms:
            return np.take(_halves(), part.view(np.uint16), out=room, mode="wrap")
        if part.dtype == room.dtype and part.size == room.size and not terms:
            return part
        numbers = room.view(np.complex128) if self.width == 2 else room
        numbers[...] = rounded(part, terms) if terms else part
        return room

    def subtract(
        self, a: npt.NDArray[Any], b: npt.NDArray[Any], x: Numbers, y: Numbers, out: Numbers
    ) -> None:
        """Put `x - y` into a buffer, from the numbers `x` and `y` of two parts."""
        np.subtract(x, y, out=out)
        if self.whole and not (_small(a) and _small(b)):
            np.copyto(out, _exact_distance(a, b, out))


@lru_cache(maxsize=1)
def _halves() -> npt.NDArray[np.float32]:
    """Return every float16 by its bits: looking one up is twice as fast as converting it."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def same_bytes(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Return whether two parts of one type are the same byte by byte."""
    words = np.uint64 if a.nbytes % 8 == 0 else np.uint8
    a, b = a.view(words), b.view(words)
    # Where blocks differ they mostly do so from the start.
    return bool((a[:_START] == b[:_START]).all() and (a == b).all())


def flat(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the elements in C order; a view wherever that is how they lie."""
    return array.reshape(-1)


def _small(values: npt.NDArray[Any]) -> bool:
    if values.itemsize < 8 or not values.size:
        return True
    return int(values.max()) <= _EXACT and int(values.min()) >= -_EXACT


def _exact_distance(
    a: npt.NDArray[Any], b: npt.NDArray[Any], rough: Numbers
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

"""A block of numbers to what it adds to the sums, in as few passes as there can be. Pure.

Blocks come in float64, or in float32 when that is the elements' own type: half the work. A
difference is then right but for its last rounding, sums are as `room.product` says, and which
elements are close is decided as in float64. A block whose numbers are too large, too small or not
finite is refused in float32, and comes again in float64.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.closeness import Closeness
from rankdump.diff.measures.room import Buffers, Numbers, Room, product, total
from rankdump.diff.measures.sums import Sums

_ALIKE = 16.0
"""How many times the larger of two sums of squares may be the smaller one."""
_LEAST = 2.0**-120
"""Least mean square in float32: terms are off by 2**-149 at most where they underflow."""


class Kernel:
    """Adds block after block of one pair to its sums."""

    def __init__(self, room: Room, *, rtol: float, atol: float) -> None:
        self.sums = Sums()
        self._room, self._closeness = room, Closeness(rtol, atol)
        self._zeros = False
        """Whether the block before had zeros on side b; where one has, most have."""

    @property
    def narrow(self) -> bool:
        """Whether blocks may come in float32."""
        return self._closeness.narrow

    def add_same(self, at: int, x: Numbers) -> bool:
        """Add numbers that are the same on both sides; the first is number `at` of the pair.

        Returns whether it could; nothing is added otherwise.
        """
        squares = product(x, x)
        if _refused(x, squares):
            return False
        if not math.isfinite(squares):
            x, _, _ = self._finite(at, x, x, x)
            squares = product(x, x)
        sums = self.sums
        sums.finite += x.size
        marks = np.not_equal(x, 0, out=self._room.marks[: x.size])
        sums.referred += int(np.count_nonzero(marks))
        sums.squares_a += squares
        sums.squares_b += squares
        sums.products += squares
        self._add_totals(x, x)
        return True

    def add(self, at: int, x: Numbers, y: Numbers, buffers: Buffers) -> bool:
        """Add numbers and their differences, `buffers.d`; what the buffers held is lost.

        Returns whether it could; nothing is added otherwise.
        """
        d = buffers.d
        squares = product(d, d), product(x, x), product(y, y)
        if _refused(d, *squares):
            return False
        if not math.isfinite(squares[0]):
            x, y, d = self._finite(at, x, y, d)
            squares = product(d, d), product(x, x), product(y, y)
        if not x.size:
            return True
        sums = self.sums
        sums.finite += x.size
        self._add_products(x, y, *squares)
        # Once it is infinite, it stays so.
        if self._add_totals(x, y) and sums.entropy < math.inf:
            self._add_entropy(x, y)
        np.abs(d, out=d)
        size = np.abs(y, out=buffers.size[: y.size])
        free = buffers.free[: y.size]
        self._add_unequal(x, y, d, size, free)
        self._add_relative(d, size, free)
        return True

    def _add_products(
        self, x: Numbers, y: Numbers, squares: float, own: float, other: float
    ) -> None:
        sums = self.sums
        sums.squares += squares
        sums.squares_a += own
        sums.squares_b += other
        if other / _ALIKE < own < other * _ALIKE:
            # It follows from the others, and nothing is cancelled where they are of one size.
            sums.products += (own + other - squares) / 2
        else:
            sums.products += product(x, y)

    def _add_totals(self, x: Numbers, y: Numbers) -> bool:
        """Add up both sides for as long as neither has a negative number; return whether so."""
        sums = self.sums
        if sums.negative or not x.size:
            return False
        if min(np.minimum.reduce(x), np.minimum.reduce(y)) < 0:
            sums.negative = True
            return False
        # Of two distributions that are nearly the same, most of the divergence is cancelled.
        sums.total_a += float(np.add.reduce(x, dtype=np.float64))
        sums.total_b += float(np.add.reduce(y, dtype=np.float64))
        return True

    def _add_entropy(self, x: Numbers, y: Numbers) -> None:
        wide_x, wide_y, t, u = self._room.wide(x.size)
        np.copyto(wide_x, x)
        np.copyto(wide_y, y)
        if np.minimum.reduce(x) > 0:
            np.divide(wide_x, wide_y, out=t)
        else:
            # Where x is 0 the term is 0 whatever y is: with 1 in its place the logarithm is one.
            np.copyto(u, np.equal(x, 0, out=self._room.marks[: x.size]))
            np.add(wide_x, u, out=t)
            np.add(wide_y, u, out=u)
            np.divide(t, u, out=t)
        entropy = product(wide_x, np.log(t, out=t))
        if not math.isfinite(entropy):
            # Either y is 0 where x is not, or the ratio of two numbers is none.
            kept = wide_x > 0
            ratios = np.log(wide_x[kept]) - np.log(wide_y[kept])
            entropy = product(wide_x[kept], ratios)
        self.sums.entropy += entropy

    def _add_unequal(
        self, x: Numbers, y: Numbers, d: Numbers, size: Numbers, free: Numbers
    ) -> None:
        """Add absolute differences, all of them and those of numbers that are not close."""
        sums = self.sums
        first = int(d.argmax())
        sums.absolute += total(d)
        largest = float(d[first])
        sums.max_absolute = max(sums.max_absolute, largest)
        marks = self._room.marks[: d.size]
        unequal = self._closeness.mark_unequal(x, y, d, size, free, marks)
        if not unequal:
            return
        # A product costs the same whichever elements are marked; picking them does not.
        np.copyto(free, marks)
        if not marks[first]:
            largest = float(np.multiply(d, free).max())
        sums.unequal += unequal
        sums.unequal_absolute += product(d, free)
        sums.max_unequal = max(sums.max_unequal, largest)

    def _add_relative(self, d: Numbers, size: Numbers, free: Numbers) -> None:
        """Add relative differences where there is a reference; what the buffers held is lost."""
        referred, relative = d.size, math.inf
        if not self._zeros:
            np.divide(d, size, out=free)
            relative = total(free)
        if not math.isfinite(relative):
            marks = np.not_equal(size, 0, out=self._room.marks[: d.size])
            referred = int(np.count_nonzero(marks))
            self._zeros = referred < d.size
            np.copyto(free, marks)
            d *= free
            # 1 in the place of each 0.
            size += np.subtract(1, free, out=free)
            np.divide(d, size, out=free)
            relative = total(free)
        if _refused(free, relative):
            wide = d.astype(np.float64) / size
            relative, free = total(wide), wide
        sums = self.sums
        sums.relative += relative
        sums.referred += referred
        if referred:
            sums.max_relative = max(sums.max_relative, float(np.maximum.reduce(free)))

    def _finite(
        self, at: int, x: Numbers, y: Numbers, d: Numbers
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Count what is not finite, and return the numbers that are on both sides."""
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        both = finite_x & finite_y
        if both.all():
            # Their squares are too large for a float64; that is what the sums say then.
            return x, y, d
        nans = np.isnan(x) & np.isnan(y)
        apart = ~(both | nans | (x == y))
        sums = self.sums
        sums.nonfinite_a += int(np.count_nonzero(~finite_x))
        sums.nonfinite_b += int(np.count_nonzero(~finite_y))
        sums.nan_both += int(np.count_nonzero(nans))
        found = int(np.count_nonzero(apart))
        if found and sums.first_apart is None:
            sums.first_apart = at + int(apart.argmax())
        sums.apart += found
        return x[both], y[both], d[both]


def _refused(numbers: Numbers, *sums: float) -> bool:
    """Return whether float32 is too narrow for the terms of these sums."""
    least = numbers.size * _LEAST
    return numbers.dtype == np.float32 and not all(least <= each < math.inf for each in sums)

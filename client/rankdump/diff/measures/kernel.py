"""A block of numbers to what it adds to the sums, in as few passes as there can be. Pure."""

from __future__ import annotations

import math

import numpy as np

from rankdump.diff.measures.narrow import Floats
from rankdump.diff.measures.room import Room, product
from rankdump.diff.measures.sums import Sums

_ALIKE = 16.0
"""How many times the larger of two sums of squares may be the smaller one."""


class Kernel:
    """Adds block after block of one pair to its sums."""

    def __init__(self, room: Room, *, rtol: float, atol: float) -> None:
        self.sums = Sums()
        self._room, self._rtol, self._atol = room, rtol, atol
        self._zeros = False
        """Whether the block before had zeros on side b; where one has, most have."""

    def add_same(self, at: int, x: Floats) -> None:
        """Add numbers that are the same on both sides; the first is number `at` of the pair."""
        squares = product(x, x)
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

    def add(self, at: int, x: Floats, y: Floats, d: Floats) -> None:
        """Add numbers and their differences `d`; what the buffers held is lost."""
        squares = product(d, d)
        if not math.isfinite(squares):
            x, y, d = self._finite(at, x, y, d)
            squares = product(d, d)
        if not x.size:
            return
        sums = self.sums
        sums.finite += x.size
        self._add_products(squares, x, y)
        if self._add_totals(x, y):
            self._add_entropy(x, y)
        np.abs(d, out=d)
        size = np.abs(y, out=y)
        self._add_unequal(d, size, x)
        self._add_relative(d, size, x)

    def _add_products(self, squares: float, x: Floats, y: Floats) -> None:
        sums, own, other = self.sums, product(x, x), product(y, y)
        sums.squares += squares
        sums.squares_a += own
        sums.squares_b += other
        if other / _ALIKE < own < other * _ALIKE:
            # It follows from the others, and nothing is cancelled where they are of one size.
            sums.products += (own + other - squares) / 2
        else:
            sums.products += product(x, y)

    def _add_totals(self, x: Floats, y: Floats) -> bool:
        """Add up both sides for as long as neither has a negative number; return whether so."""
        sums = self.sums
        if sums.negative or not x.size:
            return False
        if min(np.minimum.reduce(x), np.minimum.reduce(y)) < 0:
            sums.negative = True
            return False
        sums.total_a += float(np.add.reduce(x))
        sums.total_b += float(np.add.reduce(y))
        return True

    def _add_entropy(self, x: Floats, y: Floats) -> None:
        _, _, _, t, u = self._room.buffers(x.size)
        if np.minimum.reduce(x) > 0:
            np.divide(x, y, out=t)
        else:
            # Where x is 0 the term is 0 whatever y is: with 1 in its place the logarithm is one.
            np.copyto(u, np.equal(x, 0, out=self._room.marks[: x.size]))
            np.add(x, u, out=t)
            np.add(y, u, out=u)
            np.divide(t, u, out=t)
        entropy = product(x, np.log(t, out=t))
        if not math.isfinite(entropy):
            # Either y is 0 where x is not, or the ratio of two numbers is none.
            kept = x > 0
            entropy = product(x[kept], np.log(x[kept]) - np.log(y[kept]))
        self.sums.entropy += entropy

    def _add_unequal(self, d: Floats, size: Floats, free: Floats) -> None:
        """Add absolute differences, all of them and those of numbers that are not close."""
        sums = self.sums
        first = int(d.argmax())
        total, largest = float(np.add.reduce(d)), float(d[first])
        sums.absolute += total
        sums.max_absolute = max(sums.max_absolute, largest)
        bound = np.multiply(size, self._rtol, out=free)
        bound += self._atol
        marks = np.greater(d, bound, out=self._room.marks[: d.size])
        unequal = int(np.count_nonzero(marks))
        if not unequal:
            return
        if unequal < d.size:
            # A product costs the same whichever elements are marked; picking them does not.
            np.copyto(free, marks)
            total = product(d, free)
            if not marks[first]:
                largest = float(np.multiply(d, free, out=free).max())
        sums.unequal += unequal
        sums.unequal_absolute += total
        sums.max_unequal = max(sums.max_unequal, largest)

    def _add_relative(self, d: Floats, size: Floats, free: Floats) -> None:
        """Add relative differences where there is a reference; what the buffers held is lost."""
        referred, total = d.size, math.inf
        if not self._zeros:
            np.divide(d, size, out=free)
            total = float(np.add.reduce(free))
        if not math.isfinite(total):
            marks = np.not_equal(size, 0, out=self._room.marks[: d.size])
            referred = int(np.count_nonzero(marks))
            self._zeros = referred < d.size
            np.copyto(free, marks)
            d *= free
            # 1 in the place of each 0.
            size += np.subtract(1, free, out=free)
            np.divide(d, size, out=free)
            total = float(np.add.reduce(free))
        sums = self.sums
        sums.relative += total
        sums.referred += referred
        if referred:
            sums.max_relative = max(sums.max_relative, float(np.maximum.reduce(free)))

    def _finite(self, at: int, x: Floats, y: Floats, d: Floats) -> tuple[Floats, Floats, Floats]:
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

"""Which numbers of a block are not close. Pure.

In float32 the two sides of `d <= atol + rtol * size` are off by some roundings of 2**-24 each. So
they are compared twice, with a bound that is surely too low and with one that is surely too high;
where the answers are not the same, the numbers are compared in float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.diff.measures.room import Numbers

_LOWER = 1 - 2.0**-21
"""Of the bound: the roundings of both tolerances, a product, a sum and a difference are less."""
_HIGHER = 1 + 2.0**-20
"""Of the lower bound; as much above the bound."""
_LEAST = 2.0**-100
"""Least tolerance in float32: what underflows is nothing beside it."""


@dataclass(frozen=True, slots=True)
class Closeness:
    """When numbers are close, as numpy's isclose."""

    rtol: float
    atol: float

    @property
    def narrow(self) -> bool:
        """Whether float32 does for these tolerances."""
        return self.atol >= _LEAST and (not self.rtol or self.rtol >= _LEAST)

    def mark_unequal(
        self,
        x: Numbers,
        y: Numbers,
        d: Numbers,
        size: Numbers,
        bound: Numbers,
        marks: npt.NDArray[np.bool_],
    ) -> int:
        """Mark the numbers that are not close, and return how many there are.

        `d` is `abs(x - y)`, `size` is `abs(y)`; what the buffer `bound` held is lost.
        """
        low = _LOWER if d.dtype == np.float32 else 1.0
        np.multiply(size, self.rtol * low, out=bound)
        bound += self.atol * low
        unequal = int(np.count_nonzero(np.greater(d, bound, out=marks)))
        if low == 1.0 or not unequal:
            return unequal
        bound *= _HIGHER
        sure = np.greater(d, bound)
        if np.count_nonzero(sure) == unequal:
            return unequal
        return self._settle(x, y, marks, sure)

    def _settle(
        self, x: Numbers, y: Numbers, marks: npt.NDArray[np.bool_], sure: npt.NDArray[Any]
    ) -> int:
        doubtful = np.flatnonzero(marks != sure)
        left, right = x[doubtful].astype(np.float64), y[doubtful].astype(np.float64)
        marks[doubtful] = np.abs(left - right) > self.atol + self.rtol * np.abs(right)
        return int(np.count_nonzero(marks))

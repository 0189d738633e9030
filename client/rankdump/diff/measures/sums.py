"""What blocks of numbers add up to, and the measures that follow. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankdump.diff.values import Measures


@dataclass(slots=True)
class Sums:
    """Sums over the numbers that are finite on both sides, in float64; and counts of the others.

    x is a number of side a, y the one of side b at the same place, the reference.
    """

    finite: int = 0
    """Numbers that take part in the sums."""
    absolute: float = 0.0
    """Sum of |x - y|."""
    max_absolute: float = 0.0
    squares: float = 0.0
    """Sum of (x - y) squared."""
    squares_a: float = 0.0
    squares_b: float = 0.0
    products: float = 0.0
    """Sum of x y."""
    relative: float = 0.0
    """Sum of |x - y| / |y| where y is not 0."""
    max_relative: float = 0.0
    referred: int = 0
    """Numbers y that are not 0."""
    unequal: int = 0
    """Finite ones that are not close."""
    unequal_absolute: float = 0.0
    max_unequal: float = 0.0
    negative: bool = False
    """Whether any x or y is below 0; the sums below are of no use then."""
    total_a: float = 0.0
    total_b: float = 0.0
    entropy: float = 0.0
    """Sum of x log(x / y)."""
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    apart: int = 0
    """Places where one side is not finite, and the other has not the same there."""
    nan_both: int = 0
    first_apart: int | None = None
    """The first such place."""

    def measures(self, count: int, *, equal_nan: bool) -> Measures:
        """Return the measures of as many numbers."""
        norm, norm_b = math.sqrt(self.squares), math.sqrt(self.squares_b)
        return Measures(
            count=count,
            unequal=self.unequal + self.apart + (0 if equal_nan else self.nan_both),
            max_absolute=self.max_absolute if self.finite else math.nan,
            max_relative=self.max_relative if self.referred else math.nan,
            mean_absolute=_ratio(self.absolute, self.finite),
            mean_relative=_ratio(self.relative, self.referred),
            cosine=self._cosine(),
            rmse=norm / math.sqrt(self.finite) if self.finite else math.nan,
            relative_euclidean=_ratio(norm, norm_b),
            kl_divergence=self._divergence(),
            mean_absolute_unequal=self.unequal_absolute / self.unequal if self.unequal else 0.0,
            max_absolute_unequal=self.max_unequal,
            nonfinite_a=self.nonfinite_a,
            nonfinite_b=self.nonfinite_b,
            nonfinite_apart=self.apart,
        )

    def _cosine(self) -> float:
        if not self.finite:
            return math.nan
        if self.squares_a == self.squares_b:
            # Without roots nothing is rounded: a vector is at 1 from itself, not just below.
            scale = self.squares_b
        else:
            scale = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        if not scale:
            return math.nan if self.squares_a or self.squares_b else 1.0
        return max(-1.0, min(1.0, self.products / scale)) if math.isfinite(scale) else math.nan

    def _divergence(self) -> float:
        totals = self.total_a, self.total_b
        if self.negative or not all(0 < total < math.inf for total in totals):
            return math.nan
        parted = self.entropy / self.total_a - (math.log(self.total_a) - math.log(self.total_b))
        # Rounding leaves two equal distributions a little below 0, where none can be.
        return 0.0 if parted < 0 else parted


def _ratio(total: float, count: float) -> float:
    return total / count if count else math.nan

"""Measures of the difference of two tensors, computed in few passes over blocks. Pure.

A block of either side stays in the cache until it is finished, so only a few blocks of memory are
needed beyond the two tensors, for any size and type. Blocks are in float64, or in float32 if that
is the element type, which is half the work. A difference in float32 is then exact up to its last
rounding, and sums are as exact as `compute_dot_product` states. A block with numbers that are too
large, too small or not finite is rejected in float32 and processed again in float64.

Closeness is decided as in float64. In float32, both sides of `d <= atol + rtol * size` have a few
rounding errors of 2**-24. So they are compared twice, with a bound that is certainly too low and
with one that is certainly too high; where the results differ, the numbers are compared in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.report import DifferenceMeasures, ElementTolerances
from rankdump._analysis.compare.tensor_blocks import (
    BLOCK_NUMBERS,
    NARROW_HALF_UNITS,
    ArrayElements,
    BlockBuffers,
    BlockWorkspace,
    FloatBlock,
    OperandPair,
    TensorElements,
    borrow_workspace,
    compute_block_sum,
    compute_dot_product,
    has_same_bytes,
    select_comparison_dtype,
)

_LOWER_BOUND_FACTOR = 1 - 2.0**-21
"""Factor from the exact bound to the lower bound; it exceeds the rounding of five float32
operations.
"""
_UPPER_BOUND_FACTOR = 1 + 2.0**-20
"""Factor from the lower bound to the upper one, which is as far above the exact bound as the lower
one is below.
"""
_MIN_FLOAT32_TOLERANCE = 2.0**-100
"""Smallest tolerance for which float32 is used: numbers that underflow are negligible compared with
it.
"""

_MAX_SQUARES_RATIO = 16.0
"""Largest ratio of two sums of squares for which the scalar product is computed from them."""
_MIN_FLOAT32_MEAN_SQUARE = 2.0**-120
"""Smallest mean square for which float32 is used: terms that underflow have an error of at most
2**-149.
"""
_MIN_FACTOR_NUMBERS = 8
"""Smallest number of numbers that may count as a multiple, because a few may be one by chance."""
_MAX_FACTOR_REST = 1e-6
"""Largest share of the squares that may remain besides a multiple; it is 0.001 of the norm."""


@dataclass(frozen=True, slots=True)
class ClosenessTest:
    """Test for closeness by the rule of numpy's isclose."""

    rtol: float
    atol: float

    @property
    def fits_float32(self) -> bool:
        """Whether float32 is precise enough for these tolerances."""
        return self.atol >= _MIN_FLOAT32_TOLERANCE and (
            not self.rtol or self.rtol >= _MIN_FLOAT32_TOLERANCE
        )

    def mark_unequal(
        self,
        x: FloatBlock,
        y: FloatBlock,
        d: FloatBlock,
        size: FloatBlock,
        bound: FloatBlock,
        marks: npt.NDArray[np.bool_],
    ) -> int:
        """Mark the numbers that are not close, and return how many there are.

        `d` is `abs(x - y)`, `size` is `abs(y)`; the buffer `bound` is overwritten.
        """
        low = _LOWER_BOUND_FACTOR if d.dtype == np.float32 else 1.0
        np.multiply(size, self.rtol * low, out=bound)
        bound += self.atol * low
        unequal = int(np.count_nonzero(np.greater(d, bound, out=marks)))
        if low == 1.0 or not unequal:
            return unequal
        bound *= _UPPER_BOUND_FACTOR
        sure = np.greater(d, bound)
        if np.count_nonzero(sure) == unequal:
            return unequal
        return self._decide_doubtful(x, y, marks, sure)

    def _decide_doubtful(
        self, x: FloatBlock, y: FloatBlock, marks: npt.NDArray[np.bool_], sure: npt.NDArray[Any]
    ) -> int:
        doubtful = np.flatnonzero(marks != sure)
        left, right = x[doubtful].astype(np.float64), y[doubtful].astype(np.float64)
        marks[doubtful] = np.abs(left - right) > self.atol + self.rtol * np.abs(right)
        return int(np.count_nonzero(marks))


@dataclass(slots=True)
class DifferenceSums:
    """Sums in float64 over the numbers that are finite on both sides, and counts of all others.

    x is a number of side a, y the number at the same place of side b, which is the reference.
    """

    finite_count: int = 0
    """Number of numbers that the sums include."""
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
    nonzero_references: int = 0
    """Number of y that are not 0."""
    unequal: int = 0
    """Number of finite numbers that are not close."""
    unequal_absolute: float = 0.0
    max_unequal: float = 0.0
    has_negative: bool = False
    """Whether any x or y is below 0; in that case the next three sums are not used."""
    total_a: float = 0.0
    total_b: float = 0.0
    entropy: float = 0.0
    """Sum of x log(x / y)."""
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    nonfinite_apart: int = 0
    """Number of places where the sides differ and at least one of them is not finite."""
    nan_both: int = 0
    first_nonfinite_apart: int | None = None
    """First of the places that `nonfinite_apart` counts."""

    def compute_measures(self, count: int, *, equal_nan: bool) -> DifferenceMeasures:
        """Return the measures of `count` numbers."""
        norm, norm_b = math.sqrt(self.squares), math.sqrt(self.squares_b)
        return DifferenceMeasures(
            count=count,
            unequal=self.unequal + self.nonfinite_apart + (0 if equal_nan else self.nan_both),
            max_absolute=self.max_absolute if self.finite_count else math.nan,
            max_relative=self.max_relative if self.nonzero_references else math.nan,
            mean_absolute=_divide_or_nan(self.absolute, self.finite_count),
            mean_relative=_divide_or_nan(self.relative, self.nonzero_references),
            cosine=self._cosine(),
            rmse=norm / math.sqrt(self.finite_count) if self.finite_count else math.nan,
            relative_euclidean=_divide_or_nan(norm, norm_b),
            kl_divergence=self._divergence(),
            mean_absolute_unequal=self.unequal_absolute / self.unequal if self.unequal else 0.0,
            max_absolute_unequal=self.max_unequal,
            nonfinite_a=self.nonfinite_a,
            nonfinite_b=self.nonfinite_b,
            nonfinite_apart=self.nonfinite_apart,
        )

    def find_factor(self) -> float:
        """Return the factor if side a is a multiple of side b; NaN if it is not."""
        has_squares = all(0 < each < math.inf for each in (self.squares_a, self.squares_b))
        if self.finite_count < _MIN_FACTOR_NUMBERS or not has_squares:
            return math.nan
        factor = self.products / self.squares_b
        rest = 1 - factor * self.products / self.squares_a
        return factor if rest < _MAX_FACTOR_REST else math.nan

    def _cosine(self) -> float:
        if not self.finite_count:
            return math.nan
        if self.squares_a == self.squares_b:
            # Without square roots, the cosine of a vector with itself is exactly 1.
            scale = self.squares_b
        else:
            scale = math.sqrt(self.squares_a) * math.sqrt(self.squares_b)
        if not scale:
            return math.nan if self.squares_a or self.squares_b else 1.0
        return max(-1.0, min(1.0, self.products / scale)) if math.isfinite(scale) else math.nan

    def _divergence(self) -> float:
        totals = self.total_a, self.total_b
        if self.has_negative or not all(0 < total < math.inf for total in totals):
            return math.nan
        found = self.entropy / self.total_a - (math.log(self.total_a) - math.log(self.total_b))
        # A divergence is never negative, but rounding may make that of equal distributions
        # negative.
        return 0.0 if found < 0 else found


def _divide_or_nan(total: float, count: float) -> float:
    return total / count if count else math.nan


class BlockAccumulator:
    """Adds the blocks of one pair to its sums."""

    def __init__(self, workspace: BlockWorkspace, *, rtol: float, atol: float) -> None:
        self.sums = DifferenceSums()
        self._workspace, self.closeness = workspace, ClosenessTest(rtol, atol)
        self._zeros = False
        """Whether side b had zeros in the last block, because then it probably has zeros in the
        next one, too.
        """

    def add_same(self, at: int, x: FloatBlock) -> bool:
        """Add numbers that are equal on both sides; the first one is number `at` of the pair.

        Return False and add nothing if float32 is too narrow for them.
        """
        squares = compute_dot_product(x, x)
        if _exceeds_float32(x, squares):
            return False
        if not math.isfinite(squares):
            x, _, _ = self._finite(at, x, x, x)
            squares = compute_dot_product(x, x)
        sums = self.sums
        sums.finite_count += x.size
        marks = np.not_equal(x, 0, out=self._workspace.marks[: x.size])
        sums.nonzero_references += int(np.count_nonzero(marks))
        sums.squares_a += squares
        sums.squares_b += squares
        sums.products += squares
        self._add_totals(x, x)
        return True

    def add(self, at: int, x: FloatBlock, y: FloatBlock, buffers: BlockBuffers) -> bool:
        """Add numbers and their differences, `buffers.d`; the buffers are overwritten.

        Return False and add nothing if float32 is too narrow for them.
        """
        d = buffers.d
        squares = compute_dot_product(d, d), compute_dot_product(x, x), compute_dot_product(y, y)
        if _exceeds_float32(d, *squares):
            return False
        if not math.isfinite(squares[0]):
            x, y, d = self._finite(at, x, y, d)
            squares = (
                compute_dot_product(d, d),
                compute_dot_product(x, x),
                compute_dot_product(y, y),
            )
        if not x.size:
            return True
        sums = self.sums
        sums.finite_count += x.size
        self._add_products(x, y, *squares)
        # An entropy that is infinite stays infinite.
        if self._add_totals(x, y) and sums.entropy < math.inf:
            self._add_entropy(x, y)
        np.abs(d, out=d)
        size = np.abs(y, out=buffers.size[: y.size])
        free = buffers.free[: y.size]
        self._add_unequal(x, y, d, size, free)
        self._add_relative(d, size, free)
        return True

    def _add_products(
        self, x: FloatBlock, y: FloatBlock, squares: float, own: float, other: float
    ) -> None:
        sums = self.sums
        sums.squares += squares
        sums.squares_a += own
        sums.squares_b += other
        if other / _MAX_SQUARES_RATIO < own < other * _MAX_SQUARES_RATIO:
            # The product follows from the other sums, without cancellation if these are of similar
            # size.
            sums.products += (own + other - squares) / 2
        else:
            sums.products += compute_dot_product(x, y)

    def _add_totals(self, x: FloatBlock, y: FloatBlock) -> bool:
        """Add both sides to their totals until one has a negative number; return whether they were
        added.
        """
        sums = self.sums
        if sums.has_negative or not x.size:
            return False
        if min(np.minimum.reduce(x), np.minimum.reduce(y)) < 0:
            sums.has_negative = True
            return False
        # Added in float64, because for nearly equal distributions most of the divergence cancels
        # out.
        sums.total_a += float(np.add.reduce(x, dtype=np.float64))
        sums.total_b += float(np.add.reduce(y, dtype=np.float64))
        return True

    def _add_entropy(self, x: FloatBlock, y: FloatBlock) -> None:
        wide_x, wide_y, t, u = self._workspace.get_float64_buffers(x.size)
        np.copyto(wide_x, x)
        np.copyto(wide_y, y)
        if np.minimum.reduce(x) > 0:
            np.divide(wide_x, wide_y, out=t)
        else:
            # Where x is 0, the term is 0 for any y; adding 1 to both keeps the logarithm finite.
            np.copyto(u, np.equal(x, 0, out=self._workspace.marks[: x.size]))
            np.add(wide_x, u, out=t)
            np.add(wide_y, u, out=u)
            np.divide(t, u, out=t)
        entropy = compute_dot_product(wide_x, np.log(t, out=t))
        if not math.isfinite(entropy):
            # Either y is 0 where x is not, or the ratio of two numbers has overflowed.
            kept = wide_x > 0
            ratios = np.log(wide_x[kept]) - np.log(wide_y[kept])
            entropy = compute_dot_product(wide_x[kept], ratios)
        self.sums.entropy += entropy

    def _add_unequal(
        self, x: FloatBlock, y: FloatBlock, d: FloatBlock, size: FloatBlock, free: FloatBlock
    ) -> None:
        """Add the absolute differences of all numbers, and of the numbers that are not close."""
        sums = self.sums
        first = int(d.argmax())
        sums.absolute += compute_block_sum(d)
        largest = float(d[first])
        sums.max_absolute = max(sums.max_absolute, largest)
        marks = self._workspace.marks[: d.size]
        unequal = self.closeness.mark_unequal(x, y, d, size, free, marks)
        if not unequal:
            return
        # Multiplying by the marks costs the same for any marks, unlike selecting the marked
        # elements.
        np.copyto(free, marks)
        if not marks[first]:
            largest = float(np.multiply(d, free).max())
        sums.unequal += unequal
        sums.unequal_absolute += compute_dot_product(d, free)
        sums.max_unequal = max(sums.max_unequal, largest)

    def _add_relative(self, d: FloatBlock, size: FloatBlock, free: FloatBlock) -> None:
        """Add the relative differences where the reference is not 0; the buffers are
        overwritten.
        """
        referred, relative = d.size, math.inf
        if not self._zeros:
            np.divide(d, size, out=free)
            relative = compute_block_sum(free)
        if not math.isfinite(relative):
            marks = np.not_equal(size, 0, out=self._workspace.marks[: d.size])
            referred = int(np.count_nonzero(marks))
            self._zeros = referred < d.size
            np.copyto(free, marks)
            d *= free
            # Replaces each 0 by 1.
            size += np.subtract(1, free, out=free)
            np.divide(d, size, out=free)
            relative = compute_block_sum(free)
        if _exceeds_float32(free, relative):
            wide = d.astype(np.float64) / size
            relative, free = compute_block_sum(wide), wide
        sums = self.sums
        sums.relative += relative
        sums.nonzero_references += referred
        if referred:
            sums.max_relative = max(sums.max_relative, float(np.maximum.reduce(free)))

    def _finite(
        self, at: int, x: FloatBlock, y: FloatBlock, d: FloatBlock
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
        """Count the numbers that are not finite, and return the numbers that are finite on both
        sides.
        """
        finite_x, finite_y = np.isfinite(x), np.isfinite(y)
        both = finite_x & finite_y
        if both.all():
            # The numbers are finite but their squares overflow float64, so the sums become
            # infinite.
            return x, y, d
        nans = np.isnan(x) & np.isnan(y)
        apart = ~(both | nans | (x == y))
        sums = self.sums
        sums.nonfinite_a += int(np.count_nonzero(~finite_x))
        sums.nonfinite_b += int(np.count_nonzero(~finite_y))
        sums.nan_both += int(np.count_nonzero(nans))
        found = int(np.count_nonzero(apart))
        if found and sums.first_nonfinite_apart is None:
            sums.first_nonfinite_apart = at + int(apart.argmax())
        sums.nonfinite_apart += found
        return x[both], y[both], d[both]


def _exceeds_float32(numbers: FloatBlock, *sums: float) -> bool:
    """Return whether float32 is too narrow for the terms of these sums."""
    least = numbers.size * _MIN_FLOAT32_MEAN_SQUARE
    return numbers.dtype == np.float32 and not all(least <= each < math.inf for each in sums)


@dataclass(frozen=True, slots=True)
class MeasurementResult:
    """Result of measuring the difference of two tensors."""

    measures: DifferenceMeasures
    same_bytes: bool
    """Whether both element types and bytes are equal."""
    nan_both: int
    """Number of places where both sides are NaN."""
    first_nonfinite_apart: int | None
    """First element, in C order, at which the sides differ and at least one of them is
    not finite.
    """
    rounded_dtype: str
    """Type that the wider side was rounded to; empty if it was not rounded."""
    factor: float = math.nan
    """Factor if side a is a multiple of side b; NaN if it is not."""


def measure_difference(
    a: npt.NDArray[Any] | TensorElements,
    b: npt.NDArray[Any] | TensorElements,
    tolerances: ElementTolerances,
    *,
    dtype_a: str = "",
    dtype_b: str = "",
) -> MeasurementResult:
    """Return the measures of two tensors with the same size; b is the reference.

    `dtype_a` and `dtype_b` are the types in the framework, since files may have wider ones. A
    complex element counts as two numbers, its real and imaginary part.
    """
    dtype_a, dtype_b = dtype_a or str(a.dtype), dtype_b or str(b.dtype)
    rounded = select_comparison_dtype(dtype_a, dtype_b)
    # A side that has the narrow type already is not rounded.
    to_a, to_b = ("" if dtype == rounded else rounded for dtype in (dtype_a, dtype_b))
    left, right = (
        # Arrays are flattened here, so that one that is not contiguous is copied once and not for
        # each block.
        ArrayElements(each.reshape(-1)) if isinstance(each, np.ndarray) else each
        for each in (a, b)
    )
    pair = OperandPair(left, right, to_a, to_b)
    rtol = max(tolerances.rtol, NARROW_HALF_UNITS.get(rounded, 0.0))
    with borrow_workspace() as workspace, np.errstate(all="ignore"):
        kernel = BlockAccumulator(workspace, rtol=rtol, atol=tolerances.atol)
        same = _add_blocks(pair, kernel, workspace)
    sums, width = kernel.sums, pair.width
    first = sums.first_nonfinite_apart
    return MeasurementResult(
        measures=sums.compute_measures(pair.a.size * width, equal_nan=tolerances.equal_nan),
        same_bytes=same,
        nan_both=sums.nan_both,
        first_nonfinite_apart=None if first is None else first // width,
        rounded_dtype=rounded,
        factor=sums.find_factor(),
    )


def _add_blocks(pair: OperandPair, kernel: BlockAccumulator, workspace: BlockWorkspace) -> bool:
    """Add all blocks to the sums; return whether every block had the same bytes on both sides."""
    size, step = pair.a.size, BLOCK_NUMBERS // pair.width
    narrow = pair.fits_float32 and kernel.closeness.fits_float32
    kinds = (np.float32, np.float64) if narrow else (np.float64,)
    same = pair.compares_bytes
    for at in range(0, size, step):
        count = min(step, size - at)
        a, b = (
            pair.a.part(at, count, workspace.file_buffer_a),
            pair.b.part(at, count, workspace.file_buffer_b),
        )
        alike = pair.compares_bytes and has_same_bytes(a, b)
        same = same and alike
        for kind in kinds:
            buffers = workspace.get_buffers(count * pair.width, kind)
            x = pair.convert(a, pair.rounded_dtype_a, buffers.x)
            if alike:
                added = kernel.add_same(at * pair.width, x)
            else:
                y = pair.convert(b, pair.rounded_dtype_b, buffers.y)
                pair.subtract(a, b, x, y, buffers.d)
                added = kernel.add(at * pair.width, x, y, buffers)
            if added:
                break
    return same

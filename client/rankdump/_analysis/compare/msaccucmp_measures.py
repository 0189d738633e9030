"""The ten measures of CANN's `msaccucmp compare`, with its names and rules. Pure.

Source: msaccucmp in Ascend/msprobe (`python/msprobe/msaccucmp`). Elements are converted to float32,
sums are in float64, and b is the ground truth. Every measure is NaN when an element is complex or
not finite. The standard deviation of msaccucmp is a text with four numbers; here it is four
measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.tensor_blocks import (
    BLOCK_NUMBERS,
    Float64Array,
    compute_dot_product,
)

MSACCUCMP_NAMES = (
    "CosineSimilarity",
    "MaxAbsoluteError",
    "AccumulatedRelativeError",
    "RelativeEuclideanDistance",
    "KullbackLeiblerDivergence",
    "StandardDeviation.mean_a",
    "StandardDeviation.std_a",
    "StandardDeviation.mean_b",
    "StandardDeviation.std_b",
    "MeanAbsoluteError",
    "RootMeanSquareError",
    "MaxRelativeError",
    "MeanRelativeError",
)
"""Names of the measures in the order of msaccucmp's columns."""
_BOOL_MEASURES = frozenset(("CosineSimilarity", "RelativeEuclideanDistance"))
_EPS = float(np.finfo(np.float64).eps)
_MIN_WEIGHT = float(np.finfo(np.float32).eps)
_MIN_DEVIATION = 0.001
"""Standard deviations below this value count as 0."""


def compute_msaccucmp_measures(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> dict[str, float]:
    """Return the measures of two arrays of equal size, by `MSACCUCMP_NAMES`."""
    pair = _FlatArrayPair(a.reshape(-1), b.reshape(-1))
    kinds = a.dtype.kind + b.dtype.kind
    found: dict[str, float] = {}
    if a.size and "c" not in kinds:
        with np.errstate(all="ignore"):
            found = _compute_real_measures(pair)
    if "b" in kinds:
        found = {name: value for name, value in found.items() if name in _BOOL_MEASURES}
    return {name: found.get(name, math.nan) for name in MSACCUCMP_NAMES}


@dataclass(frozen=True, slots=True)
class _FlatArrayPair:
    a: npt.NDArray[Any]
    b: npt.NDArray[Any]

    def blocks(self) -> Iterator[tuple[Float64Array, Float64Array]]:
        for at in range(0, self.a.size, BLOCK_NUMBERS):
            yield _widen(self.a[at : at + BLOCK_NUMBERS]), _widen(self.b[at : at + BLOCK_NUMBERS])


def _widen(part: npt.NDArray[Any]) -> Float64Array:
    return part.astype(np.float32).astype(np.float64)


@dataclass(slots=True)
class _SideSums:
    """Sums over all elements of one side."""

    squares: float = 0.0
    total: float = 0.0
    least: float = math.inf
    most: float = -math.inf

    def add(self, values: Float64Array) -> None:
        self.squares += compute_dot_product(values, values)
        self.total += float(values.sum())
        self.least = min(self.least, float(values.min()))
        self.most = max(self.most, float(values.max()))

    def scaled(self, values: Float64Array) -> Float64Array:
        """Return the values scaled to the range from 0 to 1, as weights of a distribution, without
        zeros.
        """
        span = self.most - self.least
        return np.maximum((values - self.least) / span if span else values, _MIN_WEIGHT)


def _compute_real_measures(pair: _FlatArrayPair) -> dict[str, float]:
    """Return the measures of real numbers; empty if a number is not finite."""
    x, y = _SideSums(), _SideSums()
    products = absolute = largest = squares = relative = most_relative = 0.0
    for left, right in pair.blocks():
        if not (np.isfinite(left).all() and np.isfinite(right).all()):
            return {}
        x.add(left)
        y.add(right)
        products += compute_dot_product(left, right)
        apart = np.abs(left - right)
        absolute, largest = absolute + float(apart.sum()), max(largest, float(apart.max()))
        squares += compute_dot_product(apart, apart)
        terms = np.where(np.abs(right) > _EPS, np.abs(left / right - 1), 0.0)
        relative, most_relative = relative + float(terms.sum()), max(most_relative, terms.max())
    count, norm = pair.a.size, math.sqrt(y.squares)
    return {
        "CosineSimilarity": _compute_cosine(count, products, x.squares, y.squares),
        "MaxAbsoluteError": largest,
        "AccumulatedRelativeError": relative,
        "RelativeEuclideanDistance": math.sqrt(squares) / norm if norm > _EPS else 0.0,
        "KullbackLeiblerDivergence": _compute_divergence(pair, x, y),
        **_compute_deviations(pair, "a", x.total / count),
        **_compute_deviations(pair, "b", y.total / count),
        "MeanAbsoluteError": absolute / count,
        "RootMeanSquareError": math.sqrt(squares / count),
        "MaxRelativeError": float(most_relative),
        "MeanRelativeError": relative / count,
    }


def _compute_cosine(count: int, products: float, squares_a: float, squares_b: float) -> float:
    norms = math.sqrt(squares_a), math.sqrt(squares_b)
    if count == 1 or max(norms) <= _EPS:
        return 1.0
    return math.nan if min(norms) <= _EPS else min(1.0, products / norms[0] / norms[1])


def _compute_deviations(pair: _FlatArrayPair, side: str, mean: float) -> dict[str, float]:
    parts = (left if side == "a" else right for left, right in pair.blocks())
    squares = sum(compute_dot_product(part - mean, part - mean) for part in parts)
    found = {f"mean_{side}": mean, f"std_{side}": math.sqrt(squares / pair.a.size)}
    return {
        f"StandardDeviation.{name}": value if abs(value) >= _MIN_DEVIATION else 0.0
        for name, value in found.items()
    }


def _compute_divergence(pair: _FlatArrayPair, x: _SideSums, y: _SideSums) -> float:
    total_x = total_y = 0.0
    for left, right in pair.blocks():
        total_x += float(x.scaled(left).sum())
        total_y += float(y.scaled(right).sum())
    found = 0.0
    for left, right in pair.blocks():
        p, q = x.scaled(left) / total_x, y.scaled(right) / total_y
        found += compute_dot_product(p, np.log(p / q))
    return 0.0 if abs(found) < _EPS else found

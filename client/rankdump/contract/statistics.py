"""Figures about one tensor, as `statistic.csv` gives them: twelve items and their meaning. Pure.

Every element is converted to float64 first. NaN and infinities take part: one NaN makes maximum,
minimum, mean and norm NaN, and the signed counts hold the infinities (mindspore-dump.md 3.4, the
meaning of 2.5 and later). Numbers are written as C's `%g` writes them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract import dtypes
from rankdump.contract.errors import UnsupportedError

_BLOCK = 1 << 20
"""Elements converted at a time: memory stays bounded whatever the tensor's size."""

MD5 = "md5"
ITEMS: dict[str, str] = {
    "max": "Max Value",
    "min": "Min Value",
    "avg": "Avg Value",
    "count": "Count",
    "negative zero count": "Negative Zero Count",
    "positive zero count": "Positive Zero Count",
    "nan count": "NaN Count",
    "negative inf count": "Negative Inf Count",
    "positive inf count": "Positive Inf Count",
    "zero count": "Zero Count",
    MD5: "MD5",
    "l2norm": "L2Norm Value",
}
"""Column title of each item of `statistic_category`."""
DEFAULT_ITEMS = ("max", "min", "l2norm")
DEVICE_ITEMS = ("max", "min", "avg", "l2norm")
"""Items that can be computed on an accelerator."""


@dataclass(frozen=True, slots=True)
class Moments:
    """What one pass over the elements finds, in float64."""

    count: int = 0
    maximum: float = -math.inf
    """NaN when an element is; minus infinity when there is none."""
    minimum: float = math.inf
    total: float = 0.0
    squares: float = 0.0
    nans: int = 0
    positive_infinities: int = 0
    negative_infinities: int = 0
    positives: int = 0
    """Elements above zero, infinity among them."""
    negatives: int = 0
    zeros: int = 0
    """Elements equal to zero, of either sign."""

    @property
    def mean(self) -> float:
        """Arithmetic mean; NaN when there is no element."""
        return self.total / self.count if self.count else math.nan

    @property
    def l2norm(self) -> float:
        """Root of the sum of squares."""
        return math.sqrt(self.squares)

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both sets of elements together."""
        return Moments(
            count=self.count + other.count,
            # Python's max and min lose a NaN that stands second.
            maximum=float(np.maximum(self.maximum, other.maximum)),
            minimum=float(np.minimum(self.minimum, other.minimum)),
            total=self.total + other.total,
            squares=self.squares + other.squares,
            nans=self.nans + other.nans,
            positive_infinities=self.positive_infinities + other.positive_infinities,
            negative_infinities=self.negative_infinities + other.negative_infinities,
            positives=self.positives + other.positives,
            negatives=self.negatives + other.negatives,
            zeros=self.zeros + other.zeros,
        )


_TEXTS: dict[str, Callable[[Moments], str]] = {
    "max": lambda m: number(m.maximum),
    "min": lambda m: number(m.minimum),
    "avg": lambda m: number(m.mean),
    "count": lambda m: str(m.count),
    "negative zero count": lambda m: str(m.negatives),
    "positive zero count": lambda m: str(m.positives),
    "nan count": lambda m: str(m.nans),
    "negative inf count": lambda m: str(m.negative_infinities),
    "positive inf count": lambda m: str(m.positive_infinities),
    "zero count": lambda m: str(m.zeros),
    "l2norm": lambda m: number(m.l2norm),
}


def figures(items: tuple[str, ...], dtype: str, data: memoryview) -> tuple[str, ...]:
    """Return the text of each item for raw elements of that type, C order, little endian.

    UnsupportedError for a type that has no figures: a complex one.
    """
    if not countable(dtype):
        raise UnsupportedError(f"element type {dtype!r} has no statistics")
    found = moments(_elements(dtype, data)) if any(item != MD5 for item in items) else Moments()
    # The digest is over the elements as the framework held them: of bfloat16, two bytes each.
    return tuple(_md5(data) if item == MD5 else _TEXTS[item](found) for item in items)


def countable(dtype: str) -> bool:
    """Return whether figures exist for an element type."""
    return dtype in dtypes.ELEMENT_TYPES and not dtype.startswith("complex")


def moments(flat: npt.NDArray[Any]) -> Moments:
    """Return the moments of a flat array of real elements."""
    found = Moments()
    for at in range(0, flat.size, _BLOCK):
        found = found.joined(_block(flat[at : at + _BLOCK].astype(np.float64)))
    return found


def number(value: float) -> str:
    """Return a number as C++ streams print it by default: six digits, NaN without its sign."""
    return f"{value:g}"


def _elements(dtype: str, data: memoryview) -> npt.NDArray[Any]:
    kind = dtypes.element_type(dtype)
    if not kind.widened:
        return np.frombuffer(data, dtype=kind.descr)
    return np.frombuffer(dtypes.as_stored(dtype, data), dtype=kind.descr)


def _block(wide: npt.NDArray[np.float64]) -> Moments:
    with np.errstate(all="ignore"):
        return Moments(
            count=wide.size,
            maximum=float(wide.max()),
            minimum=float(wide.min()),
            total=float(wide.sum()),
            squares=float(np.dot(wide, wide)),
            nans=int(np.count_nonzero(np.isnan(wide))),
            positive_infinities=int(np.count_nonzero(wide == np.inf)),
            negative_infinities=int(np.count_nonzero(wide == -np.inf)),
            positives=int(np.count_nonzero(wide > 0)),
            negatives=int(np.count_nonzero(wide < 0)),
            zeros=int(np.count_nonzero(wide == 0)),
        )


def _md5(data: memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

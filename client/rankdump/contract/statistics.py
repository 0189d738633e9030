"""Figures about one tensor, as `statistic.csv` gives them: twelve items and their meaning. Pure.

Every element counts as a float64. NaN and infinities take part: one NaN makes maximum, minimum,
mean and norm NaN, and the signed counts hold the infinities (mindspore-dump.md 3.4, the meaning of
2.5 and later). Numbers are written as C's `%g` writes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache

from rankdump.contract import dtypes
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.moments import Moments, moments_of, moments_of_many

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


_NEEDS: dict[str, tuple[str, ...]] = {
    "max": ("maximum",),
    "min": ("minimum",),
    "avg": ("total",),
    "negative zero count": ("negatives",),
    "positive zero count": ("positives",),
    "nan count": ("nans",),
    "negative inf count": ("negative_infinities",),
    "positive inf count": ("positive_infinities",),
    "zero count": ("zeros",),
    "l2norm": ("squares",),
}
"""What of `Moments` an item is made of, beside the count."""
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
    return _texts(items, moments_of(dtype, data, _needed(items)), data)


def figures_of_many(
    items: tuple[str, ...], dtype: str, tensors: Sequence[bytes]
) -> list[tuple[str, ...]]:
    """Return the same as `figures` of each of these tensors, which all have elements.

    One pass over all of them costs little more than one over the largest.
    """
    if not countable(dtype):
        raise UnsupportedError(f"element type {dtype!r} has no statistics")
    found = moments_of_many(dtype, tensors, _needed(items))
    datas = map(memoryview, tensors)
    return [_texts(items, each, data) for each, data in zip(found, datas, strict=True)]


def countable(dtype: str) -> bool:
    """Return whether figures exist for an element type."""
    return dtype in dtypes.ELEMENT_TYPES and not dtype.startswith("complex")


def number(value: float) -> str:
    """Return a number as C++ streams print it by default: six digits, NaN without its sign."""
    return f"{value:g}"


def _texts(items: tuple[str, ...], found: Moments, data: memoryview) -> tuple[str, ...]:
    # The digest is over the elements as the framework held them: of bfloat16, two bytes each.
    return tuple([_md5(data) if item == MD5 else _TEXTS[item](found) for item in items])


@lru_cache(maxsize=64)
def _needed(items: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for item in items for name in _NEEDS.get(item, ()))


def _md5(data: memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

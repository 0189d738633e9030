"""Figures about one tensor, as `statistic.csv` gives them: twelve items and their meaning. Pure.

Every element counts as a float64. NaN and infinities take part: one NaN makes maximum, minimum,
mean and norm NaN, and the signed counts hold the infinities (mindspore-dump.md 3.4, the meaning of
2.5 and later). Numbers are written as C's `%g` writes them, or with all their digits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any

from rankdump.contract import dtypes
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.moments import Columns, moments_of, moments_of_many

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


_NEEDS: dict[str, str] = {
    "max": "maximum",
    "min": "minimum",
    "avg": "total",
    "negative zero count": "negatives",
    "positive zero count": "positives",
    "nan count": "nans",
    "negative inf count": "negative_infinities",
    "positive inf count": "positive_infinities",
    "zero count": "zeros",
    "l2norm": "squares",
}
"""What of `Moments` an item is made of, beside the count."""
_COUNTABLE = frozenset(name for name in dtypes.ELEMENT_TYPES if not name.startswith("complex"))
_NUMBERS = frozenset(("max", "min", "avg", "l2norm"))
"""Items that are no whole numbers."""


def figures(
    items: tuple[str, ...], dtype: str, data: memoryview, *, exact: bool = False
) -> tuple[str, ...]:
    """Return the text of each item for raw elements of that type, C order, little endian.

    With `exact` numbers have all their digits. UnsupportedError for a type that has no figures: a
    complex one.
    """
    return tuple(text_of(items, dtype, data, exact=exact).split(",")) if items else ()


def text_of(items: tuple[str, ...], dtype: str, data: memoryview, *, exact: bool = False) -> str:
    """Return the figures of one tensor as `figures` does, with commas between them."""
    _check(dtype)
    return _texts(items, moments_of(dtype, data, _needed(items)), (data,), exact)[0]


def texts_of_many(
    items: tuple[str, ...], dtype: str, tensors: Sequence[bytes], *, exact: bool = False
) -> list[str]:
    """Return the same as `text_of` of each of these tensors, which all have elements.

    One pass over all of them costs little more than one over the largest.
    """
    _check(dtype)
    return _texts(items, moments_of_many(dtype, tensors, _needed(items)), tensors, exact)


def countable(dtype: str) -> bool:
    """Return whether figures exist for an element type."""
    return dtype in _COUNTABLE


def number(value: float) -> str:
    """Return a number as C++ streams print it by default: six digits, NaN without its sign."""
    return f"{value:g}"


def _check(dtype: str) -> None:
    if not countable(dtype):
        raise UnsupportedError(f"element type {dtype!r} has no statistics")


def _texts(
    items: tuple[str, ...], found: Columns, tensors: Sequence[bytes | memoryview], exact: bool
) -> list[str]:
    columns = [_column(item, found, tensors) for item in items]
    rows = zip(*columns, strict=True) if columns else repeat((), len(tensors))
    return list(map(_form(items, exact).__mod__, rows))


def _column(item: str, found: Columns, tensors: Sequence[bytes | memoryview]) -> list[Any]:
    """Return one item of each tensor."""
    if item == MD5:
        # Over the elements as the framework held them: of bfloat16, two bytes each.
        return [_md5(data) for data in tensors]
    column = found[_NEEDS.get(item, item)]
    if item == "l2norm":
        return list(map(math.sqrt, column))
    if item == "avg":
        sums = zip(column, found["count"], strict=True)
        return [total / count if count else math.nan for total, count in sums]
    return column


@lru_cache(maxsize=64)
def _form(items: tuple[str, ...], exact: bool) -> str:
    """Return how a row of items is written, in the form of the operator `%`."""
    number = "%r" if exact else "%g"
    return ",".join(number if item in _NUMBERS else "%s" for item in items)


@lru_cache(maxsize=64)
def _needed(items: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_NEEDS[item] for item in items if item in _NEEDS)


def _md5(data: bytes | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

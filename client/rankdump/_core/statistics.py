"""Statistics of one tensor as `statistic.csv` has them: twelve items, which are computed from the
moments that kernels find. Pure; safe to call from any thread.

Every element counts as a float64. NaN and infinities are included: one NaN makes maximum, minimum,
mean and norm NaN, and the counts by sign include the infinities (MindSpore 2.5 and later, Dump
guide). Numbers are written as C's `%g` writes them, or with all their digits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from rankdump._core import element_types
from rankdump._kernels.element_moments import (
    COUNTS,
    ELEMENT_CODES,
    EXTREMES,
    PACKED_MOMENTS,
    SUMS,
    ElementMoments,
    find_address,
    merge_moments,
    view_memory,
)
from rankdump._kernels.kernel_functions import KERNELS, FoundMoments
from rankdump.errors import UnsupportedError

_WIDENED_ELEMENTS = 1 << 14
"""Number of 8-bit elements that are widened at a time: few enough to stay in a core's cache."""

MD5_ITEM = "md5"
STATISTIC_TITLES: dict[str, str] = {
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
    MD5_ITEM: "MD5",
    "l2norm": "L2Norm Value",
}
"""Column title in tables for each item of `statistic_category`."""
DEFAULT_STATISTICS = ("max", "min", "l2norm")
DEVICE_STATISTICS = ("max", "min", "avg", "l2norm")
"""Items that can be computed on an accelerator."""

_COUNTABLE_TYPES = frozenset(
    name for name in element_types.ELEMENT_TYPES if not name.startswith("complex")
)
_MomentPick: TypeAlias = "Callable[[FoundMoments], Any]"


def _make_picks(fields: dict[str, str]) -> dict[str, _MomentPick]:
    """Return for each item a function that takes the named field of the moments."""
    return {item: itemgetter(ElementMoments._fields.index(at)) for item, at in fields.items()}


_SIZE, _TOTAL, _SQUARES = map(ElementMoments._fields.index, ("size", "total", "squares"))


def _compute_mean(found: FoundMoments) -> float:
    return found[_TOTAL] / found[_SIZE] if found[_SIZE] else math.nan


def _compute_norm(found: FoundMoments) -> float:
    return math.sqrt(found[_SQUARES])


_SIZE_PICKS = _make_picks({"count": "size"})
_EXTREME_PICKS = _make_picks({"max": "maximum", "min": "minimum"})
_SUM_PICKS: dict[str, _MomentPick] = {"avg": _compute_mean, "l2norm": _compute_norm}
_COUNT_PICKS = _make_picks(
    {
        "negative zero count": "negatives",
        "positive zero count": "positives",
        "nan count": "nans",
        "negative inf count": "negative_infinities",
        "positive inf count": "positive_infinities",
        "zero count": "zeros",
    }
)
_PICKS = {**_SIZE_PICKS, **_EXTREME_PICKS, **_SUM_PICKS, **_COUNT_PICKS}
"""Functions that take each item from moments; MD5 is missing because it is computed
from the bytes.
"""
_FRACTIONAL_ITEMS = _EXTREME_PICKS.keys() | _SUM_PICKS.keys()
"""Items that are not integers."""


class StatisticsForm(NamedTuple):
    """Form of a row of items: how it is made from moments."""

    parts: int
    """Flags of the moments that the row needs."""
    text: str
    """Format string for the operator `%`."""
    picks: tuple[_MomentPick | None, ...]
    """Function that takes each item from the moments; None for MD5."""

    def write(self, found: FoundMoments, md5: str = "") -> str:
        """Return the row as texts joined by commas."""
        return self.text % tuple([md5 if pick is None else pick(found) for pick in self.picks])


@lru_cache(maxsize=64)
def make_statistics_form(items: tuple[str, ...], *, exact: bool = False) -> StatisticsForm:
    """Return the form of a row of items; with `exact`, numbers have all their digits."""
    groups = {EXTREMES: _EXTREME_PICKS, SUMS: _SUM_PICKS, COUNTS: _COUNT_PICKS}
    parts = sum(part for part, picks in groups.items() if not picks.keys().isdisjoint(items))
    number = "%r" if exact else "%g"
    text = ",".join(number if item in _FRACTIONAL_ITEMS else "%s" for item in items)
    return StatisticsForm(parts, text, tuple(map(_PICKS.get, items)))


def measure_statistics(data: int | bytes, count: int, dtype: str, parts: int) -> FoundMoments:
    """Return the fields of `ElementMoments` for `count` elements, which are given by their address
    or as bytes.

    `parts` are the flags of the needed moments. UnsupportedError for a type without statistics,
    such as a complex one.
    """
    code = ELEMENT_CODES.get(dtype)
    if code is not None:
        return KERNELS.functions.measure_elements(data, count, code, parts)
    if not has_statistics(dtype):
        raise UnsupportedError(f"element type {dtype!r} has no statistics")
    bytes_of = (
        memoryview(data) if isinstance(data, bytes) else view_memory(data, "u1", (count,)).data
    )
    found: list[ElementMoments] = []
    for at in range(0, count, _WIDENED_ELEMENTS):
        wide = element_types.convert_to_stored(dtype, bytes_of[at : at + _WIDENED_ELEMENTS])
        block = find_address(np.frombuffer(wide, np.uint8)), wide.nbytes // 4
        found.append(ElementMoments(*measure_statistics(*block, "float32", parts)))
    return merge_moments(found)


def compute_statistic_row(
    items: tuple[str, ...],
    dtype: str,
    data: bytes | memoryview,
    *,
    exact: bool = False,
    found: FoundMoments | None = None,
) -> str:
    """Return the statistics of raw elements (C order, little endian) as texts joined by commas.

    `found` are all moments of the elements if they are known already. UnsupportedError for a type
    without statistics, such as a complex one.
    """
    form = make_statistics_form(items, exact=exact)
    size = data.nbytes if isinstance(data, memoryview) else len(data)
    count = size // element_types.get_element_type(dtype).item_bytes
    if isinstance(data, memoryview):
        place = find_address(np.frombuffer(data, np.uint8)) if size else 0
    else:
        place = data
    found = found or measure_statistics(place, count, dtype, form.parts)
    # MD5 covers the elements as the framework held them: for bfloat16 two bytes each.
    return form.write(found, _compute_md5(data) if MD5_ITEM in items else "")


def write_statistic_rows(form: StatisticsForm, packed: Sequence[bytes]) -> list[str]:
    """Return a row for each item of `packed`, which are moments packed as `PACKED_MOMENTS`; no item
    may be MD5.
    """
    text, unpack = form.text, PACKED_MOMENTS.unpack
    picks = [pick for pick in form.picks if pick is not None]
    # Equal moments are formatted once: an operator often reads what the operator before it wrote.
    rows = dict.fromkeys(packed, "")
    for each in rows:
        found = unpack(each)
        rows[each] = text % tuple([pick(found) for pick in picks])
    return [rows[each] for each in packed]


def compute_statistic_texts(
    items: tuple[str, ...], dtype: str, data: bytes | memoryview, *, exact: bool = False
) -> tuple[str, ...]:
    """Return the texts of `compute_statistic_row`, one for each item."""
    return tuple(compute_statistic_row(items, dtype, data, exact=exact).split(",")) if items else ()


def has_statistics(dtype: str) -> bool:
    """Return whether statistics exist for an element type."""
    return dtype in _COUNTABLE_TYPES


def format_statistic_number(value: float) -> str:
    """Return a number as C++ streams print it by default: six significant digits, NaN without its
    sign.
    """
    return f"{value:g}"


def _compute_md5(data: bytes | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

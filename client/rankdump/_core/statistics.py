"""Statistics of one tensor as `statistic.csv` holds them: twelve items, and the extremes, sums and
counts in float64 that they are made of. Pure; safe to call from any thread.

Every element counts as a float64. NaN and infinities take part: one NaN makes maximum, minimum,
mean and norm NaN, and the signed counts include the infinities (MindSpore 2.5 and later, Dump
guide). Numbers are written as C's `%g` writes them, or with all their digits. Small tensors are
processed together, large ones in blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._core import element_types
from rankdump.errors import UnsupportedError

_PART_ELEMENTS = 1 << 16
"""Elements held as float64 at a time: few enough for a core's cache."""
_ROW_ELEMENTS = 1 << 13
"""Elements in one product: for more, libraries for linear algebra start threads of their own."""
_CACHE_LINE_BYTES = 64


def sum_elements(values: npt.NDArray[Any]) -> float:
    """Return the sum of the elements of a flat array."""
    return _run_with_buffer(_Float64Buffer.total, values)


def sum_squares(values: npt.NDArray[Any]) -> float:
    """Return the sum of the squares of a flat array."""
    return _run_with_buffer(_Float64Buffer.squares, values)


class _Float64Buffer:
    """Reused memory for elements as float64, which costs no page faults."""

    def __init__(self) -> None:
        # Products of rows that begin within a line of the cache take a third longer.
        memory = np.empty(_PART_ELEMENTS + _CACHE_LINE_BYTES // 8)
        first = -memory.ctypes.data % _CACHE_LINE_BYTES // 8
        self._memory = memory[first : first + _PART_ELEMENTS]
        self._rows = self._memory.reshape(-1, 1, _ROW_ELEMENTS)
        self._columns = self._memory.reshape(-1, _ROW_ELEMENTS, 1)
        self._products = np.empty((len(self._rows), 1, 1))

    def total(self, values: npt.NDArray[Any]) -> float:
        """Return the sum of the elements."""
        return sum(float(np.add.reduce(part)) for part in self._parts(values))

    def squares(self, values: npt.NDArray[Any]) -> float:
        """Return the sum of the squares: each row multiplied with itself."""
        return sum(map(self._product, self._parts(values)))

    def _parts(self, values: npt.NDArray[Any]) -> Generator[npt.NDArray[np.float64]]:
        """Yield the elements as float64, each part in the place of the one before."""
        for at in range(0, values.size, _PART_ELEMENTS):
            part = values[at : at + _PART_ELEMENTS]
            held = self._memory[: part.size]
            held[...] = part
            yield held

    def _product(self, held: npt.NDArray[np.float64]) -> float:
        if held.size <= _ROW_ELEMENTS:
            return float(held.dot(held))
        count = held.size // _ROW_ELEMENTS
        products = np.matmul(self._rows[:count], self._columns[:count], self._products[:count])
        last = held[count * _ROW_ELEMENTS :]
        return sum(products.ravel().tolist(), float(last.dot(last)))


_IDLE_BUFFERS: list[_Float64Buffer] = []
"""Buffers not in use: as many as threads ever needed at once, less those in use."""


def _run_with_buffer(
    work: Callable[[_Float64Buffer, npt.NDArray[Any]], float], values: npt.NDArray[Any]
) -> float:
    try:
        buffer = _IDLE_BUFFERS.pop()
    except IndexError:
        buffer = _Float64Buffer()
    try:
        return work(buffer, values)
    finally:
        _IDLE_BUFFERS.append(buffer)


ElementArray: TypeAlias = "npt.NDArray[Any]"
MomentNames: TypeAlias = "frozenset[str]"
"""Names of fields of `ElementMoments`, beside the count."""
MomentColumns: TypeAlias = "dict[str, list[Any]]"
"""Moments of several tensors by the field's name, with the count."""

_BLOCK_ELEMENTS = 1 << 17
"""Elements in one block: few enough to stay in a core's cache between the passes."""


@dataclass(frozen=True, slots=True)
class ElementMoments:
    """Results of one pass over the elements, in float64."""

    count: int = 0
    maximum: float = -math.inf
    """NaN when an element is NaN; minus infinity when there is no element."""
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

    def merge_with(self, other: ElementMoments) -> ElementMoments:
        """Return the moments of both sets of elements together."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _MOMENT_FIELDS}
        return ElementMoments(**{name: _join_field(name, pair) for name, pair in pairs.items()})


def compute_moments(flat: ElementArray) -> ElementMoments:
    """Return the moments of a flat array of real elements."""
    return (
        ElementMoments(flat.size, **_compute_fields(flat, _ALL_FINDER_NAMES))
        if flat.size
        else ElementMoments()
    )


def compute_needed_moments(dtype: str, data: memoryview, needed: MomentNames) -> MomentColumns:
    """Return the needed moments of the raw elements of one tensor, and their count."""
    kind = element_types.get_element_type(dtype)
    count = data.nbytes // kind.item_bytes
    if not count:
        nothing = ElementMoments()
        return {"count": [0], **{name: [getattr(nothing, name)] for name in needed}}
    if not kind.is_widened:
        found = _compute_fields(_view_elements(kind, data), needed)
    else:
        # In blocks as well, so that the widened float32 stays in the cache.
        step = _BLOCK_ELEMENTS * kind.item_bytes
        blocks = (data[at : at + step] for at in range(0, data.nbytes, step))
        parts = [_compute_fields(_view_elements(kind, block), needed) for block in blocks]
        found = {name: _join_field(name, [part[name] for part in parts]) for name in needed}
    columns: MomentColumns = {name: [value] for name, value in found.items()}
    columns["count"] = [count]
    return columns


def compute_moments_of_many(
    dtype: str, tensors: Sequence[bytes], needed: MomentNames
) -> MomentColumns:
    """Return the needed moments of each of these tensors, and their counts.

    UnsupportedError when one has no elements.
    """
    kind = element_types.get_element_type(dtype)
    counts = [len(data) // kind.item_bytes for data in tensors]
    if not all(counts):
        raise UnsupportedError(f"tensor {counts.index(0)} of {len(counts)} has no elements")
    columns: MomentColumns = {"count": counts, **{name: [] for name in needed}}
    for run in _split_runs(counts):
        values = _make_comparable(_view_elements(kind, memoryview(b"".join(tensors[run]))))
        starts = np.cumsum([0, *counts[run][:-1]])
        for name, found in _compute_fields_by_tensor(values, starts, needed).items():
            columns[name] += found.tolist()
    return columns


def _split_runs(counts: Sequence[int]) -> Generator[slice]:
    """Yield slices of neighbours that fill a block together."""
    first = size = 0
    for at, count in enumerate(counts):
        if size and size + count > _BLOCK_ELEMENTS:
            yield slice(first, at)
            first, size = at, 0
        size += count
    if size:
        yield slice(first, len(counts))


def _view_elements(kind: element_types.ElementType, data: memoryview) -> ElementArray:
    stored = element_types.convert_to_stored(kind.name, data) if kind.is_widened else data
    return np.frombuffer(stored, kind.descr)


def _compute_fields(flat: ElementArray, needed: MomentNames) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        if flat.size <= _BLOCK_ELEMENTS:
            return _compute_block(flat, needed)
        blocks = (flat[at : at + _BLOCK_ELEMENTS] for at in range(0, flat.size, _BLOCK_ELEMENTS))
        parts = [_compute_block(block, needed) for block in blocks]
    return {name: _join_field(name, [part[name] for part in parts]) for name in needed}


def _compute_block(values: ElementArray, needed: MomentNames) -> dict[str, Any]:
    values = _make_comparable(values)
    return {name: find(values) for name, find in _select_finders(needed)}


@lru_cache(maxsize=64)
def _select_finders(needed: MomentNames) -> tuple[tuple[str, Callable[[ElementArray], Any]], ...]:
    return tuple((name, find) for name, find in _FINDERS.items() if name in needed)


def _join_field(name: str, parts: Sequence[Any]) -> Any:
    """Return a field of several sets of elements together, from that of each set."""
    if name not in ("maximum", "minimum"):
        return sum(parts)
    nan = next((part for part in parts if part != part), None)
    if nan is not None:
        return nan
    return max(parts) if name == "maximum" else min(parts)


def _make_comparable(values: ElementArray) -> ElementArray:
    """Return float16 as float32, which is exact and which processors compare fast."""
    return values.astype(np.float32) if values.dtype.char == "e" else values


# Extremes and signs need no float64, as converting keeps the order of elements. They come first,
# because reading alone brings a block into the cache fastest.
_FINDERS: dict[str, Callable[[ElementArray], Any]] = {
    "maximum": lambda values: float(np.maximum.reduce(values)),
    "minimum": lambda values: float(np.minimum.reduce(values)),
    "nans": lambda values: int(np.count_nonzero(np.isnan(values))),
    "positive_infinities": lambda values: int(np.count_nonzero(values == np.inf)),
    "negative_infinities": lambda values: int(np.count_nonzero(values == -np.inf)),
    "positives": lambda values: int(np.count_nonzero(values > 0)),
    "negatives": lambda values: int(np.count_nonzero(values < 0)),
    "zeros": lambda values: int(np.count_nonzero(values == 0)),
    "total": sum_elements,
    "squares": sum_squares,
}
_ALL_FINDER_NAMES = frozenset(_FINDERS)
_MOMENT_FIELDS = ("count", *sorted(_ALL_FINDER_NAMES))


def _compute_fields_by_tensor(
    values: ElementArray, starts: ElementArray, needed: MomentNames
) -> dict[str, ElementArray]:
    """Return the needed moments of joined tensors, which begin at `starts`."""
    with np.errstate(all="ignore"):
        found = {
            name: find(values, starts)
            for name, find in _FINDERS_BY_TENSOR.items()
            if name in needed
        }
        if "total" in needed or "squares" in needed:
            wide = values.astype(np.float64)
            if "total" in needed:
                found["total"] = np.add.reduceat(wide, starts)
            if "squares" in needed:
                found["squares"] = np.add.reduceat(np.multiply(wide, wide, out=wide), starts)
    return found


def _count_by_tensor(condition: npt.NDArray[np.bool_], starts: ElementArray) -> ElementArray:
    return np.add.reduceat(condition, starts, dtype=np.int64)


_FINDERS_BY_TENSOR: dict[str, Callable[[ElementArray, ElementArray], ElementArray]] = {
    "maximum": lambda values, starts: np.maximum.reduceat(values, starts).astype(np.float64),
    "minimum": lambda values, starts: np.minimum.reduceat(values, starts).astype(np.float64),
    "nans": lambda values, starts: _count_by_tensor(np.isnan(values), starts),
    "positive_infinities": lambda values, starts: _count_by_tensor(values == np.inf, starts),
    "negative_infinities": lambda values, starts: _count_by_tensor(values == -np.inf, starts),
    "positives": lambda values, starts: _count_by_tensor(values > 0, starts),
    "negatives": lambda values, starts: _count_by_tensor(values < 0, starts),
    "zeros": lambda values, starts: _count_by_tensor(values == 0, starts),
}


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
"""Column title of each item of `statistic_category`."""
DEFAULT_STATISTICS = ("max", "min", "l2norm")
DEVICE_STATISTICS = ("max", "min", "avg", "l2norm")
"""Items that can be computed on an accelerator."""


_MOMENTS_BY_ITEM: dict[str, str] = {
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
"""Field of `ElementMoments` that an item is computed from, beside the count."""
_COUNTABLE_TYPES = frozenset(
    name for name in element_types.ELEMENT_TYPES if not name.startswith("complex")
)
_FRACTIONAL_ITEMS = frozenset(("max", "min", "avg", "l2norm"))
"""Items that are not whole numbers."""


def compute_statistic_texts(
    items: tuple[str, ...], dtype: str, data: memoryview, *, exact: bool = False
) -> tuple[str, ...]:
    """Return the text of each item for raw elements of that type, C order, little endian.

    With `exact` numbers have all their digits. UnsupportedError for a type without statistics: a
    complex one.
    """
    return tuple(compute_statistic_row(items, dtype, data, exact=exact).split(",")) if items else ()


def compute_statistic_row(
    items: tuple[str, ...], dtype: str, data: memoryview, *, exact: bool = False
) -> str:
    """Return the statistics of one tensor, joined by commas."""
    _check_countable(dtype)
    return _format_rows(
        items, compute_needed_moments(dtype, data, _select_moment_names(items)), (data,), exact
    )[0]


def compute_statistic_rows(
    items: tuple[str, ...], dtype: str, tensors: Sequence[bytes], *, exact: bool = False
) -> list[str]:
    """Return `compute_statistic_row` of each of these tensors, none of which may be empty.

    One pass over all of them costs little more than one over the largest.
    """
    _check_countable(dtype)
    return _format_rows(
        items, compute_moments_of_many(dtype, tensors, _select_moment_names(items)), tensors, exact
    )


def has_statistics(dtype: str) -> bool:
    """Return whether statistics exist for an element type."""
    return dtype in _COUNTABLE_TYPES


def format_statistic_number(value: float) -> str:
    """Return a number as C++ streams print it by default: six digits, NaN without its sign."""
    return f"{value:g}"


def _check_countable(dtype: str) -> None:
    if not has_statistics(dtype):
        raise UnsupportedError(f"element type {dtype!r} has no statistics")


def _format_rows(
    items: tuple[str, ...], found: MomentColumns, tensors: Sequence[bytes | memoryview], exact: bool
) -> list[str]:
    columns = [_make_column(item, found, tensors) for item in items]
    rows = zip(*columns, strict=True) if columns else repeat((), len(tensors))
    return list(map(_make_row_form(items, exact).__mod__, rows))


def _make_column(
    item: str, found: MomentColumns, tensors: Sequence[bytes | memoryview]
) -> list[Any]:
    """Return one item of each tensor."""
    if item == MD5_ITEM:
        # Over the elements as the framework held them: of bfloat16, two bytes each.
        return [_compute_md5(data) for data in tensors]
    column = found[_MOMENTS_BY_ITEM.get(item, item)]
    if item == "l2norm":
        return list(map(math.sqrt, column))
    if item == "avg":
        sums = zip(column, found["count"], strict=True)
        return [total / count if count else math.nan for total, count in sums]
    return column


@lru_cache(maxsize=64)
def _make_row_form(items: tuple[str, ...], exact: bool) -> str:
    """Return the format of a row of items for the operator `%`."""
    number = "%r" if exact else "%g"
    return ",".join(number if item in _FRACTIONAL_ITEMS else "%s" for item in items)


@lru_cache(maxsize=64)
def _select_moment_names(items: tuple[str, ...]) -> frozenset[str]:
    return frozenset(_MOMENTS_BY_ITEM[item] for item in items if item in _MOMENTS_BY_ITEM)


def _compute_md5(data: bytes | memoryview) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()

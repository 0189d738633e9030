"""What one pass over a tensor's elements finds: extremes, sums and counts, in float64. Pure.

NaN and infinities take part. Small tensors are taken together, large ones in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump.contract import dtypes, sums
from rankdump.contract.errors import UnsupportedError

Elements: TypeAlias = "npt.NDArray[Any]"
Needed: TypeAlias = "frozenset[str]"
"""Names of fields of `Moments`, beside the count."""
Columns: TypeAlias = "dict[str, list[Any]]"
"""What was found of each of some tensors, by the field's name, the count among them."""

_BLOCK = 1 << 17
"""Elements looked at in one go: few enough to stay in a core's cache between the passes."""


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
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in _FIELDS}
        return Moments(**{name: _joined(name, pair) for name, pair in pairs.items()})


def moments(flat: Elements) -> Moments:
    """Return the moments of a flat array of real elements."""
    return Moments(flat.size, **_found(flat, _ALL)) if flat.size else Moments()


def moments_of(dtype: str, data: memoryview, needed: Needed) -> Columns:
    """Return what is needed of the raw elements of one tensor, and their count."""
    kind = dtypes.element_type(dtype)
    count = data.nbytes // kind.item_bytes
    if not count:
        nothing = Moments()
        return {"count": [0], **{name: [getattr(nothing, name)] for name in needed}}
    if not kind.widened:
        found = _found(_elements(kind, data), needed)
    else:
        # By blocks as well: the float32 that they become shall not leave the cache.
        step = _BLOCK * kind.item_bytes
        blocks = (data[at : at + step] for at in range(0, data.nbytes, step))
        parts = [_found(_elements(kind, block), needed) for block in blocks]
        found = {name: _joined(name, [part[name] for part in parts]) for name in needed}
    columns: Columns = {name: [value] for name, value in found.items()}
    columns["count"] = [count]
    return columns


def moments_of_many(dtype: str, tensors: Sequence[bytes], needed: Needed) -> Columns:
    """Return what is needed of each of these tensors, and their counts.

    UnsupportedError when one has no elements.
    """
    kind = dtypes.element_type(dtype)
    counts = [len(data) // kind.item_bytes for data in tensors]
    if not all(counts):
        raise UnsupportedError(f"tensor {counts.index(0)} of {len(counts)} has no elements")
    columns: Columns = {"count": counts, **{name: [] for name in needed}}
    for run in _runs(counts):
        values = _comparable(_elements(kind, memoryview(b"".join(tensors[run]))))
        starts = np.cumsum([0, *counts[run][:-1]])
        for name, found in _found_by_tensor(values, starts, needed).items():
            columns[name] += found.tolist()
    return columns


def _runs(counts: Sequence[int]) -> Generator[slice]:
    """Yield neighbours that make up a block together."""
    first = size = 0
    for at, count in enumerate(counts):
        if size and size + count > _BLOCK:
            yield slice(first, at)
            first, size = at, 0
        size += count
    if size:
        yield slice(first, len(counts))


def _elements(kind: dtypes.ElementType, data: memoryview) -> Elements:
    stored = dtypes.as_stored(kind.name, data) if kind.widened else data
    return np.frombuffer(stored, kind.descr)


def _found(flat: Elements, needed: Needed) -> dict[str, Any]:
    with np.errstate(all="ignore"):
        if flat.size <= _BLOCK:
            return _block(flat, needed)
        blocks = (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))
        parts = [_block(block, needed) for block in blocks]
    return {name: _joined(name, [part[name] for part in parts]) for name in needed}


def _block(values: Elements, needed: Needed) -> dict[str, Any]:
    values = _comparable(values)
    return {name: find(values) for name, find in _finders(needed)}


@lru_cache(maxsize=64)
def _finders(needed: Needed) -> tuple[tuple[str, Callable[[Elements], Any]], ...]:
    return tuple((name, find) for name, find in _FINDERS.items() if name in needed)


def _joined(name: str, parts: Sequence[Any]) -> Any:
    """Return what several sets of elements have together, from what each has."""
    if name not in ("maximum", "minimum"):
        return sum(parts)
    nan = next((part for part in parts if part != part), None)
    if nan is not None:
        return nan
    return max(parts) if name == "maximum" else min(parts)


def _comparable(values: Elements) -> Elements:
    """Return float16 as float32, which is exact and what processors compare fast."""
    return values.astype(np.float32) if values.dtype.char == "e" else values


# Converting to float64 keeps the order of elements: extremes and signs do not need it. They stand
# first, because reading alone brings a block into the cache fastest.
_FINDERS: dict[str, Callable[[Elements], Any]] = {
    "maximum": lambda values: float(np.maximum.reduce(values)),
    "minimum": lambda values: float(np.minimum.reduce(values)),
    "nans": lambda values: int(np.count_nonzero(np.isnan(values))),
    "positive_infinities": lambda values: int(np.count_nonzero(values == np.inf)),
    "negative_infinities": lambda values: int(np.count_nonzero(values == -np.inf)),
    "positives": lambda values: int(np.count_nonzero(values > 0)),
    "negatives": lambda values: int(np.count_nonzero(values < 0)),
    "zeros": lambda values: int(np.count_nonzero(values == 0)),
    "total": sums.total,
    "squares": sums.squares,
}
_ALL = frozenset(_FINDERS)
_FIELDS = ("count", *sorted(_ALL))


def _found_by_tensor(values: Elements, starts: Elements, needed: Needed) -> dict[str, Elements]:
    """Return what is needed of tensors that stand one after the other and begin at `starts`."""
    with np.errstate(all="ignore"):
        found = {name: find(values, starts) for name, find in _BY_TENSOR.items() if name in needed}
        if "total" in needed or "squares" in needed:
            wide = values.astype(np.float64)
            if "total" in needed:
                found["total"] = np.add.reduceat(wide, starts)
            if "squares" in needed:
                found["squares"] = np.add.reduceat(np.multiply(wide, wide, out=wide), starts)
    return found


def _counted(condition: npt.NDArray[np.bool_], starts: Elements) -> Elements:
    return np.add.reduceat(condition, starts, dtype=np.int64)


_BY_TENSOR: dict[str, Callable[[Elements, Elements], Elements]] = {
    "maximum": lambda values, starts: np.maximum.reduceat(values, starts).astype(np.float64),
    "minimum": lambda values, starts: np.minimum.reduceat(values, starts).astype(np.float64),
    "nans": lambda values, starts: _counted(np.isnan(values), starts),
    "positive_infinities": lambda values, starts: _counted(values == np.inf, starts),
    "negative_infinities": lambda values, starts: _counted(values == -np.inf, starts),
    "positives": lambda values, starts: _counted(values > 0, starts),
    "negatives": lambda values, starts: _counted(values < 0, starts),
    "zeros": lambda values, starts: _counted(values == 0, starts),
}

"""What one pass over a tensor's elements finds: extremes, sums and counts, in float64. Pure.

NaN and infinities take part. Small tensors are taken together, large ones in blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract import dtypes
from rankdump.contract.errors import UnsupportedError

_BLOCK = 1 << 17
"""Elements looked at in one go: few enough to stay in a core's cache between the passes."""
_CHUNK = 1 << 13
"""Elements squared at a time: of more, libraries for linear algebra start threads of their own."""


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
            maximum=_first_if(self.maximum >= other.maximum, self.maximum, other.maximum),
            minimum=_first_if(self.minimum <= other.minimum, self.minimum, other.minimum),
            total=self.total + other.total,
            squares=self.squares + other.squares,
            nans=self.nans + other.nans,
            positive_infinities=self.positive_infinities + other.positive_infinities,
            negative_infinities=self.negative_infinities + other.negative_infinities,
            positives=self.positives + other.positives,
            negatives=self.negatives + other.negatives,
            zeros=self.zeros + other.zeros,
        )


def moments(flat: npt.NDArray[Any]) -> Moments:
    """Return the moments of a flat array of real elements."""
    blocks = (flat[at : at + _BLOCK] for at in range(0, flat.size, _BLOCK))
    return _joined(_block(block, _MOMENTS) for block in blocks)


def moments_of(dtype: str, data: memoryview, needed: frozenset[str]) -> Moments:
    """Return the moments that are needed of raw elements; the others are as of no elements."""
    kind = dtypes.element_type(dtype)
    block_bytes = _BLOCK * kind.item_bytes
    if data.nbytes <= block_bytes:
        return _block(_elements(kind, data), needed) if data.nbytes else Moments()
    blocks = (data[at : at + block_bytes] for at in range(0, data.nbytes, block_bytes))
    return _joined(_block(_elements(kind, block), needed) for block in blocks)


def moments_of_many(dtype: str, tensors: Sequence[bytes], needed: frozenset[str]) -> list[Moments]:
    """Return the moments of each of these tensors, found in one pass over all of them.

    UnsupportedError when one has no elements.
    """
    kind = dtypes.element_type(dtype)
    sizes = [len(data) // kind.item_bytes for data in tensors]
    if not all(sizes):
        raise UnsupportedError(f"tensor {sizes.index(0)} of {len(sizes)} has no elements")
    values = _comparable(_elements(kind, memoryview(b"".join(tensors))))
    starts = np.cumsum([0, *sizes[:-1]])
    with np.errstate(all="ignore"):
        columns = {name: _BY_TENSOR[name](values, starts).tolist() for name in needed}
    return [
        Moments(size, **{name: found[at] for name, found in columns.items()})
        for at, size in enumerate(sizes)
    ]


def _elements(kind: dtypes.ElementType, data: memoryview) -> npt.NDArray[Any]:
    stored = dtypes.as_stored(kind.name, data) if kind.widened else data
    return np.frombuffer(stored, kind.descr)


def _joined(parts: Iterable[Moments]) -> Moments:
    return reduce(Moments.joined, parts, Moments())


def _first_if(first: bool, one: float, other: float) -> float:
    """Return one of two extremes; NaN, which compares with nothing, when either is."""
    return one if first or one != one else other


def _block(values: npt.NDArray[Any], needed: Iterable[str]) -> Moments:
    # Converting to float64 keeps the order of elements: extremes and signs do not need it.
    values = _comparable(values)
    found: dict[str, Any] = {"count": values.size}
    with np.errstate(all="ignore"):
        for name in needed:
            found[name] = _MOMENTS[name](values)
    return Moments(**found)


def _comparable(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return float16 as float32, which is exact and what processors compare fast."""
    return values.astype(np.float32) if values.dtype.char == "e" else values


def _squares(values: npt.NDArray[Any]) -> float:
    if values.size <= _CHUNK:
        wide = values.astype(np.float64)
        return float(np.dot(wide, wide))
    room = np.empty(_CHUNK)
    total = 0.0
    for at in range(0, values.size, _CHUNK):
        chunk = values[at : at + _CHUNK]
        wide = room[: chunk.size]
        wide[:] = chunk
        total += float(np.dot(wide, wide))
    return total


def _total(values: npt.NDArray[Any]) -> float:
    return float(values.sum(dtype=np.float64))


def _nans(values: npt.NDArray[Any]) -> int:
    return int(np.count_nonzero(np.isnan(values)))


_MOMENTS: dict[str, Callable[[npt.NDArray[Any]], float]] = {
    "maximum": lambda values: float(np.maximum.reduce(values)),
    "minimum": lambda values: float(np.minimum.reduce(values)),
    "total": _total,
    "squares": _squares,
    "nans": _nans,
    "positive_infinities": lambda values: int(np.count_nonzero(values == np.inf)),
    "negative_infinities": lambda values: int(np.count_nonzero(values == -np.inf)),
    "positives": lambda values: int(np.count_nonzero(values > 0)),
    "negatives": lambda values: int(np.count_nonzero(values < 0)),
    "zeros": lambda values: int(np.count_nonzero(values == 0)),
}


def _counted(condition: npt.NDArray[np.bool_], starts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.add.reduceat(condition, starts, dtype=np.int64)


_BY_TENSOR: dict[str, Callable[[npt.NDArray[Any], npt.NDArray[Any]], npt.NDArray[Any]]] = {
    "maximum": lambda values, starts: _wide(np.maximum.reduceat(values, starts)),
    "minimum": lambda values, starts: _wide(np.minimum.reduceat(values, starts)),
    "total": lambda values, starts: np.add.reduceat(_wide(values), starts),
    "squares": lambda values, starts: np.add.reduceat(np.square(_wide(values)), starts),
    "nans": lambda values, starts: _counted(np.isnan(values), starts),
    "positive_infinities": lambda values, starts: _counted(values == np.inf, starts),
    "negative_infinities": lambda values, starts: _counted(values == -np.inf, starts),
    "positives": lambda values, starts: _counted(values > 0, starts),
    "negatives": lambda values, starts: _counted(values < 0, starts),
    "zeros": lambda values, starts: _counted(values == 0, starts),
}
"""The same of many tensors, which stand one after the other and begin at `starts`."""


def _wide(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return values.astype(np.float64)

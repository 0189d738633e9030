"""One array in numbers: extremes, mean, norm, and how much of it is not a number. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures over every element, in float64; NaN and infinities take part, as they are.

    A complex element counts with its modulus.
    """

    count: int
    minimum: float | None
    """None for an empty array, like the next two."""
    maximum: float | None
    mean: float | None
    l2norm: float
    nans: int
    infinities: int
    zeros: int


def statistics(tensor: npt.NDArray[Any]) -> Statistics:
    """Return the figures; memory stays bounded whatever the tensor's size."""
    flat = tensor.reshape(-1)
    if not flat.size:
        return Statistics(0, None, None, None, 0.0, 0, 0, 0)
    blocks = [_block(flat[at : at + _BLOCK]) for at in range(0, flat.size, _BLOCK)]
    low, high, total, largest, nans, infinities, zeros = map(_column, zip(*blocks, strict=True))
    with np.errstate(all="ignore"):
        return Statistics(
            count=flat.size,
            minimum=float(low.min()),
            maximum=float(high.max()),
            mean=float(total.sum() / flat.size),
            l2norm=_norm(flat, float(largest.max())),
            nans=int(nans.sum()),
            infinities=int(infinities.sum()),
            zeros=int(zeros.sum()),
        )


def _column(values: tuple[float, ...]) -> npt.NDArray[np.float64]:
    return np.array(values, dtype=np.float64)


def _wide(block: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    values = np.abs(block) if block.dtype.kind == "c" else block
    return values.astype(np.float64)


def _block(block: npt.NDArray[Any]) -> tuple[float, ...]:
    with np.errstate(all="ignore"):
        wide = _wide(block)
        return (
            float(wide.min()),
            float(wide.max()),
            float(wide.sum()),
            float(np.abs(wide).max()),
            float(np.isnan(wide).sum()),
            float(np.isinf(wide).sum()),
            float((wide == 0).sum()),
        )


def _norm(flat: npt.NDArray[Any], largest: float) -> float:
    if not np.isfinite(largest) or largest == 0.0:
        return largest
    # Scaled by the largest element, so that squares of 1e200 or 1e-200 stay in range.
    squares = 0.0
    for at in range(0, flat.size, _BLOCK):
        scaled = _wide(flat[at : at + _BLOCK]) / largest
        squares += float(np.square(scaled).sum())
    return largest * float(np.sqrt(squares))

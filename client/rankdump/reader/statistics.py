"""One array in figures, by the meaning that `statistic.csv` gives them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.moments import Moments, moments

_BLOCK = 1 << 20
"""Complex elements turned into moduli at a time."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Figures over every element, in float64; NaN and infinities take part, as they are.

    A complex element counts with its modulus, which `statistic.csv` never does.
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
    found = _moduli(flat) if flat.dtype.kind == "c" else moments(flat)
    return Statistics(
        count=found.count,
        minimum=found.minimum if found.count else None,
        maximum=found.maximum if found.count else None,
        mean=found.mean if found.count else None,
        l2norm=found.l2norm,
        nans=found.nans,
        infinities=found.positive_infinities + found.negative_infinities,
        zeros=found.zeros,
    )


def _moduli(flat: npt.NDArray[Any]) -> Moments:
    found = Moments()
    for at in range(0, flat.size, _BLOCK):
        with np.errstate(all="ignore"):
            block = np.abs(flat[at : at + _BLOCK])
        found = found.joined(moments(block))
    return found

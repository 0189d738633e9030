"""Whether a dumped result is within the rounding of its element type. Pure.

A result of type T is rounded once at its end, by at most u |r| for its unit roundoff u, or by the
smallest normal number where T has none in between. What its computation adds is the error that
comes with the value in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class FloatFormat(NamedTuple):
    """What rounding to an element type does."""

    unit: float
    """Half of the distance of 1 to the next number."""
    smallest: float
    """What a tiny result may be rounded by: results below are 0 on some devices."""
    largest: float


FLOAT_FORMATS: Mapping[str, FloatFormat] = {
    "float64": FloatFormat(2.0**-53, 2.0**-1022, float(np.finfo(np.float64).max)),
    "float32": FloatFormat(2.0**-24, 2.0**-126, float(np.finfo(np.float32).max)),
    "bfloat16": FloatFormat(2.0**-8, 2.0**-126, 3.3895313892515355e38),
    "float16": FloatFormat(2.0**-11, 2.0**-25, 65504.0),
}
"""Types of results that are judged."""
_REFERENCE_UNIT = FLOAT_FORMATS["float64"].unit
_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ResultVerdict:
    """How far one result is from its value in float64."""

    count: int
    beyond: int
    """Elements that are farther away than their bound."""
    share: float
    """Largest error over its bound; infinite where one side alone is not finite."""
    place: tuple[int, ...]
    """Indices of that element; empty without elements."""
    dumped: float
    exact: float
    bound: float

    @property
    def is_within(self) -> bool:
        """Whether all elements are within their bounds."""
        return self.beyond == 0


def find_inner_unit(dtype: str) -> float:
    """Return the unit roundoff of sums whose result has that type: float32 for 16 bits."""
    return FLOAT_FORMATS["float32" if dtype in _NARROW else dtype].unit


def judge_result(
    dumped: npt.NDArray[Any], exact: npt.NDArray[Any], error: npt.NDArray[Any], dtype: str
) -> ResultVerdict:
    """Return the verdict on a result of that type; the three arrays have one shape.

    `error` is the largest one before the last rounding. The value in float64 has an error too,
    which is as much smaller as its unit is.
    """
    form = FLOAT_FORMATS[dtype]
    with np.errstate(all="ignore"):
        own = 1 + _REFERENCE_UNIT / find_inner_unit(dtype)
        bound: npt.NDArray[np.float64] = (
            error * own + (form.unit + 4 * _REFERENCE_UNIT) * np.abs(exact) + form.smallest
        )
        apart = np.abs(np.asarray(dumped, np.float64) - exact)
        same = (np.isnan(dumped) & np.isnan(exact)) | (dumped == exact)
        # Of what is beyond the largest number, infinity is the right rounding.
        same |= np.isinf(bound)  # a part of it may be anything
        overflown = np.isinf(dumped) & (np.sign(dumped) == np.sign(exact))
        same |= overflown & (np.abs(exact) + bound >= form.largest)
        share: npt.NDArray[np.float64] = np.where(same, 0.0, apart / bound)
        share[np.isnan(share)] = math.inf
    if not share.size:
        return ResultVerdict(0, 0, 0.0, (), math.nan, math.nan, math.nan)
    worst = int(np.argmax(share))
    place: list[int] = [int(index) for index in np.unravel_index(worst, share.shape)]
    return ResultVerdict(
        count=share.size,
        beyond=int((share > 1).sum()),
        share=_get_element(share, worst),
        place=tuple(place),
        dumped=_get_element(dumped, worst),
        exact=_get_element(exact, worst),
        bound=_get_element(bound, worst),
    )


def _get_element(array: npt.NDArray[Any], at: int) -> float:
    return float(array.reshape(-1)[at])

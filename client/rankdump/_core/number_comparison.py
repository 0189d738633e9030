"""Comparison of a number with those that are usual. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from statistics import median

_FAR_DEVIATIONS = 10.0
_FAR_FACTOR = 10.0
"""Numbers that hardly differ have a deviation near zero, so a number is ten times as large too."""
_DEVIATION_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


def is_far_above(usual: Sequence[float], number: float, least: int) -> bool:
    """Return whether a finite number is far above the usual ones, of which there are `least`.

    They are compared by their logarithms: median and median absolute deviation, which a few
    outliers among the usual ones do not move. Only positive finite ones count.

    >>> is_far_above([1.0, 1.1, 0.9] * 4, 50.0, 12), is_far_above([1.0, 1.1, 0.9] * 4, 3.0, 12)
    (True, False)
    """
    logs = [log(each) for each in usual if each > 0 and isfinite(each)]
    if len(logs) < least or not isfinite(number) or number <= 0:
        return False
    middle = median(logs)
    deviation = _DEVIATION_SCALE * median(abs(each - middle) for each in logs)
    above = log(number) - middle
    return above > log(_FAR_FACTOR) and above > _FAR_DEVIATIONS * deviation

"""Decisions of the black box on a rank: which part of the modules a step measures, and whether a
norm has jumped. Pure: no clock, no disk, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import ceil, isfinite, log
from statistics import median
from typing import NamedTuple

MAX_STRIDE = 1024
_ROOM_SHARE = 0.5
"""Part of the allowed share below which more is measured."""
_TARGET_SHARE = 0.8

HISTORY_STEPS = 64
"""Earlier norms that a jump is judged by, at most."""
MIN_HISTORY = 12
"""Fewest of them."""
_JUMP_DEVIATIONS = 10.0
_MIN_JUMP_FACTOR = 10.0
"""A norm that has hardly changed has a deviation near zero, so a jump is ten times as large too."""
_DEVIATION_SCALE = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""


class StrideReason(Enum):
    """Why the stride is what it is."""

    STAY = "stay"
    COST = "cost"
    ROOM = "room"
    LIMIT = "limit"
    """It cannot be higher, and measuring takes more than is allowed."""


class StrideDecision(NamedTuple):
    """Stride of the next steps: one of so many parts of the modules is measured in each."""

    stride: int
    reason: StrideReason


def choose_stride(
    stride: int, share: float, allowed: float, most: int = MAX_STRIDE
) -> StrideDecision:
    """Return the stride, at most `most`, after steps of which measuring took a share.

    >>> choose_stride(1, 0.05, 0.01)
    StrideDecision(stride=7, reason=<StrideReason.COST: 'cost'>)
    >>> choose_stride(7, 0.002, 0.01)
    StrideDecision(stride=2, reason=<StrideReason.ROOM: 'room'>)
    """
    wanted = ceil(stride * share / (allowed * _TARGET_SHARE)) if allowed > 0 else MAX_STRIDE
    if share > allowed:
        if stride >= most:
            return StrideDecision(stride, StrideReason.LIMIT)
        return StrideDecision(min(max(wanted, stride + 1), most), StrideReason.COST)
    if share < allowed * _ROOM_SHARE and stride > 1:
        return StrideDecision(min(max(wanted, 1), stride - 1), StrideReason.ROOM)
    return StrideDecision(stride, StrideReason.STAY)


def has_jumped(earlier: Sequence[float], norm: float) -> bool:
    """Return whether a finite norm is far above all that is usual among the earlier ones.

    Norms are compared by their logarithms: median and median absolute deviation, which a few
    earlier outliers do not move.

    >>> has_jumped([1.0, 1.1, 0.9] * 4, 50.0), has_jumped([1.0, 1.1, 0.9] * 4, 3.0)
    (True, False)
    """
    if len(earlier) < MIN_HISTORY or not isfinite(norm) or norm <= 0:
        return False
    # Cheap, and true of nearly all: the median is not below the smallest one.
    smallest = min(earlier)
    if smallest > 0 and norm <= _MIN_JUMP_FACTOR * smallest:
        return False
    usual = [log(each) for each in earlier if each > 0 and isfinite(each)]
    if len(usual) < MIN_HISTORY:
        return False
    middle = median(usual)
    deviation = _DEVIATION_SCALE * median(abs(each - middle) for each in usual)
    above = log(norm) - middle
    return above > log(_MIN_JUMP_FACTOR) and above > _JUMP_DEVIATIONS * deviation

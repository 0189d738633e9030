"""Decisions of the black box on a rank: which part of the modules a step measures, and whether a
norm has jumped. Pure: no clock, no disk, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rankdump._core.number_comparison import is_far_above

MAX_STRIDE = 1024
MAX_PACE = 4
"""Of so many steps one measures a tensor at least; fewer would find a fault too late."""
_ROOM_SHARE = 0.5
"""Part of the allowed share below which more is measured."""
_TARGET_SHARE = 0.8

HISTORY_STEPS = 64
"""Earlier norms that a jump is judged by, at most."""
MIN_HISTORY = 12
"""Fewest of them."""


class StrideDecision(NamedTuple):
    """Stride of the next steps: one of so many parts of the modules is measured in each."""

    stride: int
    is_over: bool = False
    """Whether measuring takes more than is allowed, and the stride cannot be higher."""


def choose_stride(
    stride: int, share: float, allowed: float, most: int = MAX_STRIDE
) -> StrideDecision:
    """Return the stride, at most `most`, after steps of which measuring took a share.

    >>> choose_stride(1, 0.05, 0.01)
    StrideDecision(stride=7, is_over=False)
    >>> choose_stride(7, 0.002, 0.01)
    StrideDecision(stride=2, is_over=False)
    """
    wanted = ceil(stride * share / (allowed * _TARGET_SHARE)) if allowed > 0 else MAX_STRIDE
    if share > allowed:
        if stride >= most:
            return StrideDecision(stride, is_over=True)
        return StrideDecision(min(max(wanted, stride + 1), most))
    if share < allowed * _ROOM_SHARE and stride > 1:
        return StrideDecision(min(max(wanted, 1), stride - 1))
    return StrideDecision(stride)


def choose_part(iteration: int, stride: int, tensors: int) -> int:
    """Return which part of a model of so many tensors a step measures: each `stride`-th one from
    there on. A part behind all tensors is empty: with more parts than tensors, some steps between
    those that measure one measure none.

    >>> [choose_part(iteration, 4, 2) for iteration in range(6)]
    [0, 3, 1, 3, 0, 3]
    """
    pace = ceil(stride / tensors) if tensors else 1
    if pace == 1:
        return iteration % stride
    return stride - 1 if iteration % pace else iteration // pace % tensors


def has_jumped(earlier: Sequence[float], norm: float) -> bool:
    """Return whether a finite norm is far above all that is usual among the earlier ones.

    >>> has_jumped([1.0, 1.1, 0.9] * 4, 50.0), has_jumped([1.0, 1.1, 0.9] * 4, 3.0)
    (True, False)
    """
    return is_far_above(earlier, norm, MIN_HISTORY)

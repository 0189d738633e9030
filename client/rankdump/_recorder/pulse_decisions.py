"""Decisions of the black box on a rank: which part of the modules a step measures, what it may
spend on fingerprints and on copies of tensors in full, and whether a norm has jumped. Pure: no
clock, no disk, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from rankdump._core.number_comparison import is_far_above
from rankdump._core.recorder_protocol import TurnSpending

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


_SAVED_STEPS = 4
"""Steps whose share may be saved up: a larger tensor would delay a step too much."""
_FIRST_RATE_NS = 2.0
"""Of a byte, until the first fingerprint was computed."""
_RATE_WEIGHT = 0.25
"""Of the latest fingerprint in the time of a byte."""
_MIN_RATED_BYTES = 1 << 12
"""A smaller tensor says little of the time of a byte."""
_TENSOR_NS = 10_000
"""Of a fingerprint, or of a copy, however small its tensor is."""
_FIRST_COPY_RATE_NS = 0.5
_SEND_RATE_NS = 1.0
"""Of a byte of a copy, on the thread that sends it beside the training thread."""


class TurnCredit:
    """What a rank may spend on fingerprints and copies now.

    Of the share of a step that the black box may take, pulses come first, and what they leave is
    saved up for tensors whose turn comes.
    """

    def __init__(self, allowed: float) -> None:
        """`allowed` is the share of a step that the black box may take."""
        self._allowed = allowed
        self._credit_ns = self._most_ns = 0.0
        self._rate_ns, self._copy_rate_ns = _FIRST_RATE_NS, _FIRST_COPY_RATE_NS

    def can_afford(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies may be made now, together."""
        return self._estimate_ns(spending) <= self._credit_ns

    def is_too_much(self, spending: TurnSpending) -> bool:
        """Return whether they can never be afforded in one step."""
        return self._estimate_ns(spending) > self._most_ns

    def spend_fingerprint(self, byte_count: int, spent_ns: int) -> None:
        """Take the time of a fingerprint off."""
        self._credit_ns -= spent_ns
        if byte_count >= _MIN_RATED_BYTES:
            self._rate_ns += _RATE_WEIGHT * (spent_ns / byte_count - self._rate_ns)

    def spend_copy(self, byte_count: int, spent_ns: int) -> None:
        """Take the time of a copy off, and of sending it."""
        self._credit_ns -= spent_ns + _SEND_RATE_NS * byte_count
        if byte_count >= _MIN_RATED_BYTES:
            self._copy_rate_ns += _RATE_WEIGHT * (spent_ns / byte_count - self._copy_rate_ns)

    def end_step(self, step_ns: int, pulses_ns: int) -> None:
        """Add what a step has left: `step_ns` without the black box, of which pulses took some."""
        self._most_ns = _SAVED_STEPS * self._allowed * step_ns
        left_ns = self._credit_ns + self._allowed * step_ns - pulses_ns
        self._credit_ns = min(max(left_ns, -self._most_ns), self._most_ns)

    def _estimate_ns(self, spending: TurnSpending) -> float:
        byte_count, fingerprints, copied_bytes, copies = spending
        return (
            _TENSOR_NS * (fingerprints + copies)
            + self._rate_ns * byte_count
            + (self._copy_rate_ns + _SEND_RATE_NS) * copied_bytes
        )

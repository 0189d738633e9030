"""Time that the pulses of the black box leave for fingerprints: of the share of a step that it may
take, pulses come first, and what is left is saved up for tensors whose turn comes. Pure.
"""

from __future__ import annotations

_SAVED_STEPS = 4
"""Steps whose share may be saved up: a larger tensor would delay a step too much."""
_FIRST_RATE_NS = 2.0
"""Of a byte, until the first fingerprint was computed."""
_RATE_WEIGHT = 0.25
"""Of the latest fingerprint in the time of a byte."""
_MIN_RATED_BYTES = 1 << 12
"""A smaller tensor says little of the time of a byte."""
_TENSOR_NS = 10_000
"""Of a fingerprint, however small its tensor is."""


class FingerprintCredit:
    """What a rank may spend on fingerprints now."""

    def __init__(self, allowed: float) -> None:
        """`allowed` is the share of a step that pulses and fingerprints may take together."""
        self._allowed = allowed
        self._credit_ns = self._most_ns = 0.0
        self._rate_ns = _FIRST_RATE_NS

    def can_afford(self, byte_count: int, tensors: int = 1) -> bool:
        """Return whether fingerprints of so many tensors of that size together may be computed."""
        return self._estimate_ns(byte_count, tensors) <= self._credit_ns

    def is_too_large(self, byte_count: int) -> bool:
        """Return whether a tensor of that size can never be afforded."""
        return self._estimate_ns(byte_count) > self._most_ns

    def spend(self, byte_count: int, spent_ns: int) -> None:
        """Take the time of a fingerprint off."""
        self._credit_ns -= spent_ns
        if byte_count >= _MIN_RATED_BYTES:
            self._rate_ns += _RATE_WEIGHT * (spent_ns / byte_count - self._rate_ns)

    def end_step(self, step_ns: int, pulses_ns: int) -> None:
        """Add what a step has left: `step_ns` without the black box, of which pulses took some."""
        self._most_ns = _SAVED_STEPS * self._allowed * step_ns
        left_ns = self._credit_ns + self._allowed * step_ns - pulses_ns
        self._credit_ns = min(max(left_ns, -self._most_ns), self._most_ns)

    def _estimate_ns(self, byte_count: int, tensors: int = 1) -> float:
        return _TENSOR_NS * tensors + self._rate_ns * byte_count

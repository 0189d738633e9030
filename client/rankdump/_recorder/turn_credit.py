"""Time that the pulses of the black box leave for fingerprints and for copies of tensors in full:
of the share of a step that it may take, pulses come first, and what is left is saved up for tensors
whose turn comes. Pure.
"""

from __future__ import annotations

from rankdump._core.recorder_protocol import TurnSpending

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
    """What a rank may spend on fingerprints and copies now."""

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

"""Shares of a budget in steps, so that what is said of a growing wait changes a few times only."""

from __future__ import annotations

from bisect import bisect_right

HALF = 0.5
_STEPS = (
    *(tenth / 10 for tenth in range(10)),
    *(1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0),
    *(float(1 << power) for power in range(5, 64)),
)


def step_of(share: float) -> float:
    """Return the last step that a share has reached."""
    return _STEPS[bisect_right(_STEPS, max(0.0, share)) - 1]


def step_after(share: float) -> float:
    """Return the step that it has not reached yet; the same one while `step_of` is the same."""
    return _STEPS[min(bisect_right(_STEPS, max(0.0, share)), len(_STEPS) - 1)]

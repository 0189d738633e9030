"""What spread is to be expected by the last iteration, where it clearly rises. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column
from rankdump.contract.iterations import parse_iterations

ENDLESS = -1
_FEWEST = 5
"""Iterations it takes before a rise is believed."""
_CLEAR = 4.0
"""A slope counts when it is that many times its own standard error."""
_NOTABLE = 0.1
"""And when it raised the spread by this part of its mean."""
_MOST = (1 << 63) - 1
"""What a signed number holds: an iteration beyond it is never reached."""


@dataclass(frozen=True, slots=True)
class Rise:
    """A straight line through the spreads of a group."""

    slope_us: float
    """Per iteration."""
    start_us: float
    """At iteration 0."""

    def at(self, iteration: int) -> int:
        """Return the spread expected in an iteration."""
        return min(max(0, round(self.start_us + self.slope_us * iteration)), _MOST)

    def reaches(self, spread_us: float) -> int:
        """Return the first iteration with at least that spread."""
        return max(0, int(np.ceil((spread_us - self.start_us) / self.slope_us)))


def rise_of(history: Sequence[tuple[int, int]]) -> Rise | None:
    """Return the line through the spreads of iterations; None unless they clearly rise."""
    if len(history) < _FEWEST:
        return None
    iterations: Column = np.array([iteration for iteration, _ in history], dtype="f8")
    spreads: Column = np.array([spread for _, spread in history], dtype="f8")
    centred = iterations - iterations.mean()
    square = float(centred @ centred)
    if not square:
        return None
    slope = float(centred @ spreads) / square
    start = float(spreads.mean()) - slope * float(iterations.mean())
    left = spreads - (start + slope * iterations)
    error = float(np.sqrt((left @ left) / (len(history) - 2) / square))
    grown = slope * float(np.ptp(iterations))
    if slope <= _CLEAR * error or grown < _NOTABLE * float(spreads.mean()) or slope <= 0:
        return None
    return Rise(slope, start)


def last_selected(selections: Iterable[str]) -> int:
    """Return the last iteration that any of the plans selects; ENDLESS when that has no end."""
    last = ENDLESS
    for text in set(selections):
        iterations = parse_iterations(text)
        if iterations is None or iterations.spans is None:
            return ENDLESS
        last = max([last, *(high for _, high in iterations.spans)])
    return last if last <= _MOST else ENDLESS

"""Clocks around an action."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(action: Callable[[], object]) -> float:
    """Return how long an action took."""
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun

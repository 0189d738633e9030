"""Many numbers in few characters. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending runs as `0-3,7`; an empty text for no numbers."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(_run(low, high) for low, high in runs)


def absent(numbers: Iterable[int], count: int) -> str:
    """Return which of the numbers below a count are not among these; any count costs the same."""
    ends = (-1, *sorted(number for number in set(numbers) if number < count), count)
    gaps = [(low + 1, high - 1) for low, high in pairwise(ends) if high - low > 1]
    return ",".join(_run(low, high) for low, high in gaps)


def _run(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"

"""Result of a benchmark: numbers with units in their names, and ratios."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from .machine import machine


@dataclass(frozen=True, slots=True)
class Result:
    """One run of one benchmark."""

    figures: dict[str, float] = field(default_factory=dict[str, float])
    ratios: dict[str, float] = field(default_factory=dict[str, float])

    def to_json(self, bench: str) -> str:
        """Return the result as one JSON object, on one line."""
        body = {
            "bench": bench,
            "figures": _rounded(self.figures),
            "ratios": _rounded(self.ratios),
            "machine": machine(),
        }
        return json.dumps(body)

    def to_text(self, bench: str) -> str:
        """Return the result as a table."""
        rows = [*_rounded(self.ratios).items(), *_rounded(self.figures).items()]
        return "\n".join([bench, *(f"  {name:<32} {value:g}" for name, value in rows)])


def median(numbers: Iterable[float]) -> float:
    """Return the median; a busy machine moves means, and it only ever slows things down."""
    return statistics.median(numbers)


def quantile(numbers: Iterable[float], share: float) -> float:
    """Return the smallest number that at least this share of them do not exceed."""
    ordered = sorted(numbers)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _rounded(numbers: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in numbers.items()}

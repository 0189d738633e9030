"""What tables and charts of the page show, in columns. Pure: lists and numbers only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.diff import wording
from rankdump.diff.summary import Operator, max_absolute
from rankdump.diff.values import CONSTANTS, Row

Cells: TypeAlias = "list[str] | list[int] | list[float]"
Columns: TypeAlias = "Mapping[str, Cells]"
Spelling: TypeAlias = "Callable[[str], str]"
"""How a name is shortened for people."""

NO_NUMBER = "no number"
_ASIDE = 0.6
"""Width that the points of all ranks take at a position."""


@dataclass(frozen=True, slots=True)
class Scale:
    """The vertical axis of errors: decades, a line below them for 0 and one above for no number."""

    low: int
    """Exponent of the smallest error, rounded down."""
    high: int
    """Exponent of the largest, rounded up."""

    @property
    def zero(self) -> int:
        """Where 0 stands."""
        return self.low - 1

    @property
    def unknown(self) -> int:
        """Where stands what has no number: other shapes, no partner, nothing finite."""
        return self.high + 1

    @property
    def labels(self) -> dict[int, str]:
        """Texts of the ticks."""
        decades = {power: f"1e{power}" for power in range(self.low, self.high + 1)}
        return {self.zero: "0", **decades, self.unknown: NO_NUMBER}

    def at(self, error: float) -> float:
        """Return where an error stands."""
        if not math.isfinite(error):
            return self.unknown
        return math.log10(error) if error > 0 else self.zero


@dataclass(frozen=True, slots=True)
class Axis:
    """The horizontal axis: iterations one after another, in each the positions of calls."""

    begins: Mapping[int, int]
    """Where each iteration begins."""
    aside: Mapping[int, float]
    """How far the points of each rank stand aside, so that none hides another's."""

    def at(self, row: Row) -> float:
        """Return where a pair of calls stands."""
        return self.begins[row.iteration] + row.position + self.aside[row.rank]


def scale_of(errors: Sequence[float]) -> Scale:
    """Return the axis on which all errors have room."""
    powers = [math.log10(error) for error in errors if error > 0 and math.isfinite(error)]
    if not powers:
        return Scale(-6, 0)
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return Scale(low, max(high, low + 1))


def row_columns(rows: Sequence[Row], spelt: Spelling) -> Columns:
    """Return one line per row, its measures exact, what has none NaN."""
    extra = dict.fromkeys(name for row in rows for name in row.outcome.extra)
    return {
        "rank": [row.rank for row in rows],
        "iteration": list(map(_iteration, rows)),
        "position": [row.position for row in rows],
        "direction": [_direction(row) for row in rows],
        "operator": [wording.name(row, spelt) for row in rows],
        "place": [row.place for row in rows],
        "verdict": [row.outcome.verdict.value for row in rows],
        "max abs": [max_absolute(row) for row in rows],
        **{title: [_measure(row, name) for row in rows] for title, name in _MEASURES.items()},
        **{name: [row.outcome.extra.get(name, math.nan) for row in rows] for name in extra},
        "type and shape": [wording.extents(row) for row in rows],
        "matched by": [row.rule or wording.NONE for row in rows],
        "figures apart": [wording.apart(row) for row in rows],
        "findings": [wording.findings(row) for row in rows],
    }


def operator_columns(operators: Sequence[Operator], spelt: Spelling) -> Columns:
    """Return one line per pair of calls."""
    worst = [each.worst for each in operators]
    return {
        "rank": [row.rank for row in worst],
        "iteration": list(map(_iteration, worst)),
        "position": [row.position for row in worst],
        "direction": [_direction(row) for row in worst],
        "operator": [wording.name(row, spelt) for row in worst],
        "worst verdict": [row.outcome.verdict.value for row in worst],
        "at": [row.place for row in worst],
        "tensors": [each.tensors for each in operators],
        "differing": [each.differing for each in operators],
        "error": [each.error for each in operators],
        "lowest cosine": [each.cosine for each in operators],
        "lowest close": [each.close_share for each in operators],
    }


def point_columns(operators: Sequence[Operator], scale: Scale, axis: Axis) -> Columns:
    """Return one point per pair of calls: where it stands, and what is said of it."""
    worst = [each.worst for each in operators]
    return {
        "x": list(map(axis.at, worst)),
        "y": [scale.at(each.error) for each in operators],
        "rank": [row.rank for row in worst],
        "when": [wording.iterations([row.iteration]) for row in worst],
        "operator": [f"{wording.name(row, str)}, {_direction(row)}" for row in worst],
        "place": [row.place for row in worst],
        "verdict": [row.outcome.verdict.value for row in worst],
        "error": [wording.rounded(each.error) for each in operators],
        "cosine": [wording.likeness(each.cosine) for each in operators],
        "close": [wording.percent(each.close_share) for each in operators],
        "extents": [wording.extents(row) for row in worst],
    }


def axis_of(operators: Sequence[Operator]) -> Axis:
    """Return the horizontal axis on which all pairs of calls have room."""
    lengths: dict[int, int] = {}
    for row in (each.worst for each in operators):
        lengths[row.iteration] = max(lengths.get(row.iteration, 0), row.position + 1)
    begins, at = dict[int, int](), 0
    for iteration in sorted(lengths):
        begins[iteration] = at
        at += lengths[iteration]
    ranks = sorted({each.worst.rank for each in operators})
    step = _ASIDE / len(ranks) if ranks else 0.0
    return Axis(begins, {rank: at * step for at, rank in enumerate(ranks)})


_MEASURES = {
    "mean abs": "mean_absolute",
    "max rel": "max_relative",
    "mean rel": "mean_relative",
    "cosine": "cosine",
    "rmse": "rmse",
    "rel euclidean": "relative_euclidean",
    "kl": "kl_divergence",
    "close share": "close_share",
    "unequal": "unequal",
    "not finite a": "nonfinite_a",
    "not finite b": "nonfinite_b",
}


def _measure(row: Row, name: str) -> float:
    measures = row.outcome.measures
    return math.nan if measures is None else float(getattr(measures, name))


def _iteration(row: Row) -> float:
    return math.nan if row.iteration == CONSTANTS else float(row.iteration)


def _direction(row: Row) -> str:
    return "backward" if row.backward else "forward"

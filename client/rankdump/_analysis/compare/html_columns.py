"""Columns of the tables and charts of the page, and the axes of the charts. Pure, without bokeh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, ComparisonRow
from rankdump._analysis.compare.report_summary import OperatorSummary, max_absolute

ColumnCells: TypeAlias = "list[str] | list[int] | list[float]"
PageColumns: TypeAlias = "Mapping[str, ColumnCells]"
NameShortener: TypeAlias = "Callable[[str], str]"
"""Function that shortens a name for display."""

NO_NUMBER = "no number"
_RANK_SPREAD = 0.6
"""Width that the points of all ranks take at a position."""

_MEASURE_TITLES = {
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


@dataclass(frozen=True, slots=True)
class ErrorScale:
    """The vertical axis of errors: decades, a level below for 0 and one above for no number."""

    low: int
    """Exponent of the smallest error, rounded down."""
    high: int
    """Exponent of the largest, rounded up."""

    @property
    def zero_level(self) -> int:
        """Level of an error of 0."""
        return self.low - 1

    @property
    def unknown_level(self) -> int:
        """Level of errors without a number: different shapes, no partner, nothing finite."""
        return self.high + 1

    @property
    def labels(self) -> dict[int, str]:
        """Labels of the ticks: both levels at the ends, and at most a dozen decades between."""
        step = max(1, math.ceil((self.high - self.low) / 12))
        decades = {power: f"1e{power}" for power in range(self.low, self.high + 1, step)}
        return {self.zero_level: "0", **decades, self.unknown_level: NO_NUMBER}

    def get_y(self, error: float) -> float:
        """Return the level of an error."""
        if not math.isfinite(error):
            return self.unknown_level
        return math.log10(error) if error > 0 else self.zero_level


@dataclass(frozen=True, slots=True)
class ExecutionAxis:
    """The horizontal axis: positions of calls, iteration after iteration."""

    iteration_starts: Mapping[int, int]
    """Position of the start of each iteration."""
    rank_offsets: Mapping[int, float]
    """Offset of the points of each rank, so that none hides another's."""

    def get_x(self, row: ComparisonRow) -> float:
        """Return the position of a pair of calls on the axis."""
        return self.iteration_starts[row.iteration] + row.position + self.rank_offsets[row.rank]


def build_error_scale(errors: Sequence[float]) -> ErrorScale:
    """Return the axis that fits all errors."""
    powers = [math.log10(error) for error in errors if error > 0 and math.isfinite(error)]
    if not powers:
        return ErrorScale(-6, 0)
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return ErrorScale(low, max(high, low + 1))


def build_row_columns(rows: Sequence[ComparisonRow], spelt: NameShortener) -> PageColumns:
    """Return one line per row, with exact measures; a missing measure is NaN."""
    extra = dict.fromkeys(name for row in rows for name in row.outcome.extra)
    return {
        **_build_call_columns(rows, spelt),
        "place": [row.place_name for row in rows],
        "verdict": [row.outcome.verdict.value for row in rows],
        "max abs": [max_absolute(row) for row in rows],
        **{
            title: [_get_measure(row, name) for row in rows]
            for title, name in _MEASURE_TITLES.items()
        },
        **{name: [row.outcome.extra.get(name, math.nan) for row in rows] for name in extra},
        "type and shape": [report_text.format_dtype_and_shape(row) for row in rows],
        "matched by": [row.rule or report_text.NO_VALUE for row in rows],
        "statistic differences": [report_text.format_statistic_differences(row) for row in rows],
        "findings": [report_text.join_findings(row) for row in rows],
    }


def build_operator_columns(
    operators: Sequence[OperatorSummary], spelt: NameShortener
) -> PageColumns:
    """Return one line per pair of calls."""
    worst = [each.worst for each in operators]
    return {
        **_build_call_columns(worst, spelt),
        "worst verdict": [row.outcome.verdict.value for row in worst],
        "at": [row.place_name for row in worst],
        "tensors": [each.tensors for each in operators],
        "differing": [each.differing for each in operators],
        "error": [each.error for each in operators],
        "lowest cosine": [each.cosine for each in operators],
        "lowest close": [each.close_share for each in operators],
    }


def build_point_columns(
    operators: Sequence[OperatorSummary], scale: ErrorScale, axis: ExecutionAxis
) -> PageColumns:
    """Return one point per pair of calls: its coordinates, and the fields of its tooltip."""
    worst = [each.worst for each in operators]
    return {
        "x": list(map(axis.get_x, worst)),
        "y": [scale.get_y(each.error) for each in operators],
        "rank": [row.rank for row in worst],
        "when": [report_text.format_iterations([row.iteration]) for row in worst],
        "operator": [
            f"{report_text.format_call_name(row, str)}, {_format_direction(row)}" for row in worst
        ],
        "place": [row.place_name for row in worst],
        "verdict": [row.outcome.verdict.value for row in worst],
        "error": [report_text.format_number(each.error) for each in operators],
        "cosine": [report_text.format_cosine(each.cosine) for each in operators],
        "close": [report_text.format_share(each.close_share) for each in operators],
        "extents": [report_text.format_dtype_and_shape(row) for row in worst],
    }


def build_execution_axis(operators: Sequence[OperatorSummary]) -> ExecutionAxis:
    """Return the horizontal axis that fits all pairs of calls."""
    lengths: dict[int, int] = {}
    for row in (each.worst for each in operators):
        lengths[row.iteration] = max(lengths.get(row.iteration, 0), row.position + 1)
    begins, at = dict[int, int](), 0
    for iteration in sorted(lengths):
        begins[iteration] = at
        at += lengths[iteration]
    ranks = sorted({each.worst.rank for each in operators})
    step = _RANK_SPREAD / len(ranks) if ranks else 0.0
    return ExecutionAxis(begins, {rank: at * step for at, rank in enumerate(ranks)})


def _get_measure(row: ComparisonRow, name: str) -> float:
    measures = row.outcome.measures
    return math.nan if measures is None else float(getattr(measures, name))


def _build_call_columns(rows: Sequence[ComparisonRow], spelt: NameShortener) -> PageColumns:
    return {
        "rank": [row.rank for row in rows],
        "iteration": [
            math.nan if row.iteration == CONSTANTS_ITERATION else float(row.iteration)
            for row in rows
        ],
        "position": [row.position for row in rows],
        "direction": [_format_direction(row) for row in rows],
        "operator": [report_text.format_call_name(row, spelt) for row in rows],
    }


def _format_direction(row: ComparisonRow) -> str:
    return "backward" if row.backward else "forward"

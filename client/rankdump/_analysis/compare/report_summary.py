"""Summary of a report: counts by verdict, operators, calls without a partner, and the rows to show
first. Pure.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    DivergenceOrigin,
    ProgramPlace,
    SuspectCall,
    TensorVerdict,
)

VERDICTS_BY_SEVERITY = (
    TensorVerdict.NAN,
    TensorVerdict.SHAPE,
    TensorVerdict.DIFFERENT,
    TensorVerdict.UNREADABLE,
    TensorVerdict.UNMATCHED,
    TensorVerdict.UNKNOWN,
    TensorVerdict.CLOSE,
    TensorVerdict.EQUAL,
)
"""Worst first."""
_ERROR_STATISTICS = ("max", "min", "avg")
_SEVERITY_ORDER = {verdict: at for at, verdict in enumerate(VERDICTS_BY_SEVERITY)}
CallKey: TypeAlias = "tuple[int, int, int, str, str]"
"""Rank, iteration, position and both names: one pair of calls of a report."""


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """A pair of calls with a summary of its tensors."""

    worst: ComparisonRow
    """The row with the worst verdict; among several, the one with the largest error."""
    tensors: int
    differing: int
    error: float
    """Largest error; NaN where no error is known, or the worst row has no numeric error."""
    cosine: float
    """Lowest cosine; NaN where no tensor has one."""
    close_share: float
    """Lowest close share; NaN where no tensor was measured."""


def count_verdicts(rows: Iterable[ComparisonRow]) -> dict[TensorVerdict, int]:
    """Return the number of rows of each verdict that occurs, worst first."""
    found = Counter(row.outcome.verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS_BY_SEVERITY if found[verdict]}


def get_severity(row: ComparisonRow) -> int:
    """Return the severity of the verdict of a row: 0 is the worst."""
    return _SEVERITY_ORDER[row.outcome.verdict]


def summarize_operators(rows: Iterable[ComparisonRow]) -> list[OperatorSummary]:
    """Return the pairs of calls in the order of their first rows."""
    groups: dict[CallKey, list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault(make_call_key(row), []).append(row)
    return [_summarize_operator(group) for group in groups.values()]


def make_call_key(called: ComparisonRow | SuspectCall) -> CallKey:
    """Return the key of a pair of calls, unique in a report."""
    place = called.rank, called.iteration
    if isinstance(called, SuspectCall) and called.row_place is not None:
        place = called.row_place
    return *place, called.position, called.name_a, called.name_b


def find_unmatched_calls(rows: Iterable[ComparisonRow]) -> Mapping[str, list[ComparisonRow]]:
    """Return the first row of each call without a partner, by the side that has it."""
    found: dict[str, dict[CallKey, ComparisonRow]] = {"a": {}, "b": {}}
    for row in rows:
        if bool(row.name_a) != bool(row.name_b):
            found["a" if row.name_a else "b"].setdefault(make_call_key(row), row)
    return {side: list(calls.values()) for side, calls in found.items()}


def get_own_place(row: ComparisonRow, report: ComparisonReport) -> ProgramPlace:
    """Return rank and iteration of a row: of side b where only b has the call."""
    place = row.rank, row.iteration
    return place if row.name_a else report.places_of_b.get(place, place)


def max_absolute(row: ComparisonRow) -> float:
    """Return the largest absolute error of a row: 0 for equal tensors, NaN where none is known."""
    if row.outcome.measures is not None:
        return row.outcome.measures.max_absolute
    return 0.0 if row.outcome.verdict is TensorVerdict.EQUAL else math.nan


def get_row_error(row: ComparisonRow) -> float:
    """Return the error of a row: of elements, else of extremes and mean; NaN if unknown."""
    known = max_absolute(row)
    if not math.isnan(known):
        return known
    apart = row.outcome.statistic_differences
    return max((abs(apart[item]) for item in _ERROR_STATISTICS if item in apart), default=math.nan)


def list_ranks_alike(origin: DivergenceOrigin, report: ComparisonReport) -> list[int]:
    """Return the ranks whose origin is the same operator, including the origin's own rank."""
    first = origin.suspects[0]
    same = (
        each.suspects[0].rank
        for each in report.rank_origins
        if each.certain and each.suspects and _has_same_suspect(each, origin)
    )
    return sorted({first.rank, *same})


def list_other_origins(report: ComparisonReport) -> list[DivergenceOrigin]:
    """Return the origins of ranks that differ from those of the whole job."""
    known = [origin for origin in report.origins if origin.suspects]
    return [
        each
        for each in report.rank_origins
        if not any(
            _has_same_suspect(each, origin) or _contains_suspects(origin, each) for origin in known
        )
    ]


def collect_suspect_keys(report: ComparisonReport) -> set[CallKey]:
    """Return the keys of the calls that may be an origin, in the whole job or on a rank."""
    origins = (*report.origins, *report.rank_origins)
    return {make_call_key(each) for origin in origins for each in origin.suspects}


def select_excerpt(
    report: ComparisonReport, limit: int | None, *, everything: bool = False
) -> list[ComparisonRow]:
    """Return all rows of suspects and the rows that do not agree, in order.

    Of more rows than the limit, returns a range with the earliest suspect in its first half.
    """
    suspects = collect_suspect_keys(report)
    kept = [
        row
        for row in report.rows
        if everything or make_call_key(row) in suspects or _is_disagreeing_pair(row)
    ]
    if limit is None or len(kept) <= limit:
        return kept
    at = next((at for at, row in enumerate(kept) if make_call_key(row) in suspects), 0)
    begin = 0 if at < limit // 2 else min(at - limit // 4, len(kept) - limit)
    return kept[begin : begin + limit]


def select_worst_rows(rows: Sequence[ComparisonRow], most: int) -> list[ComparisonRow]:
    """Return at most so many rows, in order; rows that disagree are preferred."""
    if len(rows) <= most:
        return list(rows)
    bad = [at for at, row in enumerate(rows) if not row.outcome.verdict.agrees][:most]
    good = [at for at, row in enumerate(rows) if row.outcome.verdict.agrees]
    free = most - len(bad)
    thinned = [good[at * len(good) // free] for at in range(min(free, len(good)))]
    return [rows[at] for at in sorted((*bad, *thinned))]


def _summarize_operator(group: list[ComparisonRow]) -> OperatorSummary:
    measured = [row.outcome.measures for row in group if row.outcome.measures is not None]
    worst = min(group, key=lambda row: (get_severity(row), -_get_error_or_zero(row)))
    return OperatorSummary(
        worst=worst,
        tensors=len(group),
        differing=sum(not row.outcome.verdict.agrees for row in group),
        error=_find_largest_error(group, worst),
        cosine=min(_drop_nan(each.cosine for each in measured), default=math.nan),
        close_share=min((each.close_share for each in measured), default=math.nan),
    )


def _find_largest_error(group: list[ComparisonRow], worst: ComparisonRow) -> float:
    # With a worst row of NaN, the error of another row would look like the whole result.
    if not worst.outcome.verdict.agrees and math.isnan(get_row_error(worst)):
        return math.nan
    return max(_drop_nan(get_row_error(row) for row in group), default=math.nan)


def _drop_nan(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _get_error_or_zero(row: ComparisonRow) -> float:
    known = get_row_error(row)
    return 0.0 if math.isnan(known) else known


def _is_disagreeing_pair(row: ComparisonRow) -> bool:
    # Calls without a partner are listed separately.
    return not row.outcome.verdict.agrees and bool(row.name_a and row.name_b)


def _has_same_suspect(one: DivergenceOrigin, other: DivergenceOrigin) -> bool:
    return _make_likeliest_key(one) == _make_likeliest_key(other)


def _make_likeliest_key(origin: DivergenceOrigin) -> tuple[object, ...]:
    calls = [(s.iteration, s.name_a, s.name_b, s.backward) for s in origin.suspects[:1]]
    return origin.kind, origin.side, *calls


def _contains_suspects(origin: DivergenceOrigin, each: DivergenceOrigin) -> bool:
    return (origin.kind, origin.side) == (each.kind, each.side) and set(
        map(make_call_key, each.suspects)
    ) <= set(map(make_call_key, origin.suspects))

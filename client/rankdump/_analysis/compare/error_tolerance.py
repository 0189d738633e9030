"""Verdicts by errors that are normal: those of runs that should agree with the reference, of
rounding alone, or what the user allows by name. Pure.

An error is the root mean square of the difference: at one place the reference is the same for all
runs, also where it is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    ComparisonSettings,
    NamedTolerance,
    TensorVerdict,
)
from rankdump._analysis.compare.rounding_errors import find_reference_size, find_rounding_errors
from rankdump._analysis.reader.query import Query
from rankdump._core.tolerance_text import ROUNDING
from rankdump.errors import ConfigError

NoisePlace: TypeAlias = "tuple[int, int, str, str]"
"""Rank, iteration, name of the call on side b, and slot."""


class AllowedError(NamedTuple):
    """An error that is expected."""

    error: float
    text: str
    """What expects it, as in `5 times that of the noise runs`."""
    source: str
    """The same in a few words, as in `judged by noise runs`."""


NORMAL_RATIO = 4.0
"""Largest ratio of a normal error to the one that is expected."""
SUSPICIOUS_RATIO = 10.0
"""Largest ratio of an error that is suspicious; a larger one is different."""
_BY_ROUNDING = f"that of {ROUNDING}"
_WITHOUT_RUN = "without a noise run of it"
_JUDGED = (TensorVerdict.NORMAL, TensorVerdict.DIFFERENT)


def collect_errors(rows: Iterable[ComparisonRow]) -> dict[NoisePlace, float]:
    """Return the errors of a noise run by their places; 0 where its elements are equal."""
    found: dict[NoisePlace, float] = {}
    for row in rows:
        error = _find_error(row)
        if error is not None:
            place = _make_place(row)
            found[place] = max(error, found.get(place, 0.0))
    return found


def judge_rows(
    rows: Sequence[ComparisonRow],
    settings: ComparisonSettings,
    noises: Sequence[Mapping[NoisePlace, float]] = (),
) -> list[ComparisonRow]:
    """Return rows, which are in execution order, with verdicts by the largest error of the noise
    runs at the same place, or by rounding where that is larger, or by a tolerance for the name.

    ConfigError for a tolerance whose pattern matches no name.
    """
    if not (settings.by_rounding or settings.named or noises):
        return list(rows)
    _check_patterns(rows, settings.named)
    judged: list[ComparisonRow] = []
    for row, rounding in zip(rows, find_rounding_errors(rows), strict=True):
        named = _find_named(row, settings.named)
        if named is not None:
            judged.append(_judge_row(row, _allow_named(row, named, rounding)))
        elif noises:
            judged.append(_judge_row(row, _allow_noise(row, noises, rounding)))
        elif settings.by_rounding:
            judged.append(_judge_row(row, AllowedError(rounding, _BY_ROUNDING, ROUNDING)))
        else:
            judged.append(row)
    return judged


def _check_patterns(rows: Sequence[ComparisonRow], named: Sequence[NamedTolerance]) -> None:
    for each in named:
        if not any(_matches_name(row, each) for row in rows):
            raise ConfigError("compare", "tolerance", each.pattern, "a pattern of compared names")


def _find_named(row: ComparisonRow, named: Sequence[NamedTolerance]) -> NamedTolerance | None:
    """Return the last tolerance whose pattern matches the name of a call."""
    return next((each for each in reversed(named) if _matches_name(row, each)), None)


def _matches_name(row: ComparisonRow, tolerance: NamedTolerance) -> bool:
    query = Query(glob=tolerance.pattern)
    return any(query.keeps_operator(row.op_type, name) for name in (row.name_a, row.name_b) if name)


def _allow_named(row: ComparisonRow, named: NamedTolerance, rounding: float) -> AllowedError:
    if named.error is None:
        return AllowedError(rounding, _BY_ROUNDING, f"{ROUNDING} for {named.pattern}")
    source = f"tolerance {named.error:g} for {named.pattern}"
    allowed = named.error / NORMAL_RATIO * find_reference_size(row)
    return AllowedError(allowed, f"a quarter of the {source}", source)


def _allow_noise(
    row: ComparisonRow, noises: Sequence[Mapping[NoisePlace, float]], rounding: float
) -> AllowedError:
    known = [errors[place] for errors in noises if (place := _make_place(row)) in errors]
    if not known:
        return AllowedError(
            rounding, f"{_BY_ROUNDING}, {_WITHOUT_RUN}", f"{ROUNDING}, {_WITHOUT_RUN}"
        )
    return AllowedError(max(*known, rounding), "that of the noise runs", "noise runs")


def _judge_row(row: ComparisonRow, allowed: AllowedError) -> ComparisonRow:
    outcome, error = row.outcome, _find_error(row)
    is_drift = any(each.startswith(REPLICA_FINDING_PREFIX) for each in outcome.findings)
    if error is None or is_drift or outcome.verdict not in _JUDGED:
        return row
    expected, name, source = allowed
    ratio = error / expected if expected else math.inf if error else 0.0
    if ratio <= NORMAL_RATIO:
        judged = replace(outcome, verdict=TensorVerdict.NORMAL, error_ratio=ratio, judged_by=source)
        return row._replace(outcome=judged)
    is_suspicious = ratio <= SUSPICIOUS_RATIO
    verdict = TensorVerdict.SUSPICIOUS if is_suspicious else TensorVerdict.DIFFERENT
    times = f"{ratio:.3g} times {name}" if expected else f"not explained by {name}"
    findings = *outcome.findings, f"its error {error:.2g} is {times}"
    judged = replace(
        outcome, verdict=verdict, findings=findings, error_ratio=ratio, judged_by=source
    )
    return row._replace(outcome=judged)


def _find_error(row: ComparisonRow) -> float | None:
    """Return the error of a row; None where it has none, as without elements."""
    if row.outcome.verdict is TensorVerdict.SAME:
        return 0.0
    measures = row.outcome.measures
    if measures is None or measures.nonfinite_apart or math.isnan(measures.rmse):
        return None
    return measures.rmse


def _make_place(row: ComparisonRow) -> NoisePlace:
    return row.rank, row.iteration, row.name_b, row.slot_name

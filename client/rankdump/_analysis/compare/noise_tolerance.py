"""Verdicts by the error of runs that should agree with the reference: a difference is normal where
another layout, another type or a perturbed input makes one of that size. Pure.

An error is the root mean square of the difference: at one place the reference is the same for all
runs, also where it is 0. The least one that is expected anywhere is that of rounding: four units of
the last place of the narrower type, relative to the reference, as in the bound of Megatron-LM's
comparison of gradients (`test_optimizer_grads_match.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_blocks import NARROW_HALF_UNITS

NoisePlace: TypeAlias = "tuple[int, int, str, str]"
"""Rank, iteration, name of the call on side b, and slot."""

NORMAL_RATIO = 4.0
"""Largest ratio of a normal error to that of the noise runs."""
SUSPICIOUS_RATIO = 10.0
"""Largest ratio of an error that is suspicious; a larger one is different."""
_ROUNDING_UNITS = 4
_UNITS: Mapping[str, float] = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    **{name: 2 * half for name, half in NARROW_HALF_UNITS.items()},
}
_JUDGED = (TensorVerdict.CLOSE, TensorVerdict.DIFFERENT)


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
    rows: Iterable[ComparisonRow], noises: Sequence[Mapping[NoisePlace, float]]
) -> list[ComparisonRow]:
    """Return rows with verdicts by the largest error of the noise runs at the same place."""
    return [_judge_row(row, noises) for row in rows]


def find_rounding_error(pair: TensorPair) -> float:
    """Return the error that rounding makes in the narrower type of a pair; 0 for integers."""
    dtypes = [each.dtype for each in (pair.a, pair.b) if each is not None]
    return _ROUNDING_UNITS * max((_UNITS.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _judge_row(row: ComparisonRow, noises: Sequence[Mapping[NoisePlace, float]]) -> ComparisonRow:
    outcome, error = row.outcome, _find_error(row)
    is_drift = any(each.startswith(REPLICA_FINDING_PREFIX) for each in outcome.findings)
    if error is None or is_drift or outcome.verdict not in _JUDGED:
        return row
    known = [errors[place] for errors in noises if (place := _make_place(row)) in errors]
    allowed = max((*known, find_rounding_error(row.pair) * _find_reference_size(row)))
    ratio = error / allowed if allowed else math.inf
    if not error or ratio <= NORMAL_RATIO:
        return row._replace(outcome=replace(outcome, verdict=TensorVerdict.CLOSE))
    is_suspicious = ratio <= SUSPICIOUS_RATIO
    verdict = TensorVerdict.SUSPICIOUS if is_suspicious else TensorVerdict.DIFFERENT
    of = "that of the noise runs" if known else "that of rounding, without a noise run of it"
    finding = f"its error {error:.2g} is {ratio:.3g} times {of}"
    return row._replace(
        outcome=replace(outcome, verdict=verdict, findings=(*outcome.findings, finding))
    )


def _find_error(row: ComparisonRow) -> float | None:
    """Return the error of a row; None where it has none, as without elements."""
    if row.outcome.verdict is TensorVerdict.EQUAL:
        return 0.0
    measures = row.outcome.measures
    if measures is None or measures.nonfinite_apart or math.isnan(measures.rmse):
        return None
    return measures.rmse


def _find_reference_size(row: ComparisonRow) -> float:
    """Return the root mean square of the reference of a row that has measures."""
    measures = row.outcome.measures
    if measures is None or not measures.relative_euclidean > 0:
        return 0.0
    return measures.rmse / measures.relative_euclidean


def _make_place(row: ComparisonRow) -> NoisePlace:
    return row.rank, row.iteration, row.name_b, row.slot_name

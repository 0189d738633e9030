"""Verdicts by the errors of runs that should agree."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rankdump._analysis.compare.noise_tolerance import (
    collect_errors,
    find_rounding_error,
    judge_rows,
)
from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._core.record import TensorSide

MEASURES = measure_difference(np.ones(8), np.ones(8), ElementTolerances()).measures


def make_row(
    error: float,
    verdict: TensorVerdict = TensorVerdict.DIFFERENT,
    *,
    name: str = "fc-op0",
    dtypes: tuple[str, str] = ("float32", "float32"),
    findings: tuple[str, ...] = (),
) -> ComparisonRow:
    a, b = (DumpedTensor(TensorSide.OUTPUT, 0, "", dtype, (8,)) for dtype in dtypes)
    measures = replace(MEASURES, relative_euclidean=error, rmse=error)
    outcome = PairOutcome(verdict, findings, measures)
    return ComparisonRow(0, 1, 0, "exact", "Linear", name, name, False, TensorPair(a, b), outcome)


@pytest.mark.parametrize(
    ("error", "verdict", "finding"),
    [
        (0.0399, TensorVerdict.CLOSE, ""),
        (0.05, TensorVerdict.SUSPICIOUS, "its error 0.05 is 5 times that of the noise runs"),
        (0.2, TensorVerdict.DIFFERENT, "its error 0.2 is 20 times that of the noise runs"),
    ],
)
def test_error_is_judged_by_the_largest_of_the_noise_runs(error, verdict, finding):
    noises = [collect_errors([make_row(each)]) for each in (0.01, 0.001)]
    [row] = judge_rows([make_row(error)], noises)
    assert row.outcome.verdict is verdict
    assert ", ".join(row.outcome.findings) == finding


def test_a_close_pair_may_be_different_where_the_noise_is_small():
    noise = collect_errors([make_row(1e-7, TensorVerdict.CLOSE)])
    [row] = judge_rows([make_row(1e-4, TensorVerdict.CLOSE)], [noise])
    assert row.outcome.verdict is TensorVerdict.DIFFERENT


def test_rounding_is_the_least_error():
    rounding = find_rounding_error(make_row(0).pair)
    assert rounding == 4 * np.finfo(np.float32).eps
    narrow = make_row(0, dtypes=("bfloat16", "float32")).pair
    assert find_rounding_error(narrow) == 4 * 2.0**-7
    assert find_rounding_error(TensorPair(None, None)) == 0
    same = collect_errors([make_row(0, TensorVerdict.EQUAL)])
    assert list(same.values()) == [0.0]
    normal, apart = judge_rows([make_row(3 * rounding), make_row(20 * rounding)], [same])
    assert normal.outcome.verdict is TensorVerdict.CLOSE
    assert apart.outcome.verdict is TensorVerdict.DIFFERENT


def test_pair_that_no_noise_run_has_is_judged_by_rounding():
    noise = collect_errors([make_row(0.5, name="other-op0")])
    [row] = judge_rows([make_row(0.1)], [noise])
    assert row.outcome.verdict is TensorVerdict.DIFFERENT
    assert row.outcome.findings[0].endswith("that of rounding, without a noise run of it")


@pytest.mark.parametrize(
    "verdict",
    [TensorVerdict.EQUAL, TensorVerdict.NAN, TensorVerdict.SHAPE, TensorVerdict.UNKNOWN],
)
def test_other_verdicts_stay(verdict):
    row = make_row(0.5, verdict)
    assert judge_rows([row], [{}]) == [row]


def test_replicas_that_differ_stay_different_and_unknown_errors_are_left_out():
    drift = make_row(0.0, findings=(f"{REPLICA_FINDING_PREFIX}ranks 0-1 of a differ",))
    unknown = make_row(math.nan)
    assert judge_rows([drift, unknown], [collect_errors([drift, unknown])]) == [drift, unknown]
    assert len(collect_errors([unknown])) == 0


def test_error_beside_a_reference_of_zeros_is_judged_by_the_noise_run():
    row = make_row(0.1)
    assert row.outcome.measures is not None
    zeros = replace(row.outcome.measures, relative_euclidean=math.nan)
    row = row._replace(outcome=replace(row.outcome, measures=zeros))
    for noise, verdict in ((0.05, TensorVerdict.CLOSE), (1e-3, TensorVerdict.DIFFERENT)):
        [judged] = judge_rows([row], [collect_errors([make_row(noise)])])
        assert judged.outcome.verdict is verdict

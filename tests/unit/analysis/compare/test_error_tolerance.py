"""Verdicts by the errors of runs that should agree."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rankdump._analysis.compare.error_tolerance import collect_errors, judge_rows
from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    ComparisonRow,
    ComparisonSettings,
    DumpedTensor,
    ElementTolerances,
    NamedTolerance,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._core.record import TensorSide
from rankdump.errors import ConfigError

SETTINGS = ComparisonSettings()
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
        (0.0399, TensorVerdict.NORMAL, ""),
        (0.05, TensorVerdict.SUSPICIOUS, "its error 0.05 is 5 times that of the noise runs"),
        (0.2, TensorVerdict.DIFFERENT, "its error 0.2 is 20 times that of the noise runs"),
    ],
)
def test_error_is_judged_by_the_largest_of_the_noise_runs(error, verdict, finding):
    noises = [collect_errors([make_row(each)]) for each in (0.01, 0.001)]
    [row] = judge_rows([make_row(error)], SETTINGS, noises)
    assert row.outcome.verdict is verdict
    assert ", ".join(row.outcome.findings) == finding


def test_a_close_pair_may_be_different_where_the_noise_is_small():
    noise = collect_errors([make_row(1e-7, TensorVerdict.NORMAL)])
    [row] = judge_rows([make_row(1e-4, TensorVerdict.NORMAL)], SETTINGS, [noise])
    assert row.outcome.verdict is TensorVerdict.DIFFERENT


def test_rounding_is_the_least_error():
    same = collect_errors([make_row(0, TensorVerdict.SAME)])
    assert list(same.values()) == [0.0]
    rounding = 4 * float(np.finfo(np.float32).eps)
    for error, verdict in ((3, TensorVerdict.NORMAL), (20, TensorVerdict.DIFFERENT)):
        [row] = judge_rows([make_row(error * rounding)], SETTINGS, [same])
        assert row.outcome.verdict is verdict
        assert row.outcome.error_ratio == pytest.approx(error, rel=0.05)


def test_without_noise_run_the_error_of_rounding_is_the_tolerance():
    settings = replace(SETTINGS, by_rounding=True)
    row = make_row(1e-4, TensorVerdict.NORMAL)
    [judged] = judge_rows([row], settings)
    assert judged.outcome.verdict is TensorVerdict.DIFFERENT
    assert judged.outcome.findings == ("its error 0.0001 is 210 times that of rounding",)
    assert judge_rows([row], SETTINGS) == [row]


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (0.09, TensorVerdict.NORMAL),
        (0.2, TensorVerdict.SUSPICIOUS),
        (0.3, TensorVerdict.DIFFERENT),
    ],
)
def test_tolerance_by_name_holds_before_a_noise_run(error, verdict):
    given = (NamedTolerance("*", 0.5), NamedTolerance("fc-*", 0.1))
    settings = replace(SETTINGS, named=given, by_rounding=True)
    noise = collect_errors([make_row(1.0)])
    [row] = judge_rows([make_row(error)], settings, [noise])
    assert row.outcome.verdict is verdict
    if verdict is TensorVerdict.DIFFERENT:
        text = "its error 0.3 is 12 times a quarter of the tolerance 0.1 for fc-*"
        assert row.outcome.findings == (text,)


def test_tolerance_by_name_may_be_rounding_and_leaves_other_names_alone():
    settings = replace(SETTINGS, named=(NamedTolerance("fc-*", None),))
    rows = [make_row(1e-4, TensorVerdict.NORMAL, name=name) for name in ("fc-op0", "other-op0")]
    found = [row.outcome.verdict for row in judge_rows(rows, settings)]
    assert found == [TensorVerdict.DIFFERENT, TensorVerdict.NORMAL]


def test_tolerance_whose_pattern_matches_no_name_is_an_error():
    settings = replace(SETTINGS, named=(NamedTolerance("cf-*", 0.1),))
    with pytest.raises(ConfigError, match=r"tolerance: 'cf-\*' is not allowed; allowed: a pattern"):
        judge_rows([make_row(0.1)], settings)


def test_integers_that_differ_are_not_explained_by_rounding():
    settings = replace(SETTINGS, by_rounding=True)
    [row] = judge_rows([make_row(1e-9, dtypes=("int64", "int64"))], settings)
    assert row.outcome.verdict is TensorVerdict.DIFFERENT
    assert row.outcome.findings == ("its error 1e-09 is not explained by that of rounding",)


def test_pair_that_no_noise_run_has_is_judged_by_rounding():
    noise = collect_errors([make_row(0.5, name="other-op0")])
    [row] = judge_rows([make_row(0.1)], SETTINGS, [noise])
    assert row.outcome.verdict is TensorVerdict.DIFFERENT
    assert row.outcome.findings[0].endswith("that of rounding, without a noise run of it")


@pytest.mark.parametrize(
    "verdict",
    [TensorVerdict.SAME, TensorVerdict.NAN, TensorVerdict.SHAPE, TensorVerdict.UNKNOWN],
)
def test_other_verdicts_stay(verdict):
    row = make_row(0.5, verdict)
    assert judge_rows([row], SETTINGS, [{}]) == [row]


def test_replicas_that_differ_stay_different_and_unknown_errors_are_left_out():
    drift = make_row(0.0, findings=(f"{REPLICA_FINDING_PREFIX}ranks 0-1 of a differ",))
    unknown = make_row(math.nan)
    noise = collect_errors([drift, unknown])
    assert judge_rows([drift, unknown], SETTINGS, [noise]) == [drift, unknown]
    assert len(collect_errors([unknown])) == 0


def test_error_beside_a_reference_of_zeros_is_judged_by_the_noise_run():
    row = make_row(0.1)
    assert row.outcome.measures is not None
    zeros = replace(row.outcome.measures, relative_euclidean=math.nan)
    row = row._replace(outcome=replace(row.outcome, measures=zeros))
    for noise, verdict in ((0.05, TensorVerdict.NORMAL), (1e-3, TensorVerdict.DIFFERENT)):
        [judged] = judge_rows([row], SETTINGS, [collect_errors([make_row(noise)])])
        assert judged.outcome.verdict is verdict

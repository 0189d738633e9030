"""Summary of a report: operators, rows to show first, ranks with the same origin."""

from __future__ import annotations

import math

from support.diff_reports import (
    LAYERS,
    agreeing,
    layered,
    measures,
    origin,
    outcome,
    report,
    row,
    suspect,
)

from rankdump._analysis.compare import report_summary, report_text
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, PairOutcome, TensorVerdict


def test_count_verdicts_begins_with_the_worst():
    rows = [*layered(), row(0, "output.0", PairOutcome(TensorVerdict.NAN))]
    assert list(report_summary.count_verdicts(rows).items()) == [
        (TensorVerdict.NAN, 1),
        (TensorVerdict.DIFFERENT, 10),
        (TensorVerdict.NORMAL, 6),
        (TensorVerdict.SAME, 8),
    ]


def test_operator_summary_has_the_worst_tensor():
    rows = [
        row(2, "input.0", outcome(TensorVerdict.DIFFERENT, 0.5)),
        row(2, "output.0", outcome(TensorVerdict.DIFFERENT, 0.75)),
        row(2, "output.1", outcome(TensorVerdict.NORMAL, 0.9)),
        row(2, "output.2", PairOutcome(TensorVerdict.UNKNOWN)),
        row(2, "output.0", outcome(), rank=1),
    ]
    first, second = report_summary.summarize_operators(rows)
    assert (first.worst.slot_name, first.tensors, first.differing) == ("output.0", 4, 3)
    assert (first.error, first.cosine, first.close_share) == (0.9, 1 - 0.9, 0.5)
    assert (second.worst.rank, second.error) == (1, 0.0)
    assert math.isnan(second.cosine)


def test_excerpt_contains_a_late_suspect():
    """All its rows, and differing ones around it."""
    noise = [
        row(
            n,
            "output.0",
            outcome(TensorVerdict.DIFFERENT, 1e-3),
            name=f"early/Add-op{n}",
            iteration=0,
        )
        for n in range(500)
    ]
    behind = [row(900 + n, "output.0", outcome(TensorVerdict.DIFFERENT, 1e-3)) for n in range(90)]
    guilty = [
        row(600, "input.0", outcome(), name="late/Mul-op0"),
        row(600, "output.0", outcome(TensorVerdict.DIFFERENT, 1.0), name="late/Mul-op0"),
    ]
    blamed = suspect(600, name_a="late/Mul-op0", name_b="late/Mul-op0")
    made = report([*noise, *guilty, *behind], origins=(origin(blamed),), rank_origins=())
    shown = report_summary.select_excerpt(made, 20)
    assert len(shown) == 20
    assert shown[5:7] == guilty
    assert shown[:5] == noise[-5:]
    assert report_summary.select_excerpt(made, 2) == guilty
    assert len(report_summary.select_excerpt(made, None)) == 592
    assert report_summary.select_excerpt(agreeing(), 20) == []
    assert len(report_summary.select_excerpt(agreeing(), None, everything=True)) == 24


def test_select_worst_rows_omits_agreeing_rows_first():
    rows = layered(range(8))
    kept = report_summary.select_worst_rows(rows, 60)
    assert len(kept) == 60
    assert sum(not each.outcome.verdict.agrees for each in kept) == 40
    assert [rows.index(each) for each in kept] == sorted(rows.index(each) for each in kept)
    assert len(report_summary.select_worst_rows(rows, 10)) == 10
    assert all(
        not each.outcome.verdict.agrees for each in report_summary.select_worst_rows(rows, 10)
    )


def test_ranks_with_the_same_origin_are_listed():
    here, there = origin(suspect()), origin(suspect(rank=1))
    other = origin(suspect(at=5, rank=2))
    made = report(origins=(here,), rank_origins=(here, there, other))
    assert report_summary.list_suspect_ranks(here, here.suspects[0], made) == [0, 1]
    assert report_summary.list_other_origins(made) == [other]


def test_candidates_of_an_ambiguous_origin_are_listed_once():
    both = origin(suspect(), suspect(at=5, rank=2), why="no order")
    each = (origin(suspect()), origin(suspect(at=5, rank=2)))
    assert report_summary.list_other_origins(report(origins=(both,), rank_origins=each)) == []


def test_numbers_are_formatted_with_four_digits():
    assert [
        report_text.format_number(x) for x in (0.0012344, 123456.0, 0.0, math.nan, math.inf)
    ] == [
        "0.001234",
        "1.235e+05",
        "0",
        "-",
        "inf",
    ]
    shares = (1.0, 0.999999, 0.5, 1e-9, 0.0, math.nan)
    assert [report_text.format_share(x) for x in shares] == [
        "100.00%",
        ">99.99%",
        "50.00%",
        "<0.01%",
        "0.00%",
        "-",
    ]
    assert [report_text.format_cosine(x) for x in (1.0, 1 - 1e-15, 1 - 1e-7, 0.5, -1.0)] == [
        "1",
        "1",
        ">0.9999",
        "0.5",
        "-1",
    ]


def test_report_sentences():
    assert report_text.describe_missing_origin(agreeing()) == "nothing differs"
    assert report_text.describe_missing_origin(
        report(agreeing().rows, notes=("rank 1 in b only",))
    ) == ("all tensors that were compared agree, but not everything was compared")
    assert (
        report_text.format_verdict_counts([row(0, "output.0", outcome())])
        == "1 pair of tensors: 1 same"
    )
    assert report_text.format_verdict_counts([]) == "0 pairs of tensors"
    assert (
        report_text.format_ranks_and_moment(suspect(backward=True), [0, 1, 3])
        == "rank 0-1,3, iteration 0, backward"
    )
    assert report_text.format_moment(suspect(iteration=CONSTANTS_ITERATION)) == "constants, forward"
    assert (
        report_text.format_call_name(suspect(name_b="fc/Dense-op1"), str)
        == f"{LAYERS[3]} (b: fc/Dense-op1)"
    )
    calls = suspect(name_a="NN_Linear_0_forward", name_b="NN_Dense_4_forward")
    assert report_text.format_call_name(calls, str) == "NN_Linear_0_forward (b: NN_Dense_4)"
    figured = PairOutcome(
        TensorVerdict.DIFFERENT, ("dtypes differ",), None, {"max": 0.25, "min": 0.0}
    )
    assert (
        report_text.format_statistic_differences(row(0, "output.0", figured)) == "max 0.25, min 0"
    )
    assert report_text.join_findings(row(0, "output.0", figured)) == "dtypes differ"
    assert report_summary.get_row_error(row(0, "output.0", figured)) == 0.25
    assert (
        report_summary.max_absolute(row(0, "output.0", outcome(TensorVerdict.NORMAL, 0.5))) == 0.5
    )
    assert measures(0.5).close_share == 0.5

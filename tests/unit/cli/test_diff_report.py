"""Comparison on the terminal: origins, counts, rows, calls without a partner."""

from __future__ import annotations

from support.diff_reports import agreeing, layered, origin, outcome, report, row, suspect

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.report import CONSTANTS_ITERATION, PairOutcome, TensorVerdict
from rankdump._analysis.compare.report_summary import select_excerpt
from rankdump._cli import diff_report as view


def test_format_origins_begins_with_the_operator():
    assert report_text.format_origins(report()) == [
        "the difference starts at layers.3/Linear-op0",
        "  rank 0-1, iteration 0, forward",
        "  input.0 agrees; 32 of 64 elements of output.0 do not: max abs 0.00123",
        "  /job/net.py:17  x = layer(x)",
    ]
    assert report_text.format_origins(agreeing()) == ["nothing differs"]


def test_format_origins_lists_candidates_of_an_ambiguous_origin():
    """With why, and every candidate; of many, the likeliest."""
    both = origin(suspect(), suspect(4, 1, backward=True, source=()), why="the order is unknown")
    assert report_text.format_origins(report(origins=(both,), rank_origins=())) == [
        "where the difference starts is ambiguous: the order is unknown",
        "  layers.3/Linear-op0: rank 0, iteration 0, forward",
        "    input.0 agrees; 32 of 64 elements of output.0 do not: max abs 0.00123",
        "    /job/net.py:17  x = layer(x)",
        "  layers.4/Linear-op0: rank 1, iteration 0, backward",
        "    input.0 agrees; 32 of 64 elements of output.0 do not: max abs 0.00123",
    ]
    many = origin(*(suspect(at) for at in range(6)), why="")
    lines = report_text.format_origins(report(origins=(many,), rank_origins=()))
    assert lines[0] == "where the difference starts is ambiguous"
    assert lines[-1] == "  ... and 1 more candidate"


def test_format_origins_lists_other_origins_of_ranks():
    elsewhere = origin(suspect(5, 2, reason="its output differs", source=()))
    made = report(rank_origins=(origin(suspect()), elsewhere))
    assert report_text.format_origins(made)[1] == "  rank 0, iteration 0, forward"
    assert report_text.format_rank_origins(made) == [
        "on rank 2 alone: starts at layers.5/Linear-op0, iteration 0, forward",
        "  its output differs",
    ]


def test_format_origins_names_the_side_of_nonfinite_values():
    """It leads, whether or not values differ elsewhere."""
    found = origin(
        suspect(2, 1, reason="its input is finite; 3 NaN in output.0"), kind="nonfinite", side="a"
    )
    lines = report_text.format_origins(
        report(agreeing().rows, origins=(found,), rank_origins=(found,))
    )
    assert lines[:2] == [
        "NaN or infinity in a starts at layers.2/Linear-op0",
        "  rank 1, iteration 0, forward",
    ]
    assert lines[-1] == "nothing differs"
    both = report(origins=(origin(suspect()), found), rank_origins=(found,))
    assert report_text.format_origins(both)[0] == lines[0]
    assert report_text.format_origins(both)[-4] == "the difference starts at layers.3/Linear-op0"


def test_format_rows_prints_a_table():
    made = report()
    lines = view.format_rows(select_excerpt(made, 20), made, width=100)
    assert " ".join(lines[0].split()) == "rank operator place verdict max abs mean abs cosine close"
    assert " ".join(lines[1].split()) == "> 0 layers.3/Linear-op0 input.0 same 0 - - -"
    assert " ".join(lines[2].split()) == (
        "> 0 layers.3/Linear-op0 output.0 different 0.00492 0.00164 0.9951 50.00%"
    )
    assert [line.startswith(">") for line in lines].count(True) == 4, "on both ranks"
    assert all(len(line) <= 100 for line in lines)


def test_format_rows_shortens_long_names_in_the_middle():
    name = "Default/network-Net/" + "encoder_block-Block/" * 12 + "Linear-op0"
    made = report(
        [row(0, "output.0", outcome(TensorVerdict.DIFFERENT, 0.5), name=name)], origins=()
    )
    *_, line = view.format_rows(made.rows, made, width=100)
    assert len(line) <= 100
    assert "..." in line
    assert "block/Linear-op0" in line


def test_format_rows_omits_constant_columns():
    """Of one rank and one iteration, and of figures without elements."""
    figured = PairOutcome(TensorVerdict.DIFFERENT, (), None, {"max": 0.25, "l2norm": 1.5})
    made = report([row(0, "output.0", figured)], origins=(), rank_origins=())
    titles, line = view.format_rows(made.rows, made, width=100)
    assert " ".join(titles.split()) == "operator place verdict statistic differences"
    assert " ".join(line.split()) == "layers.0/Linear-op0 output.0 different max 0.25, l2norm 1.5"
    assert view.format_remarks(made.rows) == []
    mixed = report(
        [
            row(
                0, "output.0", outcome(TensorVerdict.DIFFERENT, 0.5), iteration=CONSTANTS_ITERATION
            ),
            row(0, "output.0", outcome(TensorVerdict.DIFFERENT, 0.5), iteration=7),
        ],
        origins=(),
        rank_origins=(),
    )
    lines = [line.split()[0] for line in view.format_rows(mixed.rows, mixed, width=100)]
    assert lines == ["iteration", "-", "7"]


def test_format_remarks_lists_findings():
    wrong = outcome(TensorVerdict.DIFFERENT, 0.5, "dtypes differ: float32 and bfloat16")
    rows = [row(n, "output.0", wrong) for n in range(6)]
    told = view.format_remarks(rows)
    assert told[0] == "layers.0/Linear-op0, rank 0, output.0: dtypes differ: float32 and bfloat16"
    assert told[5:] == ["... and 1 more finding: --all"]
    assert len(view.format_remarks(rows, everything=True)) == 6


def test_format_unmatched_lists_each_call_once():
    """A call once, with its ranks and iterations, however many tensors it has."""
    rows = [
        row(
            at,
            place,
            PairOutcome(TensorVerdict.UNMATCHED),
            name=f"x/ReLU-op{at}",
            rank=rank,
            only="a",
        )
        for at in range(6)
        for rank in (0, 1)
        for place in ("input.0", "output.0")
    ]
    lone = row(
        0, "output.0", PairOutcome(TensorVerdict.UNMATCHED), name="y/Add-op0", iteration=3, only="b"
    )
    made = report([*layered(), *rows, lone])
    assert view.format_unmatched(made) == [
        "only in a: 12 calls: x/ReLU-op0 (rank 0-1, iteration 0); x/ReLU-op1 (rank 0-1, "
        "iteration 0); x/ReLU-op2 (rank 0-1, iteration 0); x/ReLU-op3 (rank 0-1, iteration 0); "
        "2 more",
        "only in b: 1 call: y/Add-op0 (rank 0, iteration 3)",
    ]
    assert "x/ReLU-op5" in view.format_unmatched(made, everything=True)[0]
    assert view.format_unmatched(report()) == []


def test_format_extra_measures_lists_msaccucmp_measures():
    told = PairOutcome(
        TensorVerdict.DIFFERENT, extra={"CosineSimilarity": 0.5, "MaxAbsoluteError": 2.0}
    )
    assert view.format_extra_measures(
        [row(1, "output.0", told), row(2, "output.0", outcome())]
    ) == ["layers.1/Linear-op0, rank 0, output.0: CosineSimilarity 0.5, MaxAbsoluteError 2"]

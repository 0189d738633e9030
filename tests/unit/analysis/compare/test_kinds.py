"""One line for each kind of tensor of a comparison."""

from __future__ import annotations

from support.diff_reports import outcome, row

from rankdump._analysis.compare.report import PairOutcome, TensorPair, TensorVerdict
from rankdump._analysis.compare.report_summary import (
    find_tensor_kind,
    format_kinds,
    summarize_kinds,
)


def _shaped(made, a, b):
    pair = made.pair
    return made._replace(pair=TensorPair(pair.a._replace(shape=a), pair.b._replace(shape=b)))


def test_find_tensor_kind_tells_buffers_from_parameters():
    weight = row(0, "output.0", outcome(), name="fc.weight")._replace(op_type="Parameter")
    assert find_tensor_kind(weight) == "parameters"
    assert weight.pair.a is not None
    held = weight.pair.a._replace(argument="buffer")
    assert find_tensor_kind(weight._replace(pair=TensorPair(None, held))) == "buffers"
    assert find_tensor_kind(weight._replace(backward=True)) == "gradients"
    assert find_tensor_kind(row(0, "input.0", outcome())) == "activations"
    backward = row(0, "input.0", outcome(), backward=True)
    assert find_tensor_kind(backward) == "activation gradients"


def test_summarize_kinds_lists_kinds_that_occur():
    assert summarize_kinds([]) == []
    assert [each.kind for each in summarize_kinds([row(0, "input.0", outcome())])] == [
        "activations"
    ]


def test_format_kinds_names_the_largest_error_or_the_first_nan():
    rows = [
        row(0, "output.0", outcome(TensorVerdict.DIFFERENT, 0.5), name="a/Linear-op0"),
        row(1, "output.0", outcome(TensorVerdict.DIFFERENT, 2.0), name="b/Linear-op0", rank=1),
        row(2, "output.0", outcome(), name="c/Linear-op0"),
    ]
    assert format_kinds(rows, str) == [
        "activations  3 pairs: 2 different, 1 same; "
        "by at most 2 (b/Linear-op0 output.0, rank 1, iteration 0)"
    ]
    bad = row(1, "output.0", PairOutcome(TensorVerdict.NAN), name="b/Linear-op0", rank=1)
    assert format_kinds([rows[2], bad], str) == [
        "activations  2 pairs: 1 nan, 1 same; first b/Linear-op0 output.0, rank 1, iteration 0"
    ]


def test_format_kinds_names_batches_only_where_they_explain_every_shape():
    shape = outcome(TensorVerdict.SHAPE)
    batch = _shaped(row(0, "input.0", shape), (2, 8), (4, 8))
    assert "first extent 2 in a and 4 in b" in format_kinds([batch], str)[0]
    for a, b in (((2, 8), (2, 4)), ((3, 8), (4, 8)), (None, (4, 8)), ((), (4,))):
        other = _shaped(row(1, "input.0", shape), a, b)
        assert "first extent" not in format_kinds([batch, other], str)[0]

"""Rows of joined ranks whose difference says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.diff_programs import rows

from rankdump._analysis.compare.coverage_findings import SideCoverage, mark_undecided_rows
from rankdump._analysis.compare.report import ComparisonRow, TensorPair, TensorVerdict
from rankdump._analysis.reader.tree import Entry
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorKey
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)

WHOLE = SideCoverage({}, is_joined=True)
LACKING = SideCoverage({}, ("x.npy: but missing",), is_joined=True)


def make_row(text: str, verdict: TensorVerdict, source: LayoutSource | None) -> ComparisonRow:
    """A row whose side a has a layout of a source, if one is given."""
    [row] = rows(text)
    tensor = row.pair.a
    assert tensor is not None
    layout = None
    if source is not None:
        mesh = make_rank_mesh("", ("tp",), (2,), range(2))
        shard = MeshPlacement(PlacementKind.SHARD, 0)
        layout = TensorLayout(source, (4,), (0,), mesh, (0,), (shard,))
    key = TensorKey(0, "net", 0, 0, 0, "Linear", "fc", tensor.side, 0)
    record = ManifestRecord(
        "a.npy", 0, "Linear", row.name_a, "", "float32", (2,), 8, 8, "d", layout=layout
    )
    tensor = tensor._replace(entry=Entry(Path("tree"), "a.npy", key, 8, record))
    outcome = replace(row.outcome, verdict=verdict, findings=("why",))
    return row._replace(pair=TensorPair(tensor, row.pair.b), outcome=outcome)


def test_other_shapes_say_nothing_where_a_joined_side_lacks_parts():
    row = make_row("a>!", TensorVerdict.SHAPE, None)
    [marked] = mark_undecided_rows([row], LACKING, WHOLE)
    assert marked.outcome.verdict is TensorVerdict.UNKNOWN
    assert marked.outcome.findings == (
        "a may lack parts of it: ranks or files are missing or damaged",
        "why",
    )
    assert mark_undecided_rows([row], WHOLE, WHOLE) == [row]
    by_rank = SideCoverage({}, ("x.npy: but missing",))
    assert mark_undecided_rows([row], by_rank, SideCoverage({})) == [row]


@pytest.mark.parametrize(
    ("text", "source", "verdict", "is_marked"),
    [
        ("Gradients/a>!", LayoutSource.DTENSOR, TensorVerdict.DIFFERENT, True),
        ("Gradients/a>!", LayoutSource.DTENSOR, TensorVerdict.SUSPICIOUS, True),
        ("Gradients/a>!", LayoutSource.DTENSOR, TensorVerdict.NAN, False),
        ("Gradients/a>!", LayoutSource.DTENSOR, TensorVerdict.NORMAL, False),
        ("Gradients/a<!", LayoutSource.DTENSOR, TensorVerdict.DIFFERENT, False),
        ("Gradients/a>!", None, TensorVerdict.DIFFERENT, False),
        ("a>!", LayoutSource.DTENSOR, TensorVerdict.DIFFERENT, False),
    ],
)
def test_gradient_of_a_dtensor_may_be_that_of_other_uses(text, source, verdict, is_marked):
    row = make_row(text, verdict, source)
    [marked] = mark_undecided_rows([row], WHOLE, WHOLE)
    if is_marked:
        assert marked.outcome.verdict is TensorVerdict.UNKNOWN
        assert "the gradient for this operator alone" in marked.outcome.findings[0]
    else:
        assert marked == row
    assert mark_undecided_rows([row], SideCoverage({}), SideCoverage({})) == [row]

"""Statistics of every tensor in execution order, from tables or files."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from rankdump.reader import Query, Survey, walk

ONES = np.ones(4, np.float32)
BAD = np.array([1.0, np.nan, np.inf, -np.inf], np.float32)


def surveyed(tree, query=None, *, decide=False):
    survey = Survey(walk(tree.root), query or Query(), decide=decide)
    return list(survey), survey.problems


def test_survey_joins_rows_and_files(tree):
    """Where a tensor has both, it is one line, with the table's figures and the file's path."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", BAD, tabled=True)
    tree.complete(0, 0)
    ((row,), problems) = surveyed(tree)
    assert (row.computed, row.path, problems) == (False, str(path.relative_to(tree.root)), [])
    assert row.op_name == "Default/a-A/A-op0"
    assert row.finite is False
    assert row.maximum is not None
    assert math.isnan(row.maximum)
    assert row.nans is None


def test_survey_computes_files_without_a_row(tree):
    """A complex tensor has no row; a table may be missing altogether."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES, tabled=True)
    tree.tensor(0, 0, "Default/b-B/B-op0", np.array([3 + 4j]))
    ((first, second), _) = surveyed(tree)
    assert (first.computed, second.computed) == (False, True)
    assert (second.maximum, second.l2norm, second.finite) == (5.0, 5.0, True)


def test_survey_keeps_tensors_of_equal_time_stamps(tree):
    """MindSpore's processes may write to one rank at one microsecond: names tell them apart."""
    first = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, tabled=True)
    tree.clock_us -= 10
    second = tree.tensor(0, 0, 'Default/b,"-B/B-op0', BAD, tabled=True)
    (rows, _) = surveyed(tree)
    assert {row.path for row in rows} == {str(p.relative_to(tree.root)) for p in (first, second)}
    assert [row.computed for row in rows] == [False, False]


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "null", "x"])
def test_survey_ignores_an_invalid_count(tree, text):
    """A table that says nonsense for a count costs that figure, not the survey."""
    tree.items = ("nan count", "negative inf count", "positive inf count")
    table = tree.row(0, 0, "Default/a-A/A-op0", ONES)
    table.write_text(table.read_text().replace(",0,0,0,", f",{text},{text},0,"))
    ((row,), problems) = surveyed(tree)
    assert (row.nans, row.infinities, problems) == (None, None, [])


def test_survey_has_rows_without_a_file(tree):
    """With figures alone the table's path stands for the tensor's."""
    table = tree.row(0, 0, "Default/a-A/A-op0", ONES)
    ((row,), _) = surveyed(tree)
    assert (row.path, row.shape) == (str(table.relative_to(tree.root)), (4,))


def test_survey_is_in_execution_order(tree):
    """By rank, iteration and time, over graphs and sources; constants first."""
    tree.tensor(1, 0, "Default/d-D/D-op0", ONES)
    tree.tensor(0, 1, "Default/c-C/C-op0", ONES)
    tree.row(0, 0, "Default/z-Z/Z-op0", ONES, graph=1)
    tree.tensor(0, 0, "Default/b-B/B-op0", ONES, graph=0)
    tree.row(0, 0, "Default/a-A/A-op0", ONES, graph=1)
    tree.tensor(0, 0, "data-1", ONES, op_type="Parameter", constant=True)
    (rows, _) = surveyed(tree)
    assert [row.op_type for row in rows] == ["Parameter", "Z", "B", "A", "C", "D"]


@pytest.mark.parametrize(("decide", "finite"), [(False, None), (True, False)])
def test_survey_computes_undecided_rows_on_demand(tree, decide, finite):
    """A table of digests does not say what is finite; the tensor does."""
    tree.items = ("md5",)
    tree.tensor(0, 0, "Default/a-A/A-op0", BAD, tabled=True)
    ((row,), _) = surveyed(tree, decide=decide)
    assert row.finite is finite
    assert row.computed is decide


def test_survey_reports_damage_and_continues(tree):
    """A torn table is a problem, a damaged tensor a row that says so."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES).write_bytes(b"junk")
    tree.row(0, 1, "Default/b-B/B-op0", ONES).write_text("junk")
    tree.tensor(0, 2, "Default/c-C/C-op0", ONES)
    (rows, problems) = surveyed(tree)
    assert [bool(row.damage) for row in rows] == [True, False]
    assert "A-op0" in rows[0].damage
    (problem,) = problems
    assert "not a statistic table" in problem


def test_survey_filters_rows_and_files(tree):
    """One query, two sources."""
    tree.row(0, 0, "Default/a-A/A-op0", ONES)
    tree.tensor(0, 1, "Default/a-A/A-op0", ONES)
    tree.tensor(1, 1, "Default/b-B/B-op0", ONES)
    assert len(surveyed(tree, Query(glob="*a-A*"))[0]) == 2
    assert len(surveyed(tree, Query(rank=1))[0]) == 1


def test_survey_holds_one_tensor_in_memory(tree):
    """However many there are, the peak is that of one and what unpacking it takes."""
    one = np.zeros(1 << 20, np.float32)
    for number in range(6):
        tree.tensor(0, number, "Default/a-A/A-op0", one)
    survey = Survey(walk(tree.root), Query())
    tracemalloc.start()
    try:
        assert [row.finite for row in survey] == [True] * 6
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * one.nbytes


def tear(text: str) -> str:
    return text[:-3]


def repeat_first_row(text: str) -> str:
    header, row, *rest = text.split("\n")
    return "\n".join([header, row, row, *rest])


@pytest.mark.parametrize(
    "change",
    [
        tear,
        repeat_first_row,
        lambda text: text.replace("Max Value", "Other").replace("Min Value", "Another"),
        lambda text: text.replace('"(4)"', '"(4;)"', 1),
        lambda text: text.replace(",16,", ",sixteen,", 1),
        lambda text: text + text.partition("\n")[0] + "\n",
        lambda text: text.replace("Max Value", "NaN Count", 1),
        lambda text: "what is this\n",
    ],
)
def test_iterations_of_finite_tensors_are_left_out(tree, change, monkeypatch):
    """Only those: what is counted, found or wrong is the same as when every row is read."""
    monkeypatch.setattr("rankdump._analysis.reader.tensor_statistics._MIN_PLACES", 1)
    for iteration in range(5):
        for name in ("a", "b"):
            values = BAD if (iteration, name) == (1, "b") else ONES
            tree.row(0, iteration, f"Default/{name}-A/A-op0", values)
        tree.complete(0, iteration)
    tree.tensor(0, 3, "Default/c-A/A-op0", ONES, tabled=True)
    path = tree.root / "rank_0/Net/0/2/statistic.csv"
    path.write_text(change(path.read_text()))

    found = walk(tree.root)
    whole = Survey(found, Query(), decide=True)
    every = list(whole)
    survey = Survey(found, Query(), decide=True, skip_finite=True)
    rows = list(survey)
    assert {row.key.iteration for row in rows} <= {1, 2, 3}
    assert survey.skipped_rows == len(every) - len(rows) >= 4
    assert survey.problems == whole.problems
    for is_asked in (lambda row: row.finite is not True, lambda row: row.computed):
        assert repr([*filter(is_asked, rows)]) == repr([*filter(is_asked, every)])
    part = Survey(found, Query(op_type="A"), skip_finite=True)
    assert (len(list(part)), part.skipped_rows) == (len(every), 0)

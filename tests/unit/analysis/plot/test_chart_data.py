"""Charts as data: the same with a table and without, and the reason where there is none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tree_builder import TreeBuilder

from rankdump._analysis.plot import chart_data
from rankdump._analysis.plot.chart_data import (
    FINITE,
    INFINITE,
    MAX_CELL_COLUMNS,
    MAX_CELL_ROWS,
    NOT_A_NUMBER,
    AxisScale,
    ElementHistogram,
    HeatMap,
    LineChart,
    choose_scale,
    count_elements,
    find_elements,
    find_heat_map,
    find_lines,
    shrink_heat_map,
)
from rankdump._analysis.plot.chart_rows import ChartRefusal, ChartRows, ChartSelection
from rankdump._analysis.reader.query import Query
from rankdump._analysis.table_index import index_tree
from rankdump._core.plan import IterationSelection
from rankdump._core.record import TensorSide

GRADIENT, LINEAR = "Gradients/fc.weight", "Default/network-Net/fc-Linear/Linear-op0"
QUOTED = 'Default/\'; DROP "x" <b>-op0'
ITERATIONS = {at: IterationSelection(str(at), ((at, at),)) for at in range(3)}


def fill(tree: TreeBuilder) -> Path:
    """Two ranks, three iterations: the norm of the gradient is rank + 1 + 10 * iteration.

    Rank 1 has NaN in iteration 1 and infinity in iteration 2.
    """
    for iteration in range(3):
        for rank in (0, 1):
            value = np.float32(rank + 1 + 10 * iteration)
            if rank == 1 and iteration:
                value = np.float32((np.nan, np.inf)[iteration - 1])
            tree.row(rank, iteration, GRADIENT, np.array([value]), op_type="Parameter")
            for side in (TensorSide.INPUT, TensorSide.OUTPUT):
                values = np.arange(4, dtype=np.float32)
                tree.tensor(rank, iteration, LINEAR, values, side=side, tabled=True)
            tree.tensor(rank, iteration, QUOTED, np.ones(2, np.float32))
            tree.complete(rank, iteration)
    tree.tensor(0, 0, "Default/table-op9", np.ones(1, np.float32), constant=True, tabled=True)
    tree.complete(0, 0)
    return tree.root


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same tree with a table and without."""
    folder = tmp_path_factory.mktemp("charts")
    roots = {name: fill(TreeBuilder(folder / name)) for name in ("walked", "indexed")}
    index_tree(roots["indexed"])
    return roots


@pytest.fixture(params=["walked", "indexed"])
def root(both, request) -> Path:
    return both[request.param]


def rows(root: Path, *, slot: int | None = None, job: str = "", **query: Any) -> ChartRows:
    return ChartRows(root, ChartSelection(Query(**query), job, None, slot))


def lines(
    root: Path, statistic: str = "l2norm", over: str = "iteration", **query: Any
) -> LineChart:
    found = find_lines(rows(root, **query), statistic, over, str)
    assert isinstance(found, LineChart), found
    return found


def told(chart: LineChart) -> dict[str, list[tuple[int, float]]]:
    return {
        line.label: list(zip(line.places.tolist(), line.values.tolist(), strict=True))
        for line in chart.lines
    }


def test_one_tensor_has_a_line_for_each_rank(root):
    chart = lines(root, glob="Gradients/*")
    assert chart.title == "l2norm of Gradients/fc.weight, output 0, 2 ranks"
    assert chart.notes == ("1 value NaN", "1 value infinite")
    found = told(chart)
    assert found["rank 0"] == [(0, 1.0), (1, 11.0), (2, 21.0)]
    assert str(found["rank 1"]) == "[(0, 2.0), (1, nan), (2, inf)]"


def test_several_tensors_have_a_line_each_in_execution_order(root):
    chart = lines(root, "max", rank=0)
    assert [line.label for line in chart.lines] == [
        f"{GRADIENT}, output 0", f"{LINEAR}, input 0", f"{LINEAR}, output 0"
    ]  # fmt: skip
    assert chart.title == "max of 2 operators, 2 inputs and outputs, rank 0"
    assert chart.notes == (
        "3 values without max", "1 value of constants, which have no iteration"
    )  # fmt: skip


def test_lines_over_ranks_are_one_for_each_iteration(root):
    chart = lines(root, over="rank", glob="Gradients/*", iterations=ITERATIONS[0])
    assert told(chart) == {GRADIENT: [(0, 1.0), (1, 2.0)]}
    assert chart.title == "l2norm of Gradients/fc.weight, output 0, iteration 0"
    assert [line.label for line in lines(root, over="rank", glob="Gradients/*").lines] == [
        "iteration 0", "iteration 1", "iteration 2"
    ]  # fmt: skip


def test_constants_are_shown_over_ranks(root):
    assert told(lines(root, over="rank", glob="*table*")) == {"Default/table-op9": [(0, 1.0)]}
    found = find_lines(rows(root, glob="*table*"), "l2norm", "iteration", str)
    assert isinstance(found, ChartRefusal)
    assert "a constant without iteration: see --over rank" in found.reason


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"glob": "Parameter"}, {GRADIENT}),  # a type
        ({"glob": "Default_network-Net_fc-*"}, {LINEAR}),  # as files spell it
        ({"pattern": re.compile("fc.Linear")}, {LINEAR}),
        ({"side": TensorSide.INPUT}, {LINEAR}),
        ({"slot": 1}, set()),
        ({"job": "job"}, {GRADIENT, LINEAR}),
    ],
)
def test_filters_are_those_of_other_commands(root, query, names):
    found = find_lines(rows(root, rank=0, **query), "max", "iteration", str)
    if not names:
        assert isinstance(found, ChartRefusal)
        return
    assert isinstance(found, LineChart)
    told = " ".join([found.title, *(line.label for line in found.lines)])
    assert {name for name in (GRADIENT, LINEAR) if name in told} == names


def test_filter_of_graphs_applies_without_the_column(root):
    assert len(lines(root, glob="Gradients/*", graph=0).lines) == 2
    assert isinstance(find_lines(rows(root, graph=1), "max", "iteration", str), ChartRefusal)


def test_several_values_at_one_place_have_their_extreme(tmp_path):
    tree = TreeBuilder(tmp_path / "tree", items=("max", "min"))
    for microbatch in range(3):
        values = np.array([microbatch, -microbatch], np.float32)
        tree.tensor(0, 0, LINEAR, values, microbatch=microbatch, tabled=True)
    tree.complete(0, 0)
    chart = lines(tree.root, "max")
    assert told(chart) == {LINEAR: [(0, 2.0)]}
    assert chart.notes == ("largest of up to 3 values of a tensor at one iteration",)
    chart = lines(tree.root, "min")
    assert told(chart) == {LINEAR: [(0, -2.0)]}
    assert chart.notes[0].startswith("smallest of")


def test_nothing_that_matches_names_what_is_there(root):
    found = find_lines(rows(root, glob="nothing*"), "l2norm", "iteration", str)
    assert isinstance(found, ChartRefusal)
    assert found.reason.startswith(
        f"{root}: no tensor matches; the tree has rank 0-1, iteration 0-2, 4 operators: Default/"
    )


def test_statistic_that_was_not_recorded_names_those_that_were(root):
    found = find_lines(rows(root, glob="Gradients/*"), "zero_count", "iteration", str)
    assert found == ChartRefusal(
        f"{root}: of 6 tensors, none has zero_count; recorded: max, min, l2norm"
    )
    found = find_heat_map(rows(root, glob="*DROP*"), "max", str)
    assert isinstance(found, ChartRefusal)
    assert "of 6 tensors, none has statistics" in found.reason


def test_too_many_lines_are_refused(root, monkeypatch):
    monkeypatch.setattr(chart_data, "MAX_LINES", 3)
    found = find_lines(rows(root), "max", "iteration", str)
    assert isinstance(found, ChartRefusal)
    assert found.reason.startswith("6 lines match, and at most 3 are drawn")


def test_heat_map_has_a_cell_for_each_rank_and_iteration(root):
    chart = find_heat_map(rows(root, glob="Gradients/*"), "l2norm", str)
    assert isinstance(chart, HeatMap)
    assert (chart.ranks.tolist(), chart.iterations.tolist()) == ([0, 1], [0, 1, 2])
    assert str(chart.values.tolist()) == "[[1.0, 11.0, 21.0], [2.0, nan, nan]]"
    assert chart.flags.tolist() == [[FINITE] * 3, [FINITE, NOT_A_NUMBER, INFINITE]]
    assert chart.title == "l2norm of Gradients/fc.weight, output 0"


def test_heat_map_of_several_tensors_has_the_extreme_and_says_so(root):
    chart = find_heat_map(rows(root, iterations=ITERATIONS[0]), "max", str)
    assert isinstance(chart, HeatMap)
    assert chart.title == "max of 3 tensors of 2 operators"
    assert chart.values.tolist() == [[3.0], [3.0]]
    assert chart.notes == ("a cell has the largest of 3 tensors", "2 values without max")
    chart = find_heat_map(rows(root, iterations=ITERATIONS[0]), "min", str)
    assert isinstance(chart, HeatMap)
    assert chart.values.tolist() == [[0.0], [0.0]]
    assert chart.notes[0] == "a cell has the smallest of 3 tensors"


@pytest.mark.parametrize(("statistic", "kept"), [("max", 7.0), ("min", -7.0)])
def test_shrunk_heat_map_keeps_extremes_and_flags(statistic, kept):
    """Law: one cell that differs is in the picture, however many there are."""
    shape = MAX_CELL_ROWS * 2 + 1, MAX_CELL_COLUMNS * 3
    values, flags = np.zeros(shape), np.full(shape, FINITE)
    values[0, :] = np.nan
    values[301, 100], values[302, 200] = 7.0, -7.0
    flags[512, 1199] = NOT_A_NUMBER
    chart = HeatMap("t", ("n",), statistic, np.arange(513), np.arange(1200), values, flags)
    small = shrink_heat_map(chart)
    assert small.values.shape == small.flags.shape == (171, 400)
    assert (small.ranks[1], small.iterations[1]) == (3, 3)
    assert (kept in small.values, -kept in small.values) == (True, False)
    assert np.argwhere(small.flags).tolist() == [[170, 399]]
    assert small.notes[1].endswith("of 3 ranks and 3 iterations")
    assert shrink_heat_map(small) is small


def test_histogram_counts_the_elements_of_one_tensor(root):
    selected = rows(root, glob=LINEAR, rank=1, iterations=ITERATIONS[2], side=TensorSide.OUTPUT)
    chart = find_elements(selected, str)
    assert isinstance(chart, ElementHistogram)
    assert chart.title == f"elements of {LINEAR}, output 0, rank 1, iteration 2"
    assert (chart.counts.sum(), chart.edges[0], chart.edges[-1]) == (4, 0.0, 3.0)
    assert chart.notes == ("4 elements from 0 to 3",)


def test_histogram_of_several_tensors_is_refused(root):
    found = find_elements(rows(root, glob=LINEAR, rank=0), str)
    assert isinstance(found, ChartRefusal)
    assert found.reason.startswith(
        f"a histogram shows one tensor, and 6 match: rank 0, iteration 0-2, 1 operator: {LINEAR}; "
    )


def test_histogram_of_statistics_alone_is_refused(root):
    found = find_elements(rows(root, glob=GRADIENT, rank=0, iterations=ITERATIONS[0]), str)
    assert found == ChartRefusal(
        f"{GRADIENT}, output 0, rank 0, iteration 0: "
        "the tree has statistics of it only, and no elements"
    )


def test_histogram_of_a_file_that_went_is_refused(tmp_path):
    tree = TreeBuilder(tmp_path / "tree")
    file = tree.tensor(0, 0, LINEAR, np.ones(2, np.float32))
    tree.complete(0, 0)
    index_tree(tree.root)
    file.unlink()
    found = find_elements(rows(tree.root), str)
    assert isinstance(found, ChartRefusal)
    assert f"its file {file.relative_to(tree.root)} is not in the tree any more" in found.reason


def test_histogram_of_nothing_is_refused(root):
    found = find_elements(rows(root, rank=7), str)
    assert isinstance(found, ChartRefusal)
    assert "no tensor matches" in found.reason


@pytest.mark.parametrize(
    "elements",
    [
        np.linspace(-3, 5, 1000),
        np.array([1e308, -1e308, 0.0]) * 1.7,
        np.array([5e-324, 0.0, 1e-323]),
        np.array([2.0**60, np.nextafter(2.0**60, np.inf)]),
        np.full(9, 1e30),
        np.full(9, 5e-324),
        np.zeros(9),
        np.arange(300, dtype=np.uint8).reshape(3, 100),
        np.array([True, False, True]),
        np.array([-(2**63), 2**63 - 1]),
        np.array([65504, -65504], np.float16),
        np.array(1.5),
    ],
    ids=lambda elements: f"{elements.dtype}-{elements.flat[0]}",
)
def test_every_finite_element_is_in_a_bar(elements):
    chart = count_elements(elements, "t")
    assert isinstance(chart, ElementHistogram)
    assert chart.counts.sum() == elements.size
    assert np.isfinite(chart.edges).all()
    assert (np.diff(chart.edges) > 0).all()


def test_few_whole_numbers_have_a_bar_each():
    chart = count_elements(np.array([3, 5, 5], np.int8), "t")
    assert isinstance(chart, ElementHistogram)
    assert (chart.counts.tolist(), chart.edges.tolist()) == ([1, 0, 2], [2.5, 3.5, 4.5, 5.5])


def test_elements_that_are_not_finite_are_counted():
    chart = count_elements(np.array([1, np.nan, 2, np.inf, -np.inf]), "t", ["note"])
    assert isinstance(chart, ElementHistogram)
    assert chart.counts.sum() == 2
    assert chart.notes == (
        "5 elements from 1 to 2", "1 NaN and 2 infinite not in the bars", "note"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("elements", "reason"),
    [([], "t: it has no elements"), ([np.nan], "t: it has no finite element: 1 NaN")],
)
def test_tensor_without_finite_elements_is_refused(elements, reason):
    assert count_elements(np.array(elements), "t") == ChartRefusal(reason)


@pytest.mark.parametrize(
    ("values", "asked", "scale"),
    [
        ([1, 1000], "auto", AxisScale("linear")),
        ([1, 1001, np.nan, np.inf], "auto", AxisScale("log")),
        ([0, 0.5, 1001], "auto", AxisScale("symlog", 0.5)),
        ([-1, 0.001, 10], "auto", AxisScale("linear")),
        ([-1, 0.001, 10], "log", AxisScale("symlog", 0.001)),
        ([1, 2], "log", AxisScale("log")),
        ([1, 1e9], "linear", AxisScale("linear")),
        ([0, 0], "log", AxisScale("linear")),
        ([np.nan], "auto", AxisScale("linear")),
    ],
)
def test_scale_is_logarithmic_over_three_decades(values, asked, scale):
    assert choose_scale(np.array(values, np.float64), asked) == scale

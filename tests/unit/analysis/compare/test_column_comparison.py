"""Comparison of trees of statistics as columns: the same rows, notes and origins as by programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from support.command_line import run_in_process
from support.tensor_layouts import shard_rows
from support.tree_builder import TreeBuilder

import rankdump
from rankdump._analysis.compare import comparison
from rankdump._analysis.compare.fingerprint_comparison import ESTIMATED_ERROR
from rankdump._analysis.compare.programs import read_programs
from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    DumpedProgram,
    DumpedTensor,
    TensorVerdict,
)
from rankdump._analysis.reader import indexed_manifests
from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.table_index import index_tree
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import TensorLayout

Array: TypeAlias = "npt.NDArray[Any]"
Change: TypeAlias = "Callable[[int, int, int, Array], Array | None]"
"""Takes rank, iteration, number of the operator and elements, and returns those of the other tree;
None leaves the tensor out."""
NAMES = [f"Default/network-Net/layers-ModuleList/{n}-Linear/Linear-op{n}" for n in range(4)]
RANKS, ITERATIONS = (0, 1), (0, 1, 2)


def keep(rank: int, iteration: int, operator: int, array: Array) -> Array:
    return array


def drift(rank: int, iteration: int, operator: int, array: Array) -> Array:
    return array if iteration < 1 or operator < 2 else array * np.float32(1.01)


def shift_places(rank: int, iteration: int, operator: int, array: Array) -> Array:
    return array if operator else array[::-1].copy()


def round_slightly(rank: int, iteration: int, operator: int, array: Array) -> Array:
    return array * np.float32(1 + 1e-6)


def lose_tensors(rank: int, iteration: int, operator: int, array: Array) -> Array | None:
    return None if iteration == 1 and operator == rank + 1 else array


def overflow(rank: int, iteration: int, operator: int, array: Array) -> Array:
    changed = array.copy()
    changed[0, 0] = np.nan if operator == 2 and iteration == 1 else changed[0, 0]
    return changed


def change_types(rank: int, iteration: int, operator: int, array: Array) -> Array:
    return array.astype(np.float16 if operator == 1 else array.dtype)


def change_shapes(rank: int, iteration: int, operator: int, array: Array) -> Array:
    other = {1: array[:, :2], 2: array.reshape(-1), 3: array[None]}
    return np.ascontiguousarray(other.get(operator, array))


def lose_iteration(rank: int, iteration: int, operator: int, array: Array) -> Array | None:
    return None if iteration == 2 else array


CHANGES = (
    keep,
    drift,
    shift_places,
    round_slightly,
    lose_tensors,
    overflow,
    change_types,
    change_shapes,
    lose_iteration,
)


def write(
    root: Path,
    change: Change = keep,
    *,
    fingerprints: bool = True,
    items: tuple[str, ...] = ("max", "min", "avg", "l2norm", "nan count"),
    layout_of: Callable[[int], TensorLayout | None] = lambda rank: None,
    filed: Container[int] = (),
) -> Path:
    """Two ranks with three iterations of four operators, the last of which runs twice; some
    iterations have tensors.
    """
    tree = TreeBuilder(root, fingerprints=fingerprints, items=items)
    for rank in RANKS:
        for iteration in ITERATIONS:
            random = np.random.default_rng((rank, iteration))
            for operator in (0, 1, 2, 3, 3):
                for side in TensorSide:
                    array = random.normal(size=(6, 4)).astype(np.float32)
                    given = change(rank, iteration, operator, array)
                    if given is not None:
                        layout = layout_of(rank)
                        place = rank, iteration, NAMES[operator], given
                        if iteration in filed and rank == 0:
                            tree.tensor(*place, side=side, tensor_layout=layout, tabled=True)
                        else:
                            tree.row(*place, side=side, tensor_layout=layout)
            if (rank, iteration) in tree.records:
                tree.complete(rank, iteration)
    return root


def describe_tensor(tensor: DumpedTensor | None) -> object:
    if tensor is None:
        return None
    return (*tensor[:6], tensor.entry, sorted(tensor.statistics.items()), tensor.seen_order)


def describe_row(row: ComparisonRow) -> object:
    outcome = row.outcome
    return (
        *row[:8],
        describe_tensor(row.pair.a),
        describe_tensor(row.pair.b),
        (outcome.verdict, outcome.findings, outcome.measures, dict(outcome.extra)),
        repr(sorted(outcome.statistic_differences.items())),
        (outcome.nonfinite_a, outcome.nonfinite_b),
    )


def describe(report: ComparisonReport) -> object:
    rows = [repr(describe_row(row)) for row in report.rows]
    return rows, report.origins, report.rank_origins, report.notes, report.a, report.b


def read_filed_programs(dump: Dump, problems: list[str]) -> list[DumpedProgram]:
    """Return the programs of a part of a dump, and none of a whole one."""
    return read_programs(dump, problems) if dump.is_filtered else []


@pytest.fixture
def compare_twice(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, Path], ComparisonReport]:
    """Compare two trees as programs and as columns, check that the reports are the same, and
    return the latter.
    """

    def compare(a: Path, b: Path) -> ComparisonReport:
        slow = rankdump.compare(a, b)
        with monkeypatch.context() as patched:
            patched.setattr(comparison, "MIN_TABLED_TENSORS", 1)
            # Without the columns nothing would be compared.
            patched.setattr(comparison, "read_programs", read_filed_programs)
            fast = rankdump.compare(a, b)
        assert describe(fast) == describe(slow)
        return fast

    return compare


@pytest.mark.parametrize("change", CHANGES)
def test_report_is_that_of_programs(change, tmp_path, compare_twice):
    report = compare_twice(write(tmp_path / "a", change), write(tmp_path / "b"))
    verdicts = {row.outcome.verdict for row in report.rows}
    assert (verdicts == {TensorVerdict.SAME}) == (change in (keep, lose_iteration))
    if change is drift:
        first = next(row for row in report.rows if not row.outcome.verdict.agrees)
        assert (first.iteration, first.name_a) == (1, NAMES[2])
        error = first.outcome.statistic_differences[ESTIMATED_ERROR]
        assert error == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("change", [keep, drift, overflow])
@pytest.mark.parametrize("items", [("max", "min"), ("l2norm",)])
def test_report_is_that_of_programs_without_fingerprints(change, items, tmp_path, compare_twice):
    trees = [
        write(tmp_path / name, each, fingerprints=False, items=items)
        for name, each in (("a", change), ("b", keep))
    ]
    report = compare_twice(*trees)
    assert {TensorVerdict.SAME} <= {row.outcome.verdict for row in report.rows}


def test_report_of_shards_is_that_of_programs(tmp_path, compare_twice):
    def layout_of(rank: int) -> TensorLayout:
        return shard_rows(rank, 6 * rank, (12, 4))

    trees = [
        write(tmp_path / name, change, layout_of=layout_of)
        for name, change in (("a", drift), ("b", keep))
    ]
    report = compare_twice(*trees)
    assert {row.rank for row in report.rows} == {0, 1}


@pytest.mark.parametrize("filed", [((1,), (1,)), ((0,), (2,))])
def test_iterations_with_tensors_are_compared_as_programs(filed, tmp_path, compare_twice):
    trees = [
        write(tmp_path / name, change, filed=own)
        for name, change, own in (("a", drift, filed[0]), ("b", keep, filed[1]))
    ]
    report = compare_twice(*trees)
    has_file = {row.iteration for row in report.rows if row.pair.a and row.pair.a.entry}
    assert has_file == set(filed[0])


def test_command_prints_the_same(tmp_path, monkeypatch):
    """Options that were not given are no filters."""
    trees = [write(tmp_path / name, change) for name, change in (("a", drift), ("b", keep))]
    printed: list[dict[str, Any]] = []
    for least in (1 << 60, 1):
        with monkeypatch.context() as patched:
            patched.setattr(comparison, "MIN_TABLED_TENSORS", least)
            if least == 1:
                patched.setattr(comparison, "read_programs", read_filed_programs)
            done = run_in_process("diff", *trees, "--json")
        assert done.returncode == 1, done.stderr
        printed.append(json.loads(done.stdout) | {"seconds": 0})
    assert printed[0] == printed[1]


def test_table_of_a_tree_gives_the_same(tmp_path, compare_twice, monkeypatch):
    monkeypatch.setattr(indexed_manifests, "_MIN_MANIFESTS", 1)
    trees = [write(tmp_path / name, change) for name, change in (("a", drift), ("b", keep))]
    expected = describe(compare_twice(*trees))
    for tree in trees:
        index_tree(tree, processes=1)
    assert describe(compare_twice(*trees)) == expected


def test_trees_of_other_layouts_are_joined_as_programs(tmp_path, monkeypatch):
    """The shards of two ranks have the fingerprints and statistics of one rank's tensors."""
    monkeypatch.setattr(comparison, "MIN_TABLED_TENSORS", 1)
    items = ("max", "min", "avg", "l2norm", "nan count")
    trees = [TreeBuilder(tmp_path / n, fingerprints=True, items=items) for n in "ab"]
    whole = np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32)
    for rank in range(2):
        part = whole[6 * rank :][:6]
        trees[0].row(rank, 0, NAMES[0], part, tensor_layout=shard_rows(rank, 6 * rank, (12, 4)))
        trees[0].complete(rank, 0)
    trees[1].row(0, 0, NAMES[0], whole)
    trees[1].complete(0, 0, world_size=1)
    report = rankdump.compare(*(tree.root for tree in trees))
    (row,) = report.rows
    assert (row.outcome.verdict, report.agrees) == (TensorVerdict.SAME, True)
    assert row.pair.a is not None
    assert row.pair.a.shape == (12, 4)

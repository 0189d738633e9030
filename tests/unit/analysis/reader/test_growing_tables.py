"""Tables with rows of several iterations: of each iteration that is asked for, what the whole table
has of it; other lines become no objects.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from support.growing_trees import STARTED_US, GrowingTree

from rankdump import reader
from rankdump._analysis.reader import growing_tables, statistic_tables, tensor_statistics
from rankdump._analysis.reader.query import Query, selected
from rankdump._analysis.reader.table_rows import iterate_named
from rankdump._analysis.reader.tensor_statistics import Survey, Surveyed
from rankdump._analysis.reader.tree_walk import walk
from rankdump.errors import CorruptedError

KINDS = ("device", "api")
IN_ALL = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_tables, "_BLOCK_BYTES", 200)
    monkeypatch.setattr(growing_tables, "_LINES_AT_A_TIME", 3)


def make_tree(root: Path, kind: str) -> GrowingTree:
    tree = GrowingTree(root / "tree", kind)
    for iteration in range(3):
        for rank in (0, 1):
            tree.add(iteration, rank=rank)
    return tree


def survey(root: Path, **filters: int) -> tuple[list[Surveyed], list[str]]:
    query = selected(filters)  # type: ignore[arg-type]
    found = Survey(walk(root, query) if filters else walk(root), query)
    return list(found), found.problems


@IN_ALL
def test_place_has_the_rows_of_the_whole_table(tmp_path: Path, kind: str):
    root = make_tree(tmp_path, kind).root
    dump = reader.open(root)
    whole, problems = survey(root)
    assert (len(whole), problems) == (24, [])
    assert (dump.ranks, dump.iterations) == ((0, 1), (0, 1, 2))
    for rank in (0, 1):
        for iteration in (0, 1, 2):
            part = reader.open(root).where(rank=rank, iteration=iteration)
            place = (rank, iteration)
            rows = [r for r in dump.statistics() if (r.key.rank, r.key.iteration) == place]
            assert len(rows) == 4
            assert part.statistics() == rows
            assert part.ranks == (rank,)
            assert part.operators == tuple(dict.fromkeys(row.op_name for row in rows))
            same = dump.where(rank=rank, iteration=iteration)
            assert part.table().to_pylist() == same.table().to_pylist()
            mine = [r for r in whole if (r.key.rank, r.key.iteration) == place]
            assert survey(root, rank=rank, iteration=iteration) == (mine, [])


@IN_ALL
def test_other_lines_become_no_objects(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    root = make_tree(tmp_path, kind).root
    made: Counter[str] = Counter()
    for module, name in (
        (growing_tables, "make_statistics_row"),
        (growing_tables, "make_info_row"),
        (statistic_tables, "TensorKey"),
    ):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, n=name, r=real, **k: made.update([n]) or r(*a, **k)
        )
    rows, _ = survey(root, rank=1, iteration=2)
    assert len(rows) == 4
    assert sorted(made.values()) == [4, 4]


@IN_ALL
def test_lines_of_a_killed_attempt_are_told_apart(tmp_path: Path, kind: str):
    """Iteration 1 comes twice in the table, and its first lines have no manifest."""
    tree = GrowingTree(tmp_path / "tree", kind)
    tree.add(0)
    tree.add(1, is_killed=True)
    tree.add(1, attempt=1)
    dump = reader.open(tree.root)
    rows = dump.statistics()
    values = [row.number("max") for row in rows]
    assert values == [0.0, 1.0, 2.0, 3.0, *(10.0, 11.0, 12.0, 13.0), *(110.0, 111.0, 112.0, 113.0)]
    assert [row.record is not None for row in rows] == [True] * 4 + [False] * 4 + [True] * 4
    # A line of CANN's table without a record has no iteration.
    own = rows[4:] if kind == "api" else rows[8:]
    assert dump.where(iteration=1).statistics() == own
    assert dump.where(iteration=0).statistics() == [row for row in rows if row not in own]


@IN_ALL
def test_invalid_line_is_a_problem_of_its_iteration(tmp_path: Path, kind: str):
    tree = make_tree(tmp_path, kind)
    table = tree.get_table(1)
    lines = table.read_text().split("\n")
    at = 6 if kind == "api" else 7  # in iteration 1
    lines[at] = lines[at].replace("float32", 'float32"') if kind == "api" else lines[at][:-30]
    table.write_text("\n".join(lines))
    assert survey(tree.root, rank=1, iteration=2)[1] == []
    rows, (problem,) = survey(tree.root)
    assert f"{table}, line {at + 1}" in problem
    assert Counter(r.key.iteration for r in rows if r.key.rank == 1)[2] == 4
    with pytest.raises(CorruptedError, match=f"line {at + 1}"):
        reader.open(tree.root).where(iteration=1).statistics()


@IN_ALL
def test_line_that_is_being_written_is_a_problem_behind_all_rows(tmp_path: Path, kind: str):
    tree = make_tree(tmp_path, kind)
    with tree.get_table().open("a") as file:
        file.write('["NN_Linear_9' if kind == "api" else "Linear,fc")
    for filters in ({}, {"rank": 0, "iteration": 1}):
        rows, (problem,) = survey(tree.root, **filters)
        assert "its last line is incomplete" in problem
        assert len(rows) == (4 if filters else 24)


def test_row_of_a_device_without_a_record_belongs_to_the_first_iteration(tmp_path: Path):
    """Unless another tensor of its operator has one."""
    tree = make_tree(tmp_path, "device")
    tree.add_line(0, 7, "Default/none", "input", STARTED_US * 3, "7.0")
    tree.add_line(0, 1, "Default/fc0-Dense/MatMul-op0", "none", 2 * (STARTED_US + 10), "8.0")
    table = tree.get_table()
    table.write_text(table.read_text().replace(",none,0,", ",input,5,"))
    dump = reader.open(tree.root).where(rank=0)
    for iteration, value in ((0, 7.0), (1, 8.0)):
        rows = dump.where(iteration=iteration).statistics()
        (other,) = (row for row in rows if row.record is None)
        assert other.number("max") == value
        assert other in dump.statistics()


def test_statistic_that_another_iteration_has_is_nan(tmp_path: Path):
    """A line has NaN for what was not recorded too."""
    tree = GrowingTree(tmp_path / "tree", "api")
    tree.add(0)
    tree.add_line(0, 1, "NN_Linear_9_forward", "input", 0, "NaN")
    for line in ("[NaN, NaN, NaN], [], []]", "[NaN, NaN, NaN], [], 2.5]"):
        (row,) = reader.open(tree.root).where(iteration=1).statistics()
        assert row.values["Max Value"] == "nan"
        assert "L2Norm Value" not in row.values
        with tree.get_table().open("a") as file:
            file.write(f'["NN_Linear_10_forward_input", 2, [], "torch.float32", [1], {line}\n')
    (row,) = reader.open(tree.root).where(iteration=1).statistics()
    assert row.values["L2Norm Value"] == "nan"


@IN_ALL
def test_rows_of_some_operators_need_no_other_manifest(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
):
    tree = make_tree(tmp_path, kind)
    wanted = tree.name_operator(1, 1)
    found = walk(tree.root)
    rows = list(iterate_named(found, lambda row: row.op_name == wanted))
    monkeypatch.setattr(growing_tables, "make_info_row", pytest.fail)
    monkeypatch.setattr(growing_tables, "make_statistics_row", pytest.fail)
    assert list(iterate_named(found, lambda _: True, keeps_name=lambda name: False)) == []
    monkeypatch.undo()
    named = iterate_named(
        found, lambda _: True, keeps_name=lambda name: name == wanted.replace("/", "_")
    )
    assert list(named) == rows
    assert len(rows) == (4 if kind == "api" else 12)


@IN_ALL
@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999", "x"])
def test_iterations_with_finite_rows_alone_are_counted(
    tmp_path: Path, kind: str, value: str, monkeypatch: pytest.MonkeyPatch
):
    """Without rows; the others have theirs as without the columns."""
    monkeypatch.setattr(tensor_statistics, "_MIN_PLACES", 1)
    tree = make_tree(tmp_path, kind)
    name = tree.name_operator(1, 7)
    tree.add_line(1, 1, name, "input", 2 * (STARTED_US + 10), value)
    whole = Survey(walk(tree.root), Query())
    found = Survey(walk(tree.root), Query(), skip_finite=True)
    rows = list(map(repr, found))  # NaN is equal to itself
    assert rows == [repr(row) for row in whole if (row.key.rank, row.key.iteration) == (1, 1)]
    assert found.problems == whole.problems
    assert (found.skipped_rows, len(rows)) == (20, 5 if value != "x" else len(rows))

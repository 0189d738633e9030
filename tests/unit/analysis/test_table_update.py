"""Update of the table for changed manifests: every row once, whenever it is interrupted."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from support.statistic_rows import count_table_rows as rows
from support.statistic_rows import count_walked_rows as of_walk
from support.tree_builder import TreeBuilder

from rankdump._analysis import table_index, table_update
from rankdump._analysis.table.table_files import (
    TABLE_FOLDER,
    TableFile,
    TableSource,
    list_tensor_files,
    lock_table,
)
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._analysis.table_index import TableLag, compare_with_tree, index_tree
from rankdump._analysis.table_update import ChangedManifest, TableStep, plan_steps, update_table
from rankdump.errors import UnavailableError

NAME = "Default/network-Net/fc-Linear/Linear-op0"
ARRAY = np.array([1.5, -2.0, 0.0], np.float32)


@pytest.fixture
def tree(tmp_path: Path) -> TreeBuilder:
    return TreeBuilder(tmp_path / "tree")


def add(tree: TreeBuilder, *iterations: int) -> list[ChangedManifest]:
    for iteration in iterations:
        for rank in (0, 1):
            tree.tensor(rank, iteration, NAME, ARRAY * iteration, tabled=True)
            tree.row(rank, iteration, f"{NAME}{iteration}", ARRAY)
            tree.complete(rank, iteration)
    return [each for each in manifests(tree.root) if each.iteration in iterations]


def manifests(root: Path) -> list[ChangedManifest]:
    return [
        ChangedManifest(
            path.relative_to(root).as_posix(),
            int(path.relative_to(root).parts[0].removeprefix("rank_")),
            int(path.name.split(".")[0].removeprefix("iteration_")),
        )
        for path in sorted(root.rglob("iteration_*.json"))
    ]


def update(root: Path, changed: list[ChangedManifest], access: LocalTree | None = None):
    return update_table(access or LocalTree(root), changed, now_s=0.0)


def remove_iteration(tree: TreeBuilder, iteration: int) -> list[ChangedManifest]:
    gone = [each for each in manifests(tree.root) if each.iteration == iteration]
    for each in gone:
        (tree.root / each.path).unlink()
        for path in (tree.root / f"rank_{each.rank}/Net/0/{iteration}").iterdir():
            path.unlink()
    return gone


def test_rows_of_new_manifests_are_added(tree: TreeBuilder):
    report = update(tree.root, add(tree, 0, 1))
    assert (report.rows, report.files, report.problems) == (8, 1, [])
    report = update(tree.root, add(tree, 2))
    assert (report.rows, report.files) == (4, 1)
    assert rows(tree.root) == of_walk(tree.root)
    assert compare_with_tree(tree.root) == TableLag(0, 0)
    sizes = [path.stat().st_size for path in (tree.root / TABLE_FOLDER).glob("*.parquet")]
    assert len(sizes) == 4


def test_repeated_update_does_nothing(tree: TreeBuilder):
    """Law: what the ledger did not know of before a crash is not written twice."""
    changed = add(tree, 0, 1)
    update(tree.root, changed)
    before = list_tensor_files(tree.root)
    assert update(tree.root, changed).files == 0
    assert list_tensor_files(tree.root) == before


def test_rows_of_a_changed_manifest_are_replaced(tree: TreeBuilder):
    update(tree.root, add(tree, 0, 1))
    tree.tensor(0, 1, f"{NAME}-later", ARRAY)
    tree.complete(0, 1)
    report = update(tree.root, [each for each in manifests(tree.root) if each.iteration == 1])
    assert (report.rows, report.files) == (9, 1)
    assert len(list_tensor_files(tree.root)) == 1
    assert rows(tree.root) == of_walk(tree.root)


def test_rows_of_a_removed_iteration_are_removed(tree: TreeBuilder):
    update(tree.root, add(tree, 0, 1))
    update(tree.root, remove_iteration(tree, 0))
    assert rows(tree.root) == of_walk(tree.root)
    assert {row[1] for row in rows(tree.root)} == {"1"}
    update(tree.root, remove_iteration(tree, 1))
    assert [*(tree.root / TABLE_FOLDER).glob("*.parquet")] == []


def test_many_small_files_become_one(tree: TreeBuilder):
    for iteration in range(table_update.MAX_SMALL_FILES):
        update(tree.root, add(tree, iteration))
    assert len(list_tensor_files(tree.root)) == table_update.MAX_SMALL_FILES
    update(tree.root, add(tree, 99))
    assert len(list_tensor_files(tree.root)) == 1
    assert rows(tree.root) == of_walk(tree.root)


def test_files_of_other_ranks_are_left_alone(tree: TreeBuilder):
    """Law: agents of one tree do not write each other's files again."""
    for iteration in range(table_update.MAX_SMALL_FILES + 1):
        new = add(tree, iteration)
        for rank in (0, 1):
            update(tree.root, [each for each in new if each.rank == rank])
    of_first = [p for p in list_tensor_files(tree.root) if ".0-0." in p.name]
    assert len(of_first) == len(list_tensor_files(tree.root)) - len(of_first)
    assert rows(tree.root) == of_walk(tree.root)


class ChangingTree(LocalTree):
    """Lets something happen before each change of the tree."""

    def __init__(self, root: Path, happens: Callable[[str], None]) -> None:
        super().__init__(root)
        self._happens = happens

    def write(self, folder, name, fill, *, mark, guard) -> None:
        def guard_loudly(rename: Callable[[], None]) -> None:
            def rename_loudly() -> None:
                self._happens(f"rename {name.split('.')[0]}")
                rename()

            guard(rename_loudly)

        self._happens(f"write {name.split('.')[0]}")
        super().write(folder, name, fill, mark=mark, guard=guard_loudly)

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            self._happens("remove")
            super().remove([path])


def test_row_is_there_once_whenever_the_process_is_killed(tree: TreeBuilder):
    """Law: at any change of the tree, no row is lost and none is there twice."""
    first = add(tree, 0, 1)
    kept = of_walk(tree.root)
    points: list[str] = []
    for dies_at in range(20):
        update(tree.root, first)
        assert rows(tree.root) == kept
        tree.tensor(0, 1, f"{NAME}-{dies_at}", ARRAY)
        tree.complete(0, 1)
        seen = Counter[str]()

        def die(what: str, seen: Counter[str] = seen, dies_at: int = dies_at) -> None:
            seen[what] += 1
            points.append(what)
            if seen.total() > dies_at:
                raise KeyboardInterrupt

        try:
            update(tree.root, first, ChangingTree(tree.root, die))
        except KeyboardInterrupt:
            table = rows(tree.root)
            assert table in (kept, of_walk(tree.root))
            update(tree.root, first)
            assert rows(tree.root) == of_walk(tree.root)
            kept = of_walk(tree.root)
        else:
            break
    assert set(points) == {
        "write iterations",
        "write tensors",
        "rename iterations",
        "rename tensors",
        "remove",
    }


def test_kill_behind_the_rename_of_fewer_iterations_leaves_no_row_twice(tree: TreeBuilder):
    """The file that was replaced has iterations that the new one has not, and is found by them."""
    update(tree.root, add(tree, 0, 1, 2))
    gone = remove_iteration(tree, 0)

    def die(what: str) -> None:
        if what == "remove":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update(tree.root, gone, ChangingTree(tree.root, die))
    assert len([*(tree.root / TABLE_FOLDER).glob("tensors.*")]) == 2
    more = remove_iteration(tree, 2)  # which nobody has told the writer yet
    update(tree.root, gone)
    assert set(rows(tree.root).values()) == {1}
    update(tree.root, more)
    assert rows(tree.root) == of_walk(tree.root)
    assert len(list_tensor_files(tree.root)) == 1


def test_change_by_another_process_is_seen(tree: TreeBuilder):
    """Law: what `rankdump index` writes meanwhile is not written a second time."""
    changed = add(tree, 0)
    others = iter([True])

    def index_meanwhile(what: str) -> None:
        if what == "write tensors" and next(others, False):
            index_tree(tree.root)

    report = update(tree.root, changed, ChangingTree(tree.root, index_meanwhile))
    assert report.files == 0
    assert rows(tree.root) == of_walk(tree.root)


def test_table_that_is_locked_is_left_as_it_is(tree: TreeBuilder, monkeypatch):
    changed = add(tree, 0)
    monkeypatch.setattr(table_update, "_LOCK_PATIENCE_S", 0)
    with (
        lock_table(LocalTree(tree.root), patience_s=0),
        pytest.raises(UnavailableError, match="another process"),
    ):
        update(tree.root, changed)
    assert list_tensor_files(tree.root) == []


def test_unreadable_manifest_is_named_and_the_others_are_written(tree: TreeBuilder):
    changed = add(tree, 0)
    (tree.root / changed[0].path).write_bytes(b"{")
    report = update(tree.root, changed)
    assert report.rows == 2
    assert len(report.problems) == 1
    assert changed[0].path in report.problems[0]


def test_manifest_that_the_disk_does_not_give_loses_no_row(tree: TreeBuilder):
    """Law: its row, and those of the file that is written again, wait for the disk."""
    changed = add(tree, 0, 1)
    update(tree.root, changed)
    tree.tensor(0, 1, f"{NAME}-later", ARRAY)
    tree.complete(0, 1)
    before = rows(tree.root)

    class FailingTree(LocalTree):
        def read(self, folder: str, name: str) -> bytes:
            if f"{folder}/{name}" == changed[0].path:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(folder, name)

    with pytest.raises(OSError, match="Input/output"):
        update(tree.root, changed, FailingTree(tree.root))
    assert rows(tree.root) == before
    update(tree.root, changed)
    assert rows(tree.root) == of_walk(tree.root)


def test_damaged_file_of_the_table_is_named(tree: TreeBuilder):
    update(tree.root, add(tree, 0))
    (path,) = list_tensor_files(tree.root)
    path.write_bytes(b"PAR1")
    tree.tensor(0, 0, f"{NAME}-later", ARRAY)
    tree.complete(0, 0)
    report = update(tree.root, [each for each in manifests(tree.root) if each.rank == 0])
    assert "not a Parquet file" in report.problems[0]


def source(name: str, size: int = 1) -> TableSource:
    return TableSource(f"rank_0/.dump_metadata/manifest/{name}", size, 0)


X, Y, Z, V, W = map(source, "xyzvw")


def test_files_that_share_a_manifest_are_replaced_together():
    """Rows that an interrupted run of another version left twice are there once afterwards."""
    files = [
        TableFile("a", frozenset({X, Y})),
        TableFile("b", frozenset({X, Z})),
        TableFile("c", frozenset({V})),
    ]
    (step,) = plan_steps({X.path: X}, files, [])
    assert {file.name for file in step.replaces} == {"a", "b"}
    assert {*step.sources} == {X, Y, Z}
    assert plan_steps({V.path: V}, files, []) == []
    assert plan_steps({V.path: None, W.path: None}, files, []) == [TableStep((), (files[2],))]


def test_folders_that_an_earlier_version_walked_are_no_sources_any_more():
    """`rankdump index` looked at the folders of some trees beside their manifests."""
    walked = TableFile("a", frozenset({X, Y, TableSource("20260101000000/0", 1, 0)}))
    assert plan_steps({X.path: X}, [walked], []) == []
    changed = source("x", 2)
    (step,) = plan_steps({X.path: changed}, [walked], [])
    assert {*step.sources} == {changed, Y}
    assert step.replaces == (walked,)


def test_large_manifests_are_written_in_windows():
    new = [source(f"{n}", table_index.WINDOW_BYTES // 2) for n in range(5)]
    steps = plan_steps({each.path: each for each in new}, [], [])
    assert [len(step.sources) for step in steps] == [2, 2, 1]

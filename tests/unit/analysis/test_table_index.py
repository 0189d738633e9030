"""`rankdump index`: every row once, whatever was there before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support import golden_trees
from support.native_tree import native_files
from support.statistic_rows import count_table_rows as rows
from support.statistic_rows import count_walked_rows as of_walk
from support.tree_builder import TreeBuilder

import rankdump
from rankdump._analysis import table_index
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.table_files import (
    TABLE_FOLDER,
    TableSource,
    list_table,
    list_tensor_files,
    lock_table,
    remove_table_files,
    write_table_file,
)
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._analysis.table_index import TableLag, compare_with_tree, index_tree
from rankdump._analysis.table_update import ChangedManifest, update_table
from rankdump.errors import CorruptedError, UnavailableError

NAME = "Default/network-Net/fc-Linear/Linear-op0"
ARRAY = np.array([1.5, -2.0, 0.0], np.float32)


@pytest.fixture
def tree(tmp_path: Path) -> TreeBuilder:
    made = TreeBuilder(tmp_path / "tree")
    for iteration in range(3):
        add(made, iteration)
    return made


def add(tree: TreeBuilder, iteration: int) -> None:
    for rank in (0, 1):
        tree.tensor(rank, iteration, NAME, ARRAY * iteration, tabled=True)
        tree.row(rank, iteration, f"{NAME}{iteration}", ARRAY)
        tree.complete(rank, iteration)


def test_every_tensor_has_one_row(tree: TreeBuilder):
    report = index_tree(tree.root)
    assert (report.rows, report.files, report.problems) == (12, 1, [])
    assert rows(tree.root) == of_walk(tree.root)
    assert set(rows(tree.root).values()) == {1}
    assert compare_with_tree(tree.root) == TableLag(0, 0)
    assert str(compare_with_tree(tree.root)) == ""


def test_second_run_adds_what_is_new(tree: TreeBuilder):
    index_tree(tree.root)
    add(tree, 3)
    assert compare_with_tree(tree.root) == TableLag(2, 0)
    report = index_tree(tree.root)
    assert (report.rows, report.files, report.kept_files) == (4, 1, 1)
    assert rows(tree.root) == of_walk(tree.root)
    assert index_tree(tree.root).files == 0


def test_changed_manifest_is_read_again(tree: TreeBuilder):
    index_tree(tree.root)
    tree.tensor(0, 2, f"{NAME}-later", ARRAY)
    tree.complete(0, 2)
    index_tree(tree.root)
    assert rows(tree.root) == of_walk(tree.root)


def test_retired_iteration_has_no_rows(tree: TreeBuilder):
    index_tree(tree.root)
    for path in tree.root.rglob("iteration_1.*.json"):
        path.unlink()
    shutil.rmtree(tree.root / "rank_0/Net/0/1")
    shutil.rmtree(tree.root / "rank_1/Net/0/1")
    assert compare_with_tree(tree.root) == TableLag(0, 2)
    index_tree(tree.root)
    assert {row[1] for row in rows(tree.root)} == {"0", "2"}
    assert rows(tree.root) == of_walk(tree.root)


def test_windows_of_several_processes_have_every_row_once(tree: TreeBuilder, monkeypatch):
    monkeypatch.setattr(table_index, "WINDOW_BYTES", 840)
    seen: list[tuple[int, int]] = []
    report = index_tree(tree.root, processes=2, on_progress=lambda *at: seen.append(at))
    assert report.files == seen[-1][1] > 2
    assert rows(tree.root) == of_walk(tree.root)


def test_many_small_files_become_few(tree: TreeBuilder):
    for iteration in range(3, 3 + table_index.MAX_SMALL_FILES + 2):
        add(tree, iteration)
        index_tree(tree.root)
    assert len(list_tensor_files(tree.root)) <= table_index.MAX_SMALL_FILES
    assert rows(tree.root) == of_walk(tree.root)


def test_interrupted_run_is_continued(tree: TreeBuilder, monkeypatch):
    """Law: a run that ended at any window leaves whole files, and the next one writes the rest."""
    monkeypatch.setattr(table_index, "WINDOW_BYTES", 840)
    write, calls = table_index.write_window, []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return write(*args)

    monkeypatch.setattr(table_index, "write_window", interrupted)
    with pytest.raises(KeyboardInterrupt):
        index_tree(tree.root, processes=1)
    assert 0 < sum(rows(tree.root).values()) < 12
    monkeypatch.setattr(table_index, "write_window", write)
    index_tree(tree.root, processes=1)
    assert rows(tree.root) == of_walk(tree.root)


def test_damaged_file_is_made_again(tree: TreeBuilder):
    index_tree(tree.root)
    (path,) = list_tensor_files(tree.root)
    path.write_bytes(b"PAR1")
    report = index_tree(tree.root)
    assert len(report.problems) == 1
    assert str(path) in report.problems[0]
    assert rows(tree.root) == of_walk(tree.root)


def test_manifest_that_cannot_be_read_is_told_and_tried_again(tree: TreeBuilder):
    """Law: what failed once is not taken for indexed."""
    (path,) = (tree.root / "rank_1/.dump_metadata/manifest").glob("iteration_1.*")
    data = path.read_bytes()
    for _ in range(2):
        path.write_bytes(b"{")
        assert len(index_tree(tree.root).problems) == 1
    path.write_bytes(data)
    assert index_tree(tree.root).problems == []
    assert rows(tree.root) == of_walk(tree.root)


def test_remains_of_a_killed_run_are_removed(tree: TreeBuilder):
    """Law: rows of iterations are there once as well, before and after the next run."""
    index_tree(tree.root)
    (path,) = (tree.root / TABLE_FOLDER).glob("iterations.*")
    path.with_name("iterations.0-2.0-1.0123456789abcdef.parquet").write_bytes(path.read_bytes())
    draft = path.with_name(".table-12-tensors.0-2.0-1.0123456789abcdef.parquet.tmp")
    draft.write_bytes(b"PAR1")
    os.utime(draft, (0, 0))
    sql = "SELECT count(*) n FROM iterations"
    assert rankdump.open(tree.root).sql(sql).to_pylist() == [{"n": 6}]
    index_tree(tree.root)
    assert len([*(tree.root / TABLE_FOLDER).glob("*.parquet*")]) == 2
    assert not [*(tree.root / TABLE_FOLDER).glob(".*.tmp")]


def test_folder_that_looks_like_a_rank_is_left_out(tree: TreeBuilder):
    shutil.copytree(tree.root / "rank_0", tree.root / "rank_backup")
    assert index_tree(tree.root).rows == 12


def test_second_process_is_told_to_wait(tree: TreeBuilder, monkeypatch):
    monkeypatch.setattr(table_index, "_LOCK_PATIENCE_S", 0)
    with (
        lock_table(LocalTree(tree.root), patience_s=0),
        pytest.raises(UnavailableError, match="another process is indexing"),
    ):
        index_tree(tree.root)


def test_folder_without_a_dump_is_an_error(tmp_path: Path):
    with pytest.raises(CorruptedError, match="not a dump tree"):
        index_tree(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tree_of_mindspore_has_a_row_for_each_tensor(tmp_path: Path):
    for path, data in native_files():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(data)
    report = index_tree(tmp_path)
    tree = walk(tmp_path)
    assert report.rows == len(rankdump.open(tmp_path).table()) > 0
    assert not tree.manifests
    assert rows(tmp_path) == of_walk(tmp_path)
    assert index_tree(tmp_path).files == 0


@pytest.mark.parametrize("name", ["net", "arrays", "apis", "cann"])
def test_tree_of_an_earlier_version_has_its_rows(tmp_path: Path, name: str):
    root = golden_trees.restore(golden_trees.FOLDER / "tree-0.1.0" / name, tmp_path / name)
    report = index_tree(root)
    assert report.rows > 0
    assert report.problems == []
    assert rows(root) == of_walk(root)


def test_tree_of_two_layouts_has_every_row_once(tree: TreeBuilder):
    """Law: also where an agent wrote the rows of one of them."""
    paths = [path.relative_to(tree.root) for path in tree.root.rglob("iteration_*.json")]
    changed = [
        ChangedManifest(path.as_posix(), int(path.parts[0][5:]), int(path.name.split(".")[0][10:]))
        for path in paths
    ]
    update_table(LocalTree(tree.root), changed, now_s=0.0)
    folder = tree.root / "20260101000000/0/net/1/0"
    folder.mkdir(parents=True)
    np.save(folder / "MatMul.fc.0.0.1700000000000000.output.0.ND.npy", ARRAY)
    for _ in range(2):
        index_tree(tree.root)
        assert rows(tree.root) == of_walk(tree.root)
        assert compare_with_tree(tree.root) == TableLag(0, 0)


def test_table_with_folders_as_sources_is_made_again(tmp_path: Path):
    """Earlier versions looked at the folders of trees of CANN and of api dumps."""
    root = golden_trees.restore(golden_trees.FOLDER / "tree-0.1.0/cann", tmp_path / "cann")
    access = LocalTree(root)
    index_tree(root)
    (file,) = list_table(access, []).files
    tensors, iterations = (pq.read_table(root / path) for path in file.paths)
    remove_table_files(access, [file])
    walked = [*file.sources, TableSource("20260101000000/0", 1, 1)]
    write_table_file(access, tensors, iterations, walked)
    index_tree(root)
    assert list_table(access, []).files[0].sources == file.sources
    assert rows(root) == of_walk(root)


def test_rows_are_those_of_a_dump(tree: TreeBuilder):
    """Law: SQL over the files, over a dump in memory, and over a part of it agree."""
    sql = "SELECT rank, iteration, count(*) n, max(max) m FROM tensors GROUP BY ALL ORDER BY 1, 2"
    dump = rankdump.open(tree.root)
    before = dump.sql(sql).to_pylist()
    index_tree(tree.root)
    assert dump.sql(sql).to_pylist() == before
    assert dump.where(rank=1).sql(sql).to_pylist() == [row for row in before if row["rank"] == 1]
    assert len(dump.where(rank=1).table()) == 6


def test_table_becomes_a_data_frame(tree: TreeBuilder):
    dump = rankdump.open(tree.root)
    assert dump.pandas()["max"].max() == dump.polars()["max"].max() == 3.0
    assert [*dump.polars().columns] == [*dump.pandas().columns] == dump.table().column_names


def test_views_have_iterations_events_and_findings(tree: TreeBuilder):
    dump = rankdump.open(tree.root)
    index_tree(tree.root)
    sql = "SELECT rank, iteration, expected, stored FROM iterations ORDER BY ALL"
    assert dump.sql(sql).to_pylist()[0] == {"rank": 0, "iteration": 0, "expected": 2, "stored": 2}
    assert len(dump.sql("SELECT * FROM events")) == 0
    next(tree.root.rglob("*.npy*")).unlink()
    (row,) = rankdump.open(tree.root).sql("SELECT kind, text FROM findings").to_pylist()
    assert row["kind"] == "tree"
    assert "missing" in row["text"]

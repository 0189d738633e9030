"""Check of the table of statistics."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from support.tree_builder import TreeBuilder

from rankdump._analysis.fsck.damage import DamageKind
from rankdump._analysis.fsck.repair import repair_tree
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.table.table_files import TABLE_FOLDER, lock_table
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._analysis.table_index import index_tree
from rankdump._cli.command_group import run_command_line

ARRAY = np.arange(6, dtype=np.float32)


@pytest.fixture
def tree(tmp_path: Path) -> TreeBuilder:
    made = TreeBuilder(tmp_path / "tree")
    add(made, 0)
    index_tree(made.root)
    return made


def add(tree: TreeBuilder, iteration: int) -> None:
    for number in range(50):
        tree.tensor(0, iteration, f"Default/net-Net/{number}/X-op0", ARRAY + number)
    tree.complete(0, iteration, world_size=1)


def table_files(tree: TreeBuilder, kind: str = "tensors") -> list[Path]:
    return [*(tree.root / TABLE_FOLDER).glob(f"{kind}.*.parquet")]


def test_table_that_is_current_is_no_problem(tree: TreeBuilder):
    report = check_tree(tree.root, workers=1)
    assert (report.damages, report.table) == ((), ())


def test_table_behind_the_tree_is_a_line_and_no_damage(tree: TreeBuilder, capsys):
    add(tree, 1)
    assert run_command_line(["fsck", str(tree.root)]) == 0
    assert "the table lacks 1 new or changed file: run rankdump index" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["tensors", "iterations"])
def test_damaged_page_is_found_and_repaired(tree: TreeBuilder, kind: str):
    (path,) = table_files(tree, kind)
    name = "name" if kind == "tensors" else "session"
    meta = pq.read_metadata(path)
    column = meta.row_group(0).column(meta.schema.names.index(name))
    data = bytearray(path.read_bytes())
    data[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(data)
    report = check_tree(tree.root, workers=1)
    (damage,) = report.damages
    assert (damage.kind, damage.path) == (
        DamageKind.TORN,
        path.relative_to(tree.root).as_posix(),
    )
    assert "rankdump index" in damage.text
    os.utime(path, (0, 0))
    left = repair_tree(tree.root, report)
    assert (left.damages, left.mended) == ((), (damage,))


def test_file_that_is_no_table_is_found(tree: TreeBuilder):
    (path,) = table_files(tree)
    path.write_bytes(b"PAR1 no")
    report = check_tree(tree.root, workers=1)
    assert [(each.kind, each.path) for each in report.damages] == [
        (DamageKind.TORN, path.relative_to(tree.root).as_posix())
    ]
    assert report.damages[0].text.startswith("not a Parquet file")


def test_remains_of_a_killed_writer_are_leftovers(tree: TreeBuilder):
    folder = tree.root / TABLE_FOLDER
    draft = folder / ".table-12-tensors.0-0.0-0.parquet.tmp"
    draft.write_bytes(b"PAR1")
    orphan = folder / "iterations.7-7.0-0.0123456789abcdef.parquet"
    orphan.write_bytes(table_files(tree, "iterations")[0].read_bytes())
    for path in (draft, orphan):
        os.utime(path, (0, 0))
    report = check_tree(tree.root, workers=1)
    assert {each.kind for each in report.damages} == {DamageKind.LEFTOVER}
    assert repair_tree(tree.root, report).damages == ()
    assert not draft.exists()
    assert not orphan.exists()
    assert len(table_files(tree)) == 1


def test_files_of_a_running_writer_are_no_leftovers(tree: TreeBuilder):
    orphan = tree.root / TABLE_FOLDER / "iterations.7-7.0-0.0123456789abcdef.parquet"
    orphan.write_bytes(b"")
    with lock_table(LocalTree(tree.root), patience_s=0):
        assert check_tree(tree.root, workers=1).damages == ()


def test_table_that_cannot_be_checked_is_a_line(tree: TreeBuilder, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rankdump._analysis.table")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    report = check_tree(tree.root, workers=1)
    assert report.damages == ()
    assert "pip install 'rankdump[table]'" in report.table[0]

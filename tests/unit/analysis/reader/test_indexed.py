"""Readers answer the same with and without the table of a tree, also where it is behind the tree or
has rows of what was removed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import golden_trees
from support.reader_answers import answer, assert_same_answers, use_small_tables
from support.tree_builder import TreeBuilder

from rankdump._analysis.reader import tree_usage
from rankdump._analysis.reader.indexed_manifests import (
    find_indexed_files,
    find_indexed_manifests,
)
from rankdump._analysis.reader.manifests import ManifestFileName
from rankdump._analysis.table_index import index_tree
from rankdump._layout.tree_paths import MANIFEST_FOLDER

SHARED = Path(__file__).parents[5] / "shared" / "golden"
FOREIGN = [*sorted(SHARED.glob("mindspore/*")), *sorted(SHARED.glob("troubleshooter/1*"))]
NAME = "Default/network-Net/fc-Linear/Linear-op"


@pytest.fixture(autouse=True)
def _quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is used for small trees too, and the disk does not change between two answers."""
    use_small_tables(monkeypatch)


def rows_tree(root: Path) -> Path:
    """Rows alone, in all but the first iteration; one tensor of the third is not finite."""
    tree = TreeBuilder(root)
    for rank in (0, 1):
        for iteration in range(6):
            for number in range(4):
                values = np.arange(1, 5, dtype=np.float32) * (number + iteration)
                if (rank, iteration, number) == (1, 3, 2):
                    values[1] = np.nan
                tree.row(rank, iteration, f"{NAME}{number}", values)
            if not iteration:
                tree.tensor(rank, 0, f"{NAME}9", np.ones(3, np.float32), tabled=True)
                tree.tensor(rank, 0, "mask", np.eye(2), op_type="Parameter", constant=True)
            tree.complete(rank, iteration)
    return root


def make_tree(name: str, folder: Path) -> Path:
    target = folder / "tree"
    if name == "rows":
        rows_tree(target)
    elif name in ("net", "arrays", "apis", "cann"):
        golden_trees.restore(golden_trees.FOLDER / "tree-0.1.0" / name, target)
    else:
        shutil.copytree(SHARED / name, target)
    # A copy does not keep that an agent writes manifests last.
    for path in manifests(target):
        os.utime(path)
    return target


def manifests(root: Path) -> list[Path]:
    return sorted(root.glob(f"rank*/{MANIFEST_FOLDER}/*.json"))


@pytest.mark.parametrize(
    "name",
    ["rows", "net", "arrays", "apis", "cann"]
    + [path.relative_to(SHARED).as_posix() for path in FOREIGN],
)
def test_answers_are_those_without_the_table(tmp_path: Path, name: str):
    root = make_tree(name, tmp_path)
    index_tree(root)
    is_used = name in ("rows", "net", "arrays", "apis", "cann")
    assert bool(find_indexed_files(root)) == is_used
    assert_same_answers(root)


def test_table_of_the_current_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Paths below it begin with no dot."""
    root = make_tree("rows", tmp_path)
    monkeypatch.chdir(root)
    index_tree(Path())
    placed = [ManifestFileName(path, 0, ("rank_0", ""), 0) for path in manifests(Path())]
    assert len(find_indexed_manifests(Path(), placed)) == len(placed) > 0
    assert len(find_indexed_files(root)) == len(find_indexed_files(Path())) == 1


@pytest.mark.parametrize("name", ["rows", "net"])
def test_answers_are_those_of_a_tree_that_the_table_is_behind(tmp_path: Path, name: str):
    """Half of the manifests came later, one was changed since, and one was removed."""
    root = make_tree(name, tmp_path)
    late = manifests(root)[1::2]
    for path in late:
        path.rename(path.with_suffix(".late"))
    index_tree(root)
    for path in late:
        path.with_suffix(".late").rename(path)
    known = [path for path in manifests(root) if path not in late]
    known[0].write_bytes(known[0].read_bytes().replace(b'"host": "', b'"host": "other '))
    known[1].unlink()
    kept = [path for path in known[2:] if path.exists()]
    placed = [ManifestFileName(path, 0, ("rank_0", ""), 0) for path in manifests(root)]
    assert find_indexed_manifests(root, placed) == {str(path) for path in kept}
    assert_same_answers(root)


def test_place_with_two_manifests_is_not_answered_by_the_table(tmp_path: Path):
    """Rows do not name their session."""
    tree = TreeBuilder(tmp_path / "tree")
    tree.row(0, 0, NAME, np.ones(3, np.float32))
    tree.complete(0, 0)
    index_tree(tree.root)
    assert [[*file.manifests] for file in find_indexed_files(tree.root)] == [[(0, 0)]]
    tree.complete(0, 0, session="another")
    assert find_indexed_files(tree.root) == []


@pytest.mark.parametrize("damage", ["cut", "removed", "foreign", "texts"])
def test_file_of_the_table_that_cannot_be_read_is_left_out(
    tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
):
    """Also one that was replaced after the table was listed, or has rows of other places."""
    root = make_tree("rows", tmp_path)
    index_tree(root)
    expected = dict(answer(root))
    listed = find_indexed_files(root)
    monkeypatch.setattr(tree_usage, "find_indexed_files", lambda _: listed)
    for path in (listed[0].tensors, listed[0].iterations):
        if damage == "cut":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        elif damage == "removed":
            path.unlink()
        else:
            rows = pq.read_table(path)
            at = rows.schema.get_field_index("rank")
            rank = 7 if damage == "foreign" else "no number"
            ranks = pa.array([rank] * len(rows))
            pq.write_table(rows.set_column(at, "rank", ranks), path)
    assert dict(answer(root)) == expected


def test_forecast_counts_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each iteration has its share of the bytes; the files become no more."""
    monkeypatch.undo()
    root = make_tree("rows", tmp_path)
    without = tree_usage.observe(root)
    index_tree(root)
    files = list((root / ".rankdump/table").glob("*.parquet"))
    share = sum(path.stat().st_size for path in files) // 6
    found = tree_usage.observe(root)
    assert share > 1000
    assert found.per_iteration.bytes_stored == without.per_iteration.bytes_stored + share
    assert found.per_iteration.disk_bytes == without.per_iteration.disk_bytes + share
    assert found.per_job.files == without.per_job.files + len(files) == without.per_job.files + 2


def test_forecast_counts_files_of_fingerprints(tmp_path: Path):
    """One for each iteration of a rank, beside the manifest."""
    sizes: list[tuple[int, int]] = []
    for fingerprints in (False, True):
        tree = TreeBuilder(tmp_path / str(fingerprints), fingerprints=fingerprints)
        for iteration in range(2):
            tree.tensor(0, iteration, "Default/a-op0", np.ones(4, np.float32))
            tree.complete(0, iteration)
        found = tree_usage.observe(tree.root).per_iteration
        sizes.append((found.files, found.bytes_stored))
    (file,) = tree.root.glob("rank_0/.dump_metadata/fingerprint/iteration_1.*")
    (files, plain), (more_files, more) = sizes
    assert more_files == files + 1
    assert more - plain - file.stat().st_size in range(40, 100)  # the seal in the manifest

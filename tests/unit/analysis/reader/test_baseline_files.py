"""Tensors that are the same in a baseline are read there, and only if they still are."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.baseline_trees import write_same_tree
from support.command_line import run_in_process
from support.tree_builder import TreeBuilder

from rankdump import reader
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._analysis.reader.baseline_files import find_baseline_file, find_tensor_file
from rankdump.errors import CorruptedError

NAMES = ("Default/a/MatMul-op0", "Default/b/MatMul-op1")
ARRAY = np.arange(64, dtype=np.float32)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """A tree of two operators in two iterations."""
    tree = TreeBuilder(tmp_path / "first")
    for iteration in (0, 1):
        for number, name in enumerate(NAMES):
            tree.tensor(0, iteration, name, ARRAY + number + iteration)
        tree.complete(0, iteration, world_size=1)
    return tmp_path / "first"


@pytest.fixture
def second(first: Path) -> Path:
    """A tree without a file of its own."""
    return write_same_tree(first, first.with_name("second"))


def test_tensors_are_listed_and_loaded(first: Path, second: Path):
    """All of them, also one iteration alone, and through every way to open a tree."""
    tree = reader.walk(second)
    assert (len(tree.entries), tree.problems, reader.damaged(tree)) == (4, (), False)
    for entry, other in zip(tree.entries, reader.walk(first).entries, strict=True):
        assert find_tensor_file(entry) == other.path
        assert np.array_equal(reader.load(entry), reader.load(other))
        with reader.opened(entry) as opened:
            assert isinstance(opened, np.ndarray)
            assert np.array_equal(opened, reader.load(other))
    dump = reader.open(second)
    _, later = dump.tensors(iteration=1)
    assert later.is_same_as_baseline
    assert dump.load(later.key).tolist() == (ARRAY + 2).tolist()
    assert tree.entries.baselines == [str(first)]


def test_path_without_a_file_is_located(second: Path):
    """Of a path that no manifest names nothing is found."""
    entry = reader.walk(second).entries[3]
    assert reader.locate(entry.path) == (entry,)
    assert reader.locate(entry.path.with_name("another.npy")) == ()


def test_baseline_is_found_beside_the_dump(first: Path, second: Path, tmp_path: Path):
    """Both trees may be copied, as long as they stay neighbours and keep their names."""
    elsewhere = tmp_path / "host"
    for tree in (first, second):
        shutil.move(tree, elsewhere / tree.name)
    entry = reader.walk(elsewhere / "second").entries[0]
    assert find_tensor_file(entry).is_relative_to(elsewhere / "first")
    assert reader.load(entry).tolist() == ARRAY.tolist()


def test_missing_baseline_is_a_finding_and_no_damage(first: Path, second: Path):
    """Digests are left, by which tensors are compared; elements are not."""
    shutil.rmtree(first)
    tree = reader.walk(second)
    assert not reader.damaged(tree)
    (finding,) = [each for each in reader.findings(tree) if "baseline" in each]
    assert finding.startswith(f"baseline {first} cannot be found")
    with pytest.raises(CorruptedError, match="its elements are in the baseline"):
        reader.load(tree.entries[0])
    report = check_tree(second, workers=1)
    assert not report.damages
    assert "where 4 files cannot be found" in report.unchecked[0]
    done = run_in_process("diff", second, second)
    assert (done.returncode, "4 same" in done.stdout) == (0, True), done.stdout
    assert run_in_process("stats", second).returncode == 0


@pytest.mark.parametrize(
    "same_as", ["../first/x.npy", "/etc/passwd", "a/../../x", "rank_0", "a\0b"]
)
def test_path_that_leaves_the_baseline_is_no_file(second: Path, same_as: str):
    """A manifest cannot make a reader open any other file, nor a folder."""
    (second.parent / "x.npy").touch()
    record = reader.walk(second).entries[0].record
    assert record is not None
    assert find_baseline_file(second, record._replace(same_as=same_as)) is None


def test_link_in_a_baseline_is_no_file(first: Path, second: Path):
    """Readers of a baseline follow no link to a tensor."""
    entry = reader.walk(second).entries[0]
    path = find_tensor_file(entry)
    path.rename(first / "moved.npy")
    path.symlink_to(first / "moved.npy")
    with pytest.raises(CorruptedError, match="is not there"):
        reader.load(entry)


def test_commands_show_where_the_elements_are(first: Path, second: Path):
    """`ls`, `show`, `status`, `fsck` and `diff` of a tree without files."""
    listed = run_in_process("ls", second)
    assert listed.returncode == 0
    assert "in baseline" in listed.stdout
    assert "4 tensors in the baseline" in listed.stdout
    entry = reader.walk(second).entries[0]
    shown = run_in_process("show", entry.path)
    assert shown.returncode == 0, shown.stderr
    assert f"file:         {find_tensor_file(entry)}" in shown.stdout
    assert run_in_process("show", second / "none.npy").returncode == 2
    status = run_in_process("status", second).stdout
    assert "rank 0: 4 linked tensors without a file: the same as in the baseline" in status
    checked = run_in_process("fsck", second)
    assert f"the elements of 4 tensors are in the baseline {first}" in checked.stdout
    assert checked.returncode == 0
    compared = run_in_process("diff", second, first)
    assert (compared.returncode, "4 same" in compared.stdout) == (0, True)

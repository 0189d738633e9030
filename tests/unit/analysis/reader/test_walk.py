from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from rankdump._analysis.fsck.damage import DamageKind
from rankdump._analysis.fsck.tree_check import check_tree
from rankdump._cli.command_group import run_command_line
from rankdump._core.record import TensorSide
from rankdump.errors import CorruptedError
from rankdump.reader import load, locate, ranges, walk

ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([0, 1, 2, 3], "0-3"),
        ([7, 0, 2, 1, 9, 2], "0-2,7,9"),
        ([0, 2, 4], "0,2,4"),
    ],
)
def test_ranges_joins_consecutive_numbers(numbers, text):
    """Runs are joined, whatever the order and the repetitions."""
    assert ranges(numbers) == text


def test_walk_sorts_entries_by_rank_iteration_and_time(tree):
    """The walk's order is the job's order, not that of file names."""
    tree.tensor(10, 0, "Default/a-Z/Z-op0", ONES)
    tree.tensor(2, 10, "Default/b-A/A-op1", ONES)
    tree.tensor(2, 9, "Default/c-Z/Z-op0", ONES)
    tree.tensor(2, 9, "Default/c-A/A-op0", ONES, side=TensorSide.INPUT)
    found = walk(tree.root)
    assert [(e.key.rank, e.key.iteration, e.key.op_type) for e in found.entries] == [
        (2, 9, "Z"),
        (2, 9, "A"),
        (2, 10, "A"),
        (10, 0, "Z"),
    ]
    assert found.ranks == (2, 10)
    assert found.problems == ()


def test_walk_takes_raw_names_and_types_from_manifests(tree):
    """What a file name cannot say comes from the manifest."""
    tree.tensor(0, 0, "Default/network-Net/fc.1/MatMul-op3", ONES, dtype="bfloat16")
    tree.complete(0, 0)
    (entry,) = walk(tree.root).entries
    assert entry.op_name == "Default/network-Net/fc.1/MatMul-op3"
    assert entry.key.op_name == "Default_network-Net_fc_1_MatMul-op3"
    assert entry.record is not None
    assert entry.record.dtype == "bfloat16"
    assert entry.codec == "zstd"


def test_walk_resolves_long_names(tree):
    """A file that carries a number has the key of its full name."""
    name = "Default/" + "/".join(f"layer{n}-Block" for n in range(60)) + "/MatMul-op1"
    path = tree.tensor(0, 0, name, ONES)
    assert path.name[0].isdigit()
    (entry,) = walk(tree.root).entries
    assert entry.key.op_name == name.replace("/", "_")
    np.testing.assert_array_equal(load(entry), ONES)
    (again,) = locate(path)
    assert again.key == entry.key


@pytest.mark.parametrize("complete", [False, True])
def test_long_name_without_its_file_is_reported_once(tree, capsys, complete):
    """By whoever knows the tree best: a dropped tensor has its row in `mapping.csv` as well."""
    name = "Default/" + "/".join(f"layer{n}-Block" for n in range(60))
    kept = tree.tensor(0, 0, f"{name}/MatMul-op1", ONES, codec="none")
    gone = tree.tensor(0, 0, f"{name}/MatMul-op2", ONES, codec="none")
    if complete:
        tree.complete(0, 0, world_size=1)
    assert run_command_line(["ls", str(tree.root)]) == 0
    gone.unlink()
    (problem,) = walk(tree.root).problems
    by = "a manifest" if complete else "mapping.csv"
    assert problem == f"{gone.relative_to(tree.root)}: named by {by}, but missing"
    assert run_command_line(["ls", str(tree.root)]) == 1
    said = capsys.readouterr()
    assert (said.out + said.err).count(problem) == 1
    (damage,) = [each for each in check_tree(tree.root, workers=1).damages if "/Net/" in each.path]
    assert (damage.kind, damage.path) == (DamageKind.MISSING, str(gone.relative_to(tree.root)))
    assert locate(kept)[0].op_name


def test_walk_counts_foreign_files(tree):
    """Half-written and foreign files never become entries; only foreign ones are counted."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    (path.parent / ".half.npy.tmp").write_bytes(b"x")
    (path.parent / "notes.txt").write_bytes(b"x")
    (path.parent / "Some.name.0.0.12.sideways.0.DefaultFormat.npy").write_bytes(b"x")
    (path.parent / path.name.replace("op0", "op1")).mkdir()
    (path.parents[1] / "not_a_number").mkdir()
    (tree.root / "rank_x").mkdir()
    (tree.root / "global_execution_order").mkdir()
    found = walk(tree.root)
    assert [entry.path for entry in found.entries] == [path]
    assert found.foreign == 4
    assert found.ranks == (0,)


def test_walk_reports_damage_and_continues(tree):
    """An unreadable manifest and a file that is gone are problems; everything else is found."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    gone = tree.tensor(0, 0, "Default/b-B/B-op0", ONES)
    tree.complete(0, 0)
    tree.tensor(0, 1, "Default/a-A/A-op0", ONES)
    tree.complete(0, 1)
    gone.unlink()
    folder = tree.root / "rank_0/.dump_metadata/manifest"
    next(folder.glob("iteration_1.*")).write_bytes(b"{")
    found = walk(tree.root)
    assert len(found.entries) == 2
    assert len(found.problems) == 2
    assert any("iteration_1" in problem for problem in found.problems)
    assert any(gone.name in problem and "but missing" in problem for problem in found.problems)


def test_walk_finds_size_mismatches_without_opening_files(tree):
    """What a full disk or a broken copy cut short is found by the listing alone."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    whole = tree.tensor(0, 0, "Default/b-B/B-op0", ONES)
    tree.complete(0, 0)
    assert walk(tree.root).problems == ()
    path.write_bytes(path.read_bytes()[:-1])
    (problem,) = walk(tree.root).problems
    assert path.name in problem
    assert f"its manifest has {whole.stat().st_size}" in problem


def test_walk_of_a_missing_folder_is_a_problem(tmp_path: Path):
    """A folder that is not there gives an empty tree that says so."""
    found = walk(tmp_path / "nowhere")
    assert found.entries == ()
    assert "cannot be read" in found.problems[0]


def test_locate_outside_a_tree_is_empty(tree, tmp_path):
    """A file that merely looks like a tensor has no entry."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    copy = tmp_path / path.name
    shutil.copy(path, copy)
    assert locate(copy) == ()
    assert locate(tmp_path / "absent.npy") == ()


def test_locate_accepts_a_relative_path(tree, monkeypatch):
    """A relative path finds the same entry, with its record."""
    path = tree.tensor(1, 4, "Default/a-A/A-op0", ONES)
    tree.complete(1, 4)
    monkeypatch.chdir(path.parent)
    (entry,) = locate(Path(path.name))
    assert (entry.root, entry.key.rank, entry.key.iteration) == (tree.root, 1, 4)
    assert entry.record is not None


def test_walk_ends_in_loops_of_links(tree):
    """A link to the tree itself is not followed into it for ever."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    (tree.root / "rank_7").symlink_to(tree.root)
    found = walk(tree.root)
    assert len(found.entries) == 1
    assert found.ranks == (0, 7)


@pytest.mark.parametrize("name", ["rank_1", "rank_0/Net2", "rank_0/Net/9", "rank_0/Net/0/9"])
def test_walk_ignores_a_link_to_itself(tree, name):
    """Whatever such a link stands for, everything else is found."""
    tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    (tree.root / name).symlink_to(Path(name).name)
    found = walk(tree.root)
    assert len(found.entries) == 1
    assert found.ranks == (0,)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "values",
    [
        np.arange(12, dtype=np.int64).reshape(3, 4),
        np.array(2.5, np.float32),
        np.empty((0, 3), np.float16),
        np.array([True, False]),
    ],
    ids=["int64", "scalar", "empty", "bool"],
)
def test_load_returns_the_original_elements(tree, codec, values):
    """What went in comes out, by either codec, with and without a manifest."""
    tree.tensor(0, 0, "Default/a-A/A-op0", values, codec=codec)
    for complete in (False, True):
        if complete:
            tree.complete(0, 0)
        (entry,) = walk(tree.root).entries
        tensor = load(entry)
        assert tensor.dtype == values.dtype
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor, values)


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda data: data[:-3], id="truncated"),
        pytest.param(lambda data: b"", id="emptied"),
        pytest.param(lambda data: data[:5] + b"\xff" + data[6:], id="flipped"),
        pytest.param(lambda data: data.replace(b"<f4", b"<f3"), id="odd type"),
    ],
)
def test_load_of_a_damaged_file_raises_corrupted_error(tree, codec, damage):
    """Whatever is wrong with a file, the error names it; only a changed file may raise."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, codec=codec)
    whole = path.read_bytes()
    changed = damage(whole)
    path.write_bytes(changed)
    (entry,) = walk(tree.root).entries
    if changed == whole:
        np.testing.assert_array_equal(load(entry), ONES)
    else:
        with pytest.raises(CorruptedError, match=r"A-op0.*npy"):
            load(entry)


def test_load_bounds_the_size_by_the_manifest(tree):
    """A manifest bounds what its file may unpack to: no frame can fill the memory."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES)
    tree.complete(0, 0)
    bomb = tree.tensor(1, 0, "Default/a-A/A-op0", np.zeros(1 << 20, np.float32))
    path.write_bytes(bomb.read_bytes())
    (entry, _) = walk(tree.root).entries
    with pytest.raises(CorruptedError, match="at most"):
        load(entry)


def test_load_rejects_another_shape_than_the_manifest(tree):
    """A tensor swapped for another one does not pass as the one named."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, codec="none")
    tree.complete(0, 0)
    other = tree.tensor(0, 1, "Default/a-A/A-op0", ONES.reshape(3, 2), codec="none")
    path.write_bytes(other.read_bytes())
    with pytest.raises(CorruptedError, match=r"\(3, 2\).*\(2, 3\)"):
        load(walk(tree.root).entries[0])


def test_load_never_unpickles(tree):
    """A pickle in an npy file is damage, not code to run."""
    path = tree.tensor(0, 0, "Default/a-A/A-op0", ONES, codec="none")
    with path.open("wb") as file:
        np.save(file, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(CorruptedError):
        load(walk(tree.root).entries[0])

"""Rows of the tensor table: the same from manifests and from the tensors of a walk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from support.tree_builder import TreeBuilder

from rankdump._analysis.reader.manifest_columns import read_manifest_columns
from rankdump._analysis.reader.tensor_columns import (
    make_columns_of_manifests,
    make_columns_of_tree,
)
from rankdump._analysis.reader.tree_walk import walk
from rankdump._analysis.table.tree_access import LocalTree
from rankdump._core.record import TensorSide
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
)

NAME = "Default/network-Net/fc-Linear/Linear-op0"
LONG = "Default/" + "a-A/" * 90 + "ReLU-op0"
ARRAY = np.array([1.5, -2.0, 0.0, np.nan], np.float32)


def of_manifests(root: Path) -> tuple[pa.Table, list[str]]:
    problems: list[str] = []
    paths = sorted(
        path.relative_to(root).as_posix() for path in root.rglob(".dump_metadata/manifest/*.json")
    )
    access = LocalTree(root)
    read = read_manifest_columns(access, paths, problems)
    return make_columns_of_manifests(access, read, problems), problems


def of_walk(root: Path) -> tuple[pa.Table, list[str]]:
    problems: list[str] = []
    return make_columns_of_tree(walk(root), problems), problems


def plain(table: pa.Table) -> list[dict[str, Any]]:
    """Rows that can be compared: NaN is equal to itself."""
    rows = table.to_pylist()
    rows.sort(key=lambda row: (row["rank"], row["timestamp_us"], row["side"] or "", row["slot"]))
    return [{name: repr(value) for name, value in row.items()} for row in rows]


def checked(tree: TreeBuilder) -> list[dict[str, Any]]:
    """Return the rows of a tree, which are the same by both ways."""
    fast, problems = of_manifests(tree.root)
    slow, others = of_walk(tree.root)
    assert (problems, others) == ([], [])
    assert plain(fast) == plain(slow)
    return fast.to_pylist()


def tensors(tree: TreeBuilder) -> None:
    tree.tensor(0, 3, NAME, ARRAY, side=TensorSide.INPUT, slot=2)
    tree.tensor(0, 3, NAME, ARRAY, dtype="bfloat16")


def full(tree: TreeBuilder) -> None:
    for at in range(3):
        tree.tensor(0, 3, NAME, ARRAY * at, tabled=True, side=TensorSide.INPUT, slot=at)


def statistics_only(tree: TreeBuilder) -> None:
    for at in range(3):
        tree.row(0, 3, NAME, ARRAY * at, side=TensorSide.INPUT, slot=at)


def long_names(tree: TreeBuilder) -> None:
    tree.tensor(0, 3, LONG, ARRAY, slot=4)


def names_to_quote(tree: TreeBuilder) -> None:
    for name in ('a"b', "a'; DROP TABLE x; --", "<b>&amp;</b>", "naïve/Δ", "a, b", "\x01"):
        tree.tensor(0, 3, f"Default/{name}-op0", ARRAY, op_type="Op", tabled=True)


def constants(tree: TreeBuilder) -> None:
    tree.tensor(0, 3, NAME, ARRAY)
    tree.tensor(0, 3, NAME, ARRAY, constant=True, op_type="Parameter")


def parallel(tree: TreeBuilder) -> None:
    mesh = RankMesh("", ("dp",), (2,), 0, (1,))
    shard = (MeshPlacement(PlacementKind.SHARD, 0),)
    placed = TensorLayout(LayoutSource.DTENSOR, (8,), (0,), mesh, (0,), shard)
    for at in range(2):
        tree.tensor(0, 3, NAME, ARRAY, microbatch=at, phase="eval")
    tree.tensor(0, 3, NAME, ARRAY, tensor_layout=placed)


def packed_and_links(tree: TreeBuilder) -> None:
    tree.tensor(0, 3, NAME, ARRAY, codec="none")
    tree.tensor(0, 3, NAME, ARRAY, argument="kwargs.x")


def all_items(tree: TreeBuilder) -> None:
    tree.items = ("max", "min", "avg", "count", "negative zero count", "positive zero count",
                  "nan count", "negative inf count", "positive inf count", "zero count", "md5",
                  "l2norm")  # fmt: skip
    tree.tensor(0, 3, NAME, ARRAY, tabled=True)
    tree.tensor(0, 3, NAME, np.array([True, False]), tabled=True)
    tree.tensor(0, 3, NAME, np.zeros((0, 3), np.int64), tabled=True)


@pytest.mark.parametrize(
    "fill",
    [tensors, full, statistics_only, long_names, names_to_quote, constants, packed_and_links,
     all_items],
)  # fmt: skip
def test_rows_are_the_same_by_both_ways(tree: TreeBuilder, fill):
    fill(tree)
    tree.complete(0, 3)
    tree.tensor(1, 3, NAME, ARRAY)
    tree.complete(1, 3)
    assert len(checked(tree)) == sum(map(len, tree.records.values()))


def test_row_has_statistics_beside_the_record(tree: TreeBuilder):
    tree.tensor(0, 3, NAME, ARRAY[:3], tabled=True, side=TensorSide.INPUT, slot=2, microbatch=1)
    tree.complete(0, 3)
    (row,) = checked(tree)
    expected = {
        "job": "job",
        "attempt": 0,
        "rank": 0,
        "iteration": 3,
        "microbatch": 1,
        "position": 0,
        "name": NAME,
        "op_type": "Linear",
        "side": "input",
        "slot": 2,
        "dtype": "float32",
        "shape": [3],
        "bytes": 12,
        "max": 1.5,
        "min": -2.0,
        "l2norm": 2.5,
        "nan_count": None,
        "fingerprint": None,
        "sketch": None,
    }
    assert {name: row[name] for name in expected} == expected


def fingerprinted(tree: TreeBuilder) -> None:
    """Two iterations of rank 0 and one of rank 1, in which every other tensor has a fingerprint."""
    parallel(tree)
    tree.fingerprints = True
    full(tree)
    names_to_quote(tree)
    constants(tree)
    parallel(tree)
    tree.complete(0, 3)
    statistics_only(tree)
    tree.row(0, 4, NAME, ARRAY)
    tree.complete(0, 4)
    tree.tensor(1, 3, NAME, ARRAY)
    tree.complete(1, 3)


def test_row_has_the_fingerprint_of_its_record(tree: TreeBuilder):
    fingerprinted(tree)
    rows = checked(tree)
    expected = {
        tree.records[place][number].timestamp_us: fingerprint
        for place, listed in tree.prints.items()
        for number, fingerprint in listed
    }
    found = {
        row["timestamp_us"]: row["fingerprint"].to_bytes(8, "little")
        + np.array(row["sketch"], "<f4").tobytes()
        for row in rows
        if row["sketch"] is not None
    }
    assert found == {stamp: each for stamp, each in expected.items() if stamp in found}
    assert len(found) == len(expected) - 3  # rows of iteration 3 came after its manifest
    assert sum(row["fingerprint"] is None for row in rows) == 3


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "cannot be read: No such file or directory"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes, but its manifest has"),
        (lambda file: file.write_bytes(bytes(file.stat().st_size)), "its digest is"),
    ],
)
def test_damaged_file_of_fingerprints_is_one_problem(tree: TreeBuilder, damage, words):
    """The rows of its manifest have no fingerprint then, and all else."""
    fingerprinted(tree)
    (file,) = tree.root.glob("rank_0/.dump_metadata/fingerprint/iteration_3.*.npy")
    before = of_manifests(tree.root)[0]
    damage(file)
    for table, problems in (of_manifests(tree.root), of_walk(tree.root)):
        (problem,) = problems
        assert problem.startswith(str(file))
        assert words in problem
        assert len(table) == len(before)
        kept = [row["iteration"] for row in table.to_pylist() if row["fingerprint"] is not None]
        assert kept.count(3) == 1  # of rank 1
        assert kept.count(4) == 1


def test_position_counts_in_the_order_of_execution(tree: TreeBuilder):
    for rank in (1, 0):
        for iteration in (0, 1):
            for at in range(3):
                tree.tensor(rank, iteration, f"{NAME}{at}", ARRAY)
            tree.complete(rank, iteration)
    rows = checked(tree)
    for row in rows:
        assert row["name"] == f"{NAME}{row['position']}"


def test_constant_has_no_iteration(tree: TreeBuilder):
    constants(tree)
    tree.complete(0, 3)
    assert sorted(str(row["iteration"]) for row in checked(tree)) == ["3", "None"]


def test_model_that_is_called_constants_has_iterations(tree: TreeBuilder):
    tree.tensor(0, 3, NAME, ARRAY)
    tree.complete(0, 3)
    (tree.root / "rank_0/Net").rename(tree.root / "rank_0/constants")
    (manifest,) = (tree.root / "rank_0/.dump_metadata/manifest").iterdir()
    text = manifest.read_bytes().partition(b', "crc32"')[0] + b"}"
    manifest.write_bytes(text.replace(b"rank_0/Net/", b"rank_0/constants/"))
    assert [row["iteration"] for row in checked(tree)] == [3]


def test_name_that_is_no_text_is_kept_as_far_as_possible(tree: TreeBuilder):
    tree.tensor(0, 3, "Default/\udc80-op0", ARRAY, op_type="Op")
    tree.tensor(0, 3, NAME, ARRAY)
    tree.complete(0, 3)
    table, problems = of_manifests(tree.root)
    assert problems == []
    assert table.column("name").to_pylist() == ["Default/?-op0", NAME]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data.replace(b"float32", b"float64"), "its checksum is wrong"),
        (lambda data: data[: len(data) // 2], "cannot be read"),
        (lambda data: b"", "cannot be read"),
        (lambda data: data.partition(b', "crc32"')[0].replace(b"[4]", b'"x"') + b"}", "manifest"),
    ],
)
def test_damaged_manifest_is_one_problem(tree: TreeBuilder, damage, words):
    """Law: the rows of the others are there."""
    for rank in (0, 1):
        tree.tensor(rank, 3, NAME, ARRAY)
        tree.complete(rank, 3)
    (path,) = (tree.root / "rank_0/.dump_metadata/manifest").iterdir()
    path.write_bytes(damage(path.read_bytes()))
    table, problems = of_manifests(tree.root)
    assert [row["rank"] for row in table.to_pylist()] == [1]
    assert len(problems) == 1
    assert words in problems[0]


def test_manifest_of_another_form_is_read(tree: TreeBuilder):
    """Law: a manifest without a checksum, with other spaces, has the same rows."""
    import json

    full(tree)
    tree.complete(0, 3)
    before = of_manifests(tree.root)[0]
    (path,) = (tree.root / "rank_0/.dump_metadata/manifest").iterdir()
    body = json.loads(path.read_bytes())
    del body["crc32"]
    path.write_text(json.dumps(body, indent=2))
    assert plain(of_manifests(tree.root)[0]) == plain(before)


def test_damaged_table_is_one_problem(tree: TreeBuilder):
    full(tree)
    tree.complete(0, 3)
    (path,) = tree.root.rglob("statistic.csv")
    path.write_text(path.read_text().replace("input", "inputs", 1))
    table, problems = of_manifests(tree.root)
    assert len(problems) == 1
    assert str(path) in problems[0]
    assert table.column("max").null_count == len(table) == 3


def test_torn_and_repeated_lines_of_a_table_are_left_out(tree: TreeBuilder):
    full(tree)
    tree.complete(0, 3)
    before = of_manifests(tree.root)[0]
    (path,) = tree.root.rglob("statistic.csv")
    text = path.read_text()
    header = text.partition("\n")[0]
    path.write_text(f"{text}{header}\n{text.splitlines()[1]}\nLinear,")
    table, problems = of_manifests(tree.root)
    assert problems == []
    assert plain(table) == plain(before)


def test_sharded_tensor_has_its_layout(tree: TreeBuilder):
    parallel(tree)
    tree.complete(0, 3)
    layouts = [row["layout"] for row in checked(tree)]
    assert layouts[:2] == ["", ""]
    assert layouts[2]

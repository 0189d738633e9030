"""docs/querying.md: its columns are those of the views, and its recipes answer what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import documented
from support.tree_builder import TreeBuilder

import rankdump
from rankdump._analysis.reader.dump import Dump
from rankdump._analysis.reader.table_views import EVENT_SCHEMA, FINDING_SCHEMA
from rankdump._analysis.table.table_schema import ITERATION_SCHEMA, TENSOR_SCHEMA
from rankdump._analysis.table_index import index_tree
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    RankMesh,
    TensorLayout,
)
from rankdump._kernels.shard_fingerprint import compute_fingerprint

PAGE = documented.ROOT / "docs" / "querying.md"
RECIPES = documented.blocks(PAGE, "sql")
ITEMS = ("max", "min", "count", "nan count", "zero count", "l2norm")
ORDER = """\
position,iteration,graph,kind,name,ranks,group,sequence,start_us,end_us,missing,rank_positions,\
streams,element_count,dtype,peer
0,0,0,OPERATOR,Default/relu-op0,0,,0,1000,2000,,1,0,0,,-1
1,0,0,OPERATOR,Default/relu-op0,1,,0,1000,9000,,1,0,0,,-1
2,0,0,ALL_REDUCE,bucket-0/AllReduce-op0,0 1,dp,1,3000,8000,,2 2,0 0,4,float32,-1
3,1,0,OPERATOR,Default/relu-op0,0,,0,11000,12000,,3,0,0,,-1
4,1,0,OPERATOR,Default/relu-op0,1,,0,11000,12000,,3,0,0,,-1
"""


def recipe(word: str) -> str:
    """The SQL under the heading with this word."""
    text = PAGE.read_text()
    (place,) = [found.start() for found in re.finditer(re.escape(word), text)][:1]
    return next(sql for sql in RECIPES if text.index(sql) > place)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks and two iterations: rank 1 has another gradient, and a NaN in iteration 1."""
    tree = TreeBuilder(tmp_path_factory.mktemp("recipes") / "tree", items=ITEMS)
    for iteration in (0, 1):
        for rank in (0, 1):
            relu = np.zeros(20, np.float32)
            relu[0] = np.nan if (iteration, rank) == (1, 1) else 1
            tree.tensor(rank, iteration, "Default/relu-op0", relu, op_type="ReLU", tabled=True)
            weight = np.full(4, 2 + iteration, np.float32)
            tree.tensor(rank, iteration, "fc.weight", weight, op_type="Parameter", tabled=True)
            gradient = np.full(4, (1 + rank) * (1 + iteration), np.float32)
            tree.tensor(
                rank, iteration, "Gradients/fc.weight", gradient, op_type="Parameter", tabled=True
            )
            still = np.ones(3, np.float32)
            tree.tensor(rank, iteration, "still", still, op_type="Parameter", tabled=True)
            tree.complete(rank, iteration, expected=6, dropped={"disk_full": 2})
    folder = tree.root / "global_execution_order"
    folder.mkdir()
    (folder / "execution_order_graph_0.csv").write_text(ORDER)
    return tree.root


@pytest.fixture(scope="module", params=["in memory", "indexed"])
def dump(root: Path, request) -> Dump:
    if request.param == "indexed":
        index_tree(root)
    return rankdump.open(root)


def rows(dump, word: str) -> list[dict[str, Any]]:
    return dump.sql(recipe(word)).to_pylist()


def test_there_are_twelve_recipes():
    assert len(RECIPES) == 12


def test_documented_columns_are_those_of_the_views():
    views = PAGE.read_text().partition("## Views")[2].partition("## Recipes")[0]
    for schema in (TENSOR_SCHEMA, ITERATION_SCHEMA, EVENT_SCHEMA, FINDING_SCHEMA):
        assert [name for name in schema.names if f"`{name}`" not in views] == []


def test_gradient_norms_over_the_steps(dump):
    found = rows(dump, "Norm of the gradient")
    assert found == [
        {"name": "Gradients/fc.weight", "iteration": 0, "norm": 4.0},
        {"name": "Gradients/fc.weight", "iteration": 1, "norm": 8.0},
    ]


def test_rank_that_differs_most(dump):
    found = rows(dump, "The rank that differs")
    assert {row["name"] for row in found} == {"Gradients/fc.weight"}
    assert found[0]["difference"] == pytest.approx(1 / 3)


def test_first_tensor_that_is_not_finite(dump):
    (row,) = rows(dump, "The first tensor that is not finite")
    assert (row["position"], row["rank"], row["iteration"]) == (4, 1, 1)
    assert row["name"] == "Default/relu-op0"


def test_operators_that_took_longest(dump):
    assert rows(dump, "Operators that took longest")[0] == {
        "name": "Default/relu-op0", "calls": 4, "ms": 11.0
    }  # fmt: skip


def test_tensors_that_never_change(dump):
    names = [(row["rank"], row["name"]) for row in rows(dump, "Tensors that never change")]
    assert names == [(0, "Default/relu-op0"), (0, "still"), (1, "still")]


def test_largest_tensors(dump):
    assert rows(dump, "The largest tensors")[0] == {
        "name": "Default/relu-op0", "side": "output", "slot": 0, "dtype": "float32",
        "shape": [20], "bytes": 80,
    }  # fmt: skip


def test_ratio_of_gradient_to_weight(dump):
    found = rows(dump, "Ratio of gradient to weight")
    assert len(found) == 4
    assert (found[0]["rank"], found[0]["iteration"]) == (1, 1)
    assert found[0]["ratio"] == pytest.approx(4 / 3)


def test_dead_units(dump):
    (row,) = rows(dump, "Dead units")
    assert row["name"] == "Default/relu-op0"
    assert row["zero"] == pytest.approx(0.95)


def test_drops_by_reason(dump):
    assert rows(dump, "Dropped tensors by reason") == [{"reason": "disk_full", "tensors": 8}]


def test_skew_of_collectives(dump):
    assert rows(dump, "Skew of arrival") == [
        {"kind": "ALL_REDUCE", "group_name": "dp", "name": "bucket-0/AllReduce-op0", "ms": 5.0}
    ]


@pytest.fixture(params=["in memory", "indexed"])
def sharded(tmp_path: Path, request) -> Dump:
    """Rows 0 and 1, and row 2, of a weight on two ranks, and an output that differs by a tenth."""
    tree = TreeBuilder(tmp_path / "tree", fingerprints=True)
    mesh = RankMesh("", ("dp",), (2,), 0, (1,))
    for rank, place in enumerate((slice(0, 2), slice(2, 3))):
        shard = (MeshPlacement(PlacementKind.SHARD, 0),)
        offset = (place.start, 0)
        layout = TensorLayout(LayoutSource.DTENSOR, WEIGHT.shape, offset, mesh, (rank,), shard)
        tree.tensor(rank, 0, "weight", WEIGHT[place], op_type="Parameter", tensor_layout=layout)
        tree.tensor(rank, 0, "Default/same-op0", WEIGHT)
        tree.tensor(rank, 0, "Default/output-op0", WEIGHT * np.float32(1 + rank / 10))
        tree.complete(rank, 0)
    if request.param == "indexed":
        index_tree(tree.root)
    return rankdump.open(tree.root)


WEIGHT = np.random.default_rng(3).standard_normal((3, 500)).astype(np.float32)


def test_difference_between_ranks_from_sketches(sharded):
    found = {row["name"]: row["difference"] for row in rows(sharded, "How far a tensor differs")}
    assert found["Default/output-op0"] == pytest.approx(0.1)
    assert found["Default/same-op0"] == 0
    assert found["weight"] > 1  # these are different elements


def test_shards_add_up_to_the_whole(sharded):
    (row,) = rows(sharded, "Fingerprints of whole tensors")
    expected = compute_fingerprint(WEIGHT)
    assert (row["name"], row["fingerprint"]) == ("weight", expected.digest)
    np.testing.assert_allclose(row["sketch"], expected.sketch, rtol=1e-4, atol=1e-5)

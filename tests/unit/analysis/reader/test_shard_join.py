"""Tests of the join of shards: blocks, replicas, partial values, flattened tensors, and holes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tensor_layouts import shard_rows

from rankdump._analysis.reader.shard_join import TensorShard, join_shards, plan_join
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)
from rankdump.errors import CorruptedError, UnsupportedError

REPLICATE = MeshPlacement(PlacementKind.REPLICATE)


def partial(reduction: str) -> MeshPlacement:
    return MeshPlacement(PlacementKind.PARTIAL, reduction=reduction)


def lay_out(
    array: np.ndarray, mesh_shape: tuple[int, ...], placements: tuple[MeshPlacement, ...]
) -> dict[int, tuple[TensorShard, np.ndarray]]:
    """Return the shard of each rank; a mesh dimension cuts what the ones before it left."""
    mesh = make_rank_mesh("", [""] * len(mesh_shape), mesh_shape, range(prod(mesh_shape)))
    found = {}
    for rank, at in enumerate(itertools.product(*map(range, mesh_shape))):
        begin, end = [0] * array.ndim, list(array.shape)
        scale = 1.0
        for place, extent, how in zip(at, mesh_shape, placements, strict=True):
            if how.kind is PlacementKind.SHARD:
                dim = how.dimension
                size = -(-(end[dim] - begin[dim]) // extent)
                first = min(begin[dim] + place * size, end[dim])
                begin[dim], end[dim] = first, min(first + size, end[dim])
            elif how.kind is PlacementKind.PARTIAL:
                scale *= (place + 1) / sum(range(1, extent + 1))
        local = array[tuple(map(slice, begin, end))] * scale
        layout = TensorLayout(LayoutSource.DTENSOR, array.shape, tuple(begin), mesh, at, placements)
        found[rank] = TensorShard(rank, local.shape, layout, "same"), local
    return found


_shards = st.builds(MeshPlacement, st.just(PlacementKind.SHARD), st.integers(0, 1))


@given(
    shape=st.tuples(st.integers(0, 7), st.integers(1, 5)),
    mesh=st.lists(
        st.tuples(st.integers(1, 3), _shards | st.sampled_from([REPLICATE, partial("sum")])),
        min_size=1,
        max_size=3,
    ),
)
def test_join_returns_the_tensor_that_was_laid_out(shape, mesh):
    """Any mix of shards, even or not, replicas and summands, in any order of ranks."""
    array = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    parts = lay_out(array, *map(tuple, zip(*mesh, strict=True)))
    plan = plan_join([shard for shard, _ in reversed(parts.values())], name="w")
    joined = join_shards(plan, lambda rank: parts[rank][1], name="w")
    np.testing.assert_allclose(joined, array, rtol=1e-12)
    assert not joined.flags.writeable


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", 6.0), ("avg", 2.0), ("product", 6.0), ("max", 3), ("min", 1)],
)
def test_join_reduces_partial_values(reduction, expected):
    mesh = make_rank_mesh("", ("tp",), (3,), range(3))
    shards = [
        TensorShard(
            rank,
            (2,),
            TensorLayout(LayoutSource.DTENSOR, (2,), (0,), mesh, (rank,), (partial(reduction),)),
        )
        for rank in range(3)
    ]
    plan = plan_join(shards, name="w")
    joined = join_shards(plan, lambda rank: np.full(2, rank + 1, np.float32), name="w")
    assert joined.dtype == np.float32
    assert joined.tolist() == [expected] * 2


def test_join_places_flattened_shards_and_drops_padding():
    layouts = [
        replace(
            shard_rows(rank, 0, (2, 3)), source=LayoutSource.FSDP1, flat_range=part, padding=pad
        )
        for rank, (part, pad) in enumerate([((0, 4), 0), ((4, 6), 2)])
    ]
    shards = [TensorShard(rank, (4,), layout) for rank, layout in enumerate(layouts)]
    plan = plan_join(shards, name="w")
    values = np.array([[0, 1, 2, 3], [4, 5, -1, -1]], np.float32)
    joined = join_shards(plan, lambda rank: values[rank], name="w")
    assert joined.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_join_names_the_rank_of_a_hole():
    shards = [TensorShard(0, (2, 3), shard_rows(0, 0, (4, 3)))]
    with pytest.raises(CorruptedError, match="w: its shards cover 6 of 12 elements; rank 1 rec"):
        plan_join(shards, name="w")


def test_join_rejects_overlapping_shards():
    shards = [TensorShard(rank, (3, 3), shard_rows(rank, rank, (4, 3))) for rank in range(2)]
    with pytest.raises(CorruptedError, match="overlap"):
        plan_join(shards, name="w")


def test_join_rejects_different_global_shapes():
    shards = [TensorShard(rank, (2,), shard_rows(rank, 0, (2 + rank,))) for rank in range(2)]
    with pytest.raises(CorruptedError, match="global shapes"):
        plan_join(shards, name="w")


def test_join_rejects_missing_partial_value_and_unknown_reduction():
    parts = lay_out(np.ones(3), (2,), (partial("sum"),))
    with pytest.raises(CorruptedError, match="2 partial values make a block, but only rank 0"):
        plan_join([parts[0][0]], name="w")
    parts = lay_out(np.ones(3), (2,), (partial("premul"),))
    with pytest.raises(UnsupportedError, match="premul cannot be joined"):
        plan_join([shard for shard, _ in parts.values()], name="w")


def test_join_warns_of_replicas_that_differ():
    parts = lay_out(np.ones(3), (2,), (REPLICATE,))
    shards = [replace(shard, digest=str(rank)) for rank, (shard, _) in parts.items()]
    plan = plan_join(shards, name="w")
    with pytest.warns(UserWarning, match="ranks 0-1 hold the same part with different elements"):
        joined = join_shards(plan, lambda rank: np.full(3, rank), name="w")
    assert joined.tolist() == [0, 0, 0]


def test_join_places_the_ranges_of_a_strided_shard():
    """A rank has rows of both halves: its block has no single offset."""
    array = np.arange(24).reshape(8, 3)
    mesh = make_rank_mesh("", ("dp",), (2,), range(2))
    strided = (MeshPlacement(PlacementKind.STRIDED_SHARD, 0, 2),)
    rows = [[0, 1, 4, 5], [2, 3, 6, 7]]
    shards = [
        TensorShard(
            rank,
            (4, 3),
            TensorLayout(LayoutSource.DTENSOR, (8, 3), (rows[rank][0], 0), mesh, (rank,), strided),
        )
        for rank in range(2)
    ]
    plan = plan_join(shards, name="w")
    joined = join_shards(plan, lambda rank: array[rows[rank]], name="w")
    assert joined.tolist() == array.tolist()

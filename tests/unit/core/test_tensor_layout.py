"""Tests of tensor layouts: ranks of a mesh, and the short text of a layout."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_rank_mesh,
)


@given(shape=st.lists(st.integers(1, 4), max_size=4), data=st.data())
def test_rank_mesh_lists_the_ranks_it_was_made_of(shape: list[int], data: st.DataObject):
    """Any order of ranks, with strides or without."""
    ranks = data.draw(st.permutations(range(prod(shape))))
    mesh = make_rank_mesh("world", [""] * len(shape), shape, ranks)
    assert mesh.list_ranks() == tuple(ranks)


@pytest.mark.parametrize(
    ("ranks", "strides"),
    [((4, 5, 6, 7), (2, 1)), ((0, 4, 8, 12), (8, 4)), ((0, 2, 1, 3), (1, 2)), ((1, 0, 3, 2), ())],
)
def test_rank_mesh_has_strides_where_ranks_are_regular(ranks, strides):
    assert make_rank_mesh("world", ("dp", "tp"), (2, 2), ranks).strides == strides


def test_layout_text_names_dimensions_coordinates_and_placements():
    mesh = make_rank_mesh("world", ("dp", ""), (2, 3), range(6))
    placements = (
        MeshPlacement(PlacementKind.STRIDED_SHARD, 0, 3),
        MeshPlacement(PlacementKind.PARTIAL, reduction="sum"),
    )
    layout = TensorLayout(LayoutSource.DTENSOR, (8, 4), (4, 0), mesh, (1, 2), placements)
    assert str(layout) == "dp 1/2 StridedShard(0, 3), dim1 2/3 Partial(sum) of [8, 4]"
    assert layout.is_partial

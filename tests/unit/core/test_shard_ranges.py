"""Ranges that cuts of a dimension leave: every index once, in the order of the cuts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.tensor_layout import (
    DimensionCut,
    MeshPlacement,
    PlacementKind,
    find_ranges,
    list_cuts,
    order_cuts,
)

SHARD = MeshPlacement(PlacementKind.SHARD, 0)


def strided(factor: int, dimension: int = 0) -> MeshPlacement:
    return MeshPlacement(PlacementKind.STRIDED_SHARD, dimension, factor)


@pytest.mark.parametrize(
    ("extent", "cuts", "expected"),
    [
        (8, [], [range(8)]),
        (8, [DimensionCut(2, 1)], [range(4, 8)]),
        (5, [DimensionCut(4, 2)], [range(4, 5)]),
        (5, [DimensionCut(4, 3)], []),
        (0, [DimensionCut(2, 0)], []),
        (8, [DimensionCut(2, 1, 2)], [range(2, 4), range(6, 8)]),
        (8, [DimensionCut(2, 1, 2), DimensionCut(2, 1)], [range(6, 8)]),
        (6, [DimensionCut(2, 1, 2)], [range(2, 3), range(5, 6)]),
    ],
)
def test_find_ranges_cuts_as_torch_chunk_does(
    extent: int, cuts: list[DimensionCut], expected: list[range]
) -> None:
    assert find_ranges(extent, cuts) == expected


@given(
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=3),
)
def test_find_ranges_gives_each_index_to_one_rank(extent: int, cuts: list[tuple[int, int]]) -> None:
    held: list[int] = []
    for place in itertools.product(*(range(count) for count, _ in cuts)):
        own = [
            DimensionCut(count, index, factor)
            for (count, factor), index in zip(cuts, place, strict=True)
        ]
        held += itertools.chain.from_iterable(find_ranges(extent, own))
    assert sorted(held) == list(range(extent))


def test_list_cuts_leaves_out_other_dimensions_and_replicas() -> None:
    placements = (SHARD, MeshPlacement(PlacementKind.REPLICATE), strided(3, 1), strided(2))
    cuts = list_cuts(0, (2, 3, 4, 5), (1, 2, 3, 4), placements)
    assert cuts == [DimensionCut(2, 1), DimensionCut(5, 4, 2)]


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([DimensionCut(2, 0), DimensionCut(3, 1)], [(2, 0), (3, 1)]),
        ([DimensionCut(2, 0, 3), DimensionCut(3, 1)], [(3, 1), (2, 0)]),
        ([DimensionCut(2, 0, 6), DimensionCut(2, 1), DimensionCut(3, 1)], [(2, 1), (3, 1), (2, 0)]),
        ([DimensionCut(2, 0, 4), DimensionCut(3, 1)], None),
    ],
)
def test_order_cuts_undoes_split_factors(
    cuts: list[DimensionCut], expected: list[tuple[int, int]] | None
) -> None:
    ordered = order_cuts(cuts)
    assert (ordered and [(cut.piece_count, cut.piece) for cut in ordered]) == expected

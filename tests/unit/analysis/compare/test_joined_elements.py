"""Elements of joined tensors, block by block: shards of any mesh give the whole, in bounded memory,
and their fingerprints add up.
"""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from support.tensor_pairs import read_all
from support.tree_builder import TreeBuilder

import rankdump
from rankdump._analysis.compare.joined_elements import (
    PlacedElements,
    PlacedPart,
    ReducedElements,
    compute_content_digest,
    measure_distance,
    place_shards,
)
from rankdump._analysis.compare.joined_tensors import list_zigzag_indices
from rankdump._analysis.compare.merged_shards import merge_shards
from rankdump._analysis.compare.pair_comparison import compute_statistics
from rankdump._analysis.compare.report import DumpedTensor, PairOutcome, TensorVerdict
from rankdump._analysis.compare.tensor_blocks import ArrayElements, TensorElements
from rankdump._analysis.reader import tensor_loader
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._analysis.reader.shard_join import TensorShard, plan_join
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorSide
from rankdump._core.tensor_fingerprint import measure_with_fingerprint, place_fingerprint
from rankdump._core.tensor_layout import (
    LayoutSource,
    MeshPlacement,
    PlacementKind,
    TensorLayout,
    make_block_layout,
    make_rank_mesh,
)

Array: TypeAlias = "npt.NDArray[Any]"
REPLICATE = MeshPlacement(PlacementKind.REPLICATE)


def shard(dimension: int) -> MeshPlacement:
    return MeshPlacement(PlacementKind.SHARD, dimension)


def strided(dimension: int, split_factor: int) -> MeshPlacement:
    return MeshPlacement(PlacementKind.STRIDED_SHARD, dimension, split_factor)


def partial(reduction: str) -> MeshPlacement:
    return MeshPlacement(PlacementKind.PARTIAL, reduction=reduction)


def cut(array: Array, pieces: int, piece: int, dimension: int) -> Array:
    """Return a piece as torch.chunk cuts it."""
    size = -(-array.shape[dimension] // pieces)
    begin = min(piece * size, array.shape[dimension])
    return np.take(array, range(begin, min(begin + size, array.shape[dimension])), dimension)


def cut_strided(array: Array, pieces: int, piece: int, how: MeshPlacement) -> Array:
    """Return a rank's piece of each of the parts that were there before."""
    parts = [cut(array, how.split_factor, at, how.dimension) for at in range(how.split_factor)]
    return np.concatenate(
        [cut(each, pieces, piece, how.dimension) for each in parts], how.dimension
    )


def take_terms(array: Array, count: int, at: int, reduction: str) -> Array:
    """Return what a rank has of a partial value: terms that are exact in float64."""
    if reduction == "sum":
        return array * (at + 1) if at + 1 < count else array * (1 - count * (count - 1) // 2)
    if reduction == "avg":
        return array * (1 + (0 if count == 1 else (-1, 1)[at]))
    return array if at == 0 else (array - 1 if reduction == "max" else array + 1)


def lay_out(
    whole: Array, mesh_shape: Sequence[int], placements: Sequence[MeshPlacement]
) -> tuple[list[TensorShard], list[Array]]:
    """Return what each rank has; a strided shard of FSDP2 is first in the mesh, and cut last."""
    mesh = make_rank_mesh("", [""] * len(mesh_shape), mesh_shape, range(prod(mesh_shape)))
    shards: list[TensorShard] = []
    arrays: list[Array] = []
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        local = whole
        steps = [*zip(mesh_shape, coordinate, placements, strict=True)]
        steps.sort(key=lambda step: step[2].kind is PlacementKind.STRIDED_SHARD)
        for count, at, how in steps:
            if how.kind is PlacementKind.PARTIAL:
                local = take_terms(local, count, at, how.reduction)
            elif how.kind is not PlacementKind.REPLICATE:
                local = cut(local, count, at, how.dimension)
        layout = make_block_layout(
            LayoutSource.DTENSOR, whole.shape, local.shape, mesh, coordinate, tuple(placements)
        )
        assert layout is not None
        shards.append(TensorShard(rank, local.shape, layout, "same"))
        arrays.append(np.ascontiguousarray(local))
    return shards, arrays


@st.composite
def sharded_tensors(draw: st.DrawFn, *, partials: bool = True) -> Any:
    """A tensor and what the ranks of a mesh of one to three dimensions have of it."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    whole = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    mesh_shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    dimensions = st.integers(0, len(shape) - 1)
    if len(mesh_shape) > 1 and draw(st.booleans()):
        # FSDP2 over tensor parallelism, on one dimension of the tensor.
        dimension = draw(dimensions)
        rest = [REPLICATE] * (len(mesh_shape) - 2)
        placements = [strided(dimension, mesh_shape[1]), shard(dimension), *rest]
        return whole, *lay_out(whole, mesh_shape, placements)
    placements = [draw(st.one_of(st.just(REPLICATE), dimensions.map(shard))) for _ in mesh_shape]
    if partials and draw(st.booleans()):
        at = draw(st.integers(0, len(mesh_shape) - 1))
        reductions = ["sum", "max", "min", *(["avg"] if mesh_shape[at] <= 2 else [])]
        placements[at] = partial(draw(st.sampled_from(reductions)))
    return whole, *lay_out(whole, mesh_shape, placements)


def make_buffer(elements: TensorElements, count: int) -> memoryview:
    return np.empty(count * elements.dtype.itemsize, np.uint8).data


@given(sharded=sharded_tensors(), data=st.data())
def test_shards_of_any_mesh_are_the_whole_in_any_block(sharded: Any, data: st.DataObject):
    whole, shards, arrays = sharded
    plan = plan_join(shards, name="w")
    joined = place_shards(plan, {at: ArrayElements(each) for at, each in enumerate(arrays)})
    assert (joined.shape, joined.dtype, joined.size) == (whole.shape, whole.dtype, whole.size)
    np.testing.assert_array_equal(read_all(joined), whole)
    at = data.draw(st.integers(0, whole.size - 1))
    count = data.draw(st.integers(1, whole.size - at))
    part = joined.part(at, count, make_buffer(joined, count))
    np.testing.assert_array_equal(part, whole.reshape(-1)[at : at + count])


@pytest.mark.parametrize(("extent", "ranks", "factor"), [(12, 2, 3), (11, 2, 2), (7, 3, 2)])
@pytest.mark.parametrize("dimension", [0, 1])
def test_strided_shards_of_several_ranges_are_the_whole(extent, ranks, factor, dimension):
    shape = (extent, 3) if dimension == 0 else (3, extent)
    whole = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    how = strided(dimension, factor)
    mesh = make_rank_mesh("", ("",), (ranks,), range(ranks))
    arrays = {rank: cut_strided(whole, ranks, rank, how) for rank in range(ranks)}
    shards: list[TensorShard] = []
    for rank, local in arrays.items():
        layout = make_block_layout(LayoutSource.DTENSOR, shape, local.shape, mesh, (rank,), (how,))
        assert layout is not None
        shards.append(TensorShard(rank, local.shape, layout, "same"))
    parts = {rank: ArrayElements(each) for rank, each in arrays.items()}
    joined = place_shards(plan_join(shards, name="w"), parts)
    np.testing.assert_array_equal(read_all(joined), whole)
    for at in range(0, whole.size, 5):
        count = min(5, whole.size - at)
        part = joined.part(at, count, make_buffer(joined, count))
        np.testing.assert_array_equal(part, whole.reshape(-1)[at : at + count])


def make_dumped(array: Array, layout: TensorLayout | None) -> DumpedTensor:
    """Return what a tree without tensors has of a tensor."""
    facts = "", 0, "Linear", "fc", "", array.dtype.name, array.shape, array.nbytes, 0, ""
    placement = place_fingerprint(array.dtype.name, array.shape, layout)
    assert placement is not None
    packed = measure_with_fingerprint((), array.dtype.name, array.tobytes(), placement).fingerprint
    tensor = DumpedTensor(TensorSide.OUTPUT, 0, "", array.dtype.name, array.shape)
    return tensor._replace(
        statistics=compute_statistics(array) if array.size else {},
        fingerprint=RecordedFingerprint(int.from_bytes(packed[:8], "little"), packed[8:]),
        row_record=ManifestRecord(*facts, layout=layout),
    )


@given(sharded=sharded_tensors(partials=False))
def test_fingerprints_and_statistics_of_shards_are_those_of_the_whole(sharded: Any):
    """Also of strided ones, as FSDP2 makes them of tensors that are parallel already."""
    whole, shards, arrays = sharded
    # A part without elements is not recorded.
    assume(all(array.size for array in arrays))
    dumped = [make_dumped(each, own.layout) for each, own in zip(arrays, shards, strict=True)]
    merged, expected = merge_shards(dumped), make_dumped(whole, None)
    assert merged is not None
    assert merged.fingerprint is not None
    assert expected.fingerprint is not None
    assert merged.fingerprint.digest == expected.fingerprint.digest
    np.testing.assert_allclose(
        np.frombuffer(merged.fingerprint.sketch, "<f4"),
        np.frombuffer(expected.fingerprint.sketch, "<f4"),
        atol=1e-4,
    )
    assert merged.statistics == pytest.approx(expected.statistics)


def test_sketches_of_terms_add_up_and_digests_do_not():
    whole = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    mesh = make_rank_mesh("", ("tp",), (2,), range(2))
    terms = whole / 4, whole - whole / 4
    for reduction, factor in (("sum", 1.0), ("avg", 0.5), ("max", None)):
        dumped = [
            make_dumped(
                term,
                TensorLayout(
                    LayoutSource.DTENSOR, (4, 6), (0, 0), mesh, (at,), (partial(reduction),)
                ),
            )
            for at, term in enumerate(terms)
        ]
        merged, expected = merge_shards(dumped), make_dumped(whole, None).fingerprint
        assert merged is not None
        assert expected is not None
        if factor is None:
            assert merged.fingerprint is None
            continue
        assert merged.fingerprint is not None
        assert merged.fingerprint.digest is None
        np.testing.assert_allclose(
            np.frombuffer(merged.fingerprint.sketch, "<f4"),
            factor * np.frombuffer(expected.sketch, "<f4"),
            atol=1e-5,
        )


def test_zigzag_gives_each_rank_a_chunk_of_both_ends():
    assert list_zigzag_indices(2, 4) == [
        (range(2), range(6, 8)),
        (range(2, 4), range(4, 6)),
    ]


def test_distance_and_digest_are_those_of_the_elements():
    random = np.random.default_rng(0)
    a, b = (random.normal(size=(700, 300)) + 1j for _ in range(2))
    exact = np.linalg.norm(a - b) / np.linalg.norm(b)
    own, other = ArrayElements(a), ArrayElements(b)
    assert measure_distance(own, other) == pytest.approx(exact, rel=1e-12)
    assert measure_distance(own, own) == 0.0
    assert measure_distance(own, ArrayElements(np.where(a == a[0, 0], np.inf, a))) == np.inf
    halves = [
        PlacedPart(ArrayElements(b[rows.start : rows.stop]), (350, 300), [[rows], [range(300)]])
        for rows in (range(350), range(350, 700))
    ]
    joined = PlacedElements(halves, b.shape, b.dtype)
    assert compute_content_digest(joined) == compute_content_digest(other)
    assert compute_content_digest(joined) != compute_content_digest(own)


def test_terms_are_added_in_float64():
    terms = [np.full(3, value, np.float32) for value in (1.0, 1e-8, -1.0)]
    found = read_all(ReducedElements([ArrayElements(each) for each in terms]))
    assert found.dtype == np.float32
    assert found.tolist() == [np.float32(1e-8)] * 3


EXTENT = 1536
CASES = {"rows": shard(0), "columns": shard(1), "sum": partial("sum")}
NAME = "Default/network-Net/fc-Linear/Linear-op0"


def write_trees(folder: Path, case: str, codec: str, *, has_layout: bool) -> tuple[Path, Path]:
    """Four ranks with parts of a tensor of 9 MB, and one with all of it."""
    whole = np.round(np.random.default_rng(0).normal(size=(EXTENT, EXTENT)), 1).astype(np.float32)
    shards, arrays = lay_out(whole, [4], [CASES[case]])
    trees = TreeBuilder(folder / "a"), TreeBuilder(folder / "b")
    for rank, (own, array) in enumerate(zip(shards, arrays, strict=True)):
        layout = own.layout if has_layout else None
        trees[0].tensor(rank, 0, NAME, array, codec=codec, tensor_layout=layout)
        trees[0].complete(rank, 0, world_size=4)
    whole[5, 7] += 0.5
    trees[1].tensor(0, 0, NAME, whole, codec=codec)
    trees[1].complete(0, 0, world_size=1)
    return trees[0].root, trees[1].root


@pytest.mark.parametrize("codec", ["none", "zstd"])
@pytest.mark.parametrize(
    ("case", "has_layout"), [("rows", True), ("columns", True), ("sum", True), ("columns", False)]
)
def test_memory_is_bounded_and_results_do_not_depend_on_it(
    case, has_layout, codec, tmp_path, monkeypatch
):
    """Files beyond the budget are read in blocks, packed ones from temporary files."""
    trees = write_trees(tmp_path, case, codec, has_layout=has_layout)
    expected = rankdump.compare(*trees, processes=1)
    monkeypatch.setattr(tensor_loader, "MAX_LOADED_BYTES", 1 << 20)
    monkeypatch.setattr(tensor_loader, "_MAX_OPEN_FILES", 2 if case == "rows" else 256)
    rankdump.compare(*trees, processes=1)  # imports and workspaces
    tracemalloc.start()
    try:
        report = rankdump.compare(*trees, processes=1)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # As texts: one measure is NaN, which equals itself in no dataclass from Python 3.13 on.
    assert repr(report.rows) == repr(expected.rows)
    (row,) = report.rows
    assert row.outcome.verdict is TensorVerdict.DIFFERENT
    assert row.outcome.measures is not None
    assert row.outcome.measures.unequal == 1
    assert peak_bytes < EXTENT * EXTENT * 4


@pytest.mark.parametrize("kept", [0.5, 0.0])
def test_damaged_part_is_unreadable_whatever_the_budget(kept, tmp_path, monkeypatch):
    trees = write_trees(tmp_path, "rows", "zstd", has_layout=True)
    path = next((trees[0] / "rank_2").rglob("*.npy.zst"))
    path.write_bytes(path.read_bytes()[: int(kept * path.stat().st_size)])
    outcomes: list[PairOutcome] = []
    for budget in (64 << 20, 1 << 20):
        monkeypatch.setattr(tensor_loader, "MAX_LOADED_BYTES", budget)
        (row,) = rankdump.compare(*trees, processes=1).rows
        outcomes.append(row.outcome)
    assert outcomes[0].verdict is TensorVerdict.UNREADABLE
    assert path.name in outcomes[0].findings[0]
    assert outcomes[0] == outcomes[1]

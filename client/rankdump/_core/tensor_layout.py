"""Layout of a tensor: the part of a logical tensor that a rank holds, the mesh of ranks, and who
described it; and the indices of a dimension that a rank holds when a mesh shards the dimension.
Pure.

The terms are those of PyTorch's DTensor (torch.distributed.tensor, placement types): a mesh is an
array of ranks, and each of its dimensions has one placement. A block lies at its `global_offset`;
`flat_range` is the part of a tensor that was flattened before it was divided, as FSDP1 does.

A cut divides the remaining part of a dimension as torch.chunk does: all pieces have the rounded-up
size, except that the last ones are smaller or empty. A strided cut divides each of `split_factor`
pieces in this way, so that a rank has a part of each piece (_StridedShard).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from math import prod
from typing import NamedTuple

MAX_MESH_DIMENSIONS = 16
MAX_MESH_RANKS = 1 << 16
"""Maximum number of ranks in a mesh."""
MAX_LISTED_RANKS = 1 << 13
"""Maximum number of ranks in a mesh without strides, which lists its ranks: a kind has at most 64
KiB on the wire.
"""
MAX_MESH_NAME_CHARACTERS = 64
"""Maximum number of characters in the name of a mesh, of a mesh dimension, and of a reduction."""


class LayoutSource(str, Enum):
    """Who described a layout; the value is the word in manifests."""

    DTENSOR = "dtensor"
    FSDP1 = "fsdp1"
    MEGATRON = "megatron"
    DEEPSPEED = "deepspeed"
    USER = "user"
    SAMPLE = "sample"
    """Nobody: the rank kept only the first elements, because keeping the whole tensor took too
    long.
    """

    # The hash of `Enum` is a Python call, which would make dictionary look-ups slower.
    __hash__ = str.__hash__


class PlacementKind(str, Enum):
    """Kind of a placement: what a mesh dimension does with a tensor; the value is the word in
    manifests.
    """

    REPLICATE = "replicate"
    SHARD = "shard"
    STRIDED_SHARD = "strided_shard"
    PARTIAL = "partial"

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class MeshPlacement:
    """Placement: what one dimension of a mesh does with a tensor."""

    kind: PlacementKind
    dimension: int = 0
    """For a shard: the divided dimension of the tensor."""
    split_factor: int = 0
    """For a strided shard: the number of pieces into which another mesh dimension divided the
    tensor first.
    """
    reduction: str = ""
    """For a partial value: the operation that joins the ranks' operands, such as `sum`, `avg` or
    `max`.
    """

    def __str__(self) -> str:
        if self.kind is PlacementKind.SHARD:
            return f"Shard({self.dimension})"
        if self.kind is PlacementKind.STRIDED_SHARD:
            return f"StridedShard({self.dimension}, {self.split_factor})"
        return f"Partial({self.reduction})" if self.kind is PlacementKind.PARTIAL else "Replicate"


@dataclass(frozen=True, slots=True)
class RankMesh:
    """A mesh: an array of ranks with named dimensions."""

    name: str
    dimension_names: tuple[str, ...]
    """Name of each dimension; empty texts if they have no names."""
    shape: tuple[int, ...]
    start: int = 0
    """Global rank of the first element of the mesh."""
    strides: tuple[int, ...] = ()
    """Difference of global ranks for a step along each dimension; empty if `ranks`
    lists the ranks.
    """
    ranks: tuple[int, ...] = ()
    """Global ranks in C order, for a mesh without strides; else empty."""

    def list_ranks(self) -> tuple[int, ...]:
        """Return the global ranks of the mesh in C order."""
        if not self.strides and self.shape:
            return self.ranks
        ranks = [self.start]
        for extent, stride in zip(self.shape, self.strides, strict=True):
            ranks = [rank + step * stride for rank in ranks for step in range(extent)]
        return tuple(ranks)


def make_rank_mesh(
    name: str, dimension_names: Sequence[str], shape: Sequence[int], ranks: Sequence[int]
) -> RankMesh:
    """Return the mesh of these global ranks in C order, with strides if possible, as for nearly
    every mesh.

    With strides, a mesh of thousands of ranks takes only a few bytes where a layout is sent or
    stored.
    """
    strides: list[int] = []
    inner = 1
    for extent in reversed(shape):
        strides.insert(0, ranks[inner] - ranks[0] if extent > 1 else 0)
        inner *= extent
    names = tuple(dimension_names)
    if min(strides, default=0) >= 0:
        regular = RankMesh(name, names, tuple(shape), ranks[0], tuple(strides))
        if regular.list_ranks() == tuple(ranks):
            return regular
    return RankMesh(name, names, tuple(shape), ranks[0], (), tuple(ranks))


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The part of a logical tensor that one rank holds."""

    source: LayoutSource
    global_shape: tuple[int, ...]
    """Shape of the logical tensor."""
    global_offset: tuple[int, ...]
    """Index of the block's first element in the logical tensor, by dimension."""
    mesh: RankMesh
    coordinate: tuple[int, ...]
    """Coordinate of this rank in the mesh, by mesh dimension."""
    placements: tuple[MeshPlacement, ...]
    """Placement of each mesh dimension."""
    flat_range: tuple[int, ...] = ()
    """First and last index (exclusive) of the part in C order, for a tensor that was flattened
    before it was divided; else empty.
    """
    padding: int = 0
    """Number of elements at the end of the local tensor that are not in the logical tensor."""
    logical_name: str = ""
    """Name of the tensor in the whole model, if the rank's name for it differs; else empty."""

    @property
    def is_sample(self) -> bool:
        """Whether the part is a sample: the first elements of a tensor whose other elements were
        not kept.
        """
        return self.source is LayoutSource.SAMPLE

    @property
    def is_partial(self) -> bool:
        """Whether ranks hold operands of a reduction, such as summands, instead of elements."""
        return any(each.kind is PlacementKind.PARTIAL for each in self.placements)

    def __str__(self) -> str:
        """Return the layout as a short text, such as `dp 1/4 Shard(0), tp 0/2 Replicate
        of [8, 4]`.
        """
        if self.is_sample:
            return f"only the first {self.flat_range[-1]} elements of {list(self.global_shape)}"
        parts = [
            f"{name or f'dim{number}'} {at}/{extent} {placement}"
            for number, (name, at, extent, placement) in enumerate(
                zip(
                    self.mesh.dimension_names,
                    self.coordinate,
                    self.mesh.shape,
                    self.placements,
                    strict=True,
                )
            )
        ]
        return f"{', '.join(parts)} of {list(self.global_shape)}"


@lru_cache(maxsize=1 << 12)
def make_sample_layout(shape: tuple[int, ...], count: int) -> TensorLayout:
    """Return the layout of a sample: the first `count` elements, in C order, of a tensor of this
    shape.
    """
    return TensorLayout(
        LayoutSource.SAMPLE,
        shape,
        (0,) * len(shape),
        RankMesh("", (), ()),
        (),
        (),
        flat_range=(0, count),
    )


def find_layout_fault(layout: TensorLayout, shape: tuple[int, ...]) -> str:
    """Return what is contradictory in the layout of a local tensor of this shape; empty if nothing
    is.
    """
    mesh = layout.mesh
    counts = {len(mesh.shape), len(mesh.dimension_names), len(layout.coordinate)}
    if counts != {len(layout.placements)} or len(mesh.shape) > MAX_MESH_DIMENSIONS:
        return f"mesh of shape {list(mesh.shape)} with {len(layout.placements)} placements"
    has_strides = len(mesh.strides) == len(mesh.shape) and not mesh.ranks
    if not has_strides and (mesh.strides or len(mesh.ranks) != prod(mesh.shape)):
        return (
            f"mesh of shape {list(mesh.shape)} with {len(mesh.strides)} strides and "
            f"{len(mesh.ranks)} ranks"
        )
    if prod(mesh.shape) > MAX_MESH_RANKS:
        return f"mesh of {prod(mesh.shape)} ranks, at most {MAX_MESH_RANKS}"
    if any(at >= extent for at, extent in zip(layout.coordinate, mesh.shape, strict=True)):
        return f"coordinate {list(layout.coordinate)} in a mesh of shape {list(mesh.shape)}"
    if len(layout.global_offset) != len(layout.global_shape):
        return f"offset {list(layout.global_offset)} in shape {list(layout.global_shape)}"
    if layout.flat_range or layout.is_sample:
        return _find_range_fault(layout, shape)
    if len(shape) != len(layout.global_shape):
        return f"block of shape {list(shape)} in shape {list(layout.global_shape)}"
    ends = map(sum, zip(layout.global_offset, shape, strict=True))
    if prod(shape) and any(end > n for end, n in zip(ends, layout.global_shape, strict=True)):
        return (
            f"block of shape {list(shape)} at {list(layout.global_offset)} "
            f"in shape {list(layout.global_shape)}"
        )
    return ""


def _find_range_fault(layout: TensorLayout, shape: tuple[int, ...]) -> str:
    bounds = layout.flat_range
    if len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1] <= prod(layout.global_shape):
        return f"range {list(bounds)} of a tensor of shape {list(layout.global_shape)}"
    if bounds[1] - bounds[0] + layout.padding != prod(shape):
        return f"range {list(bounds)} and {layout.padding} of padding for shape {list(shape)}"
    return ""


class DimensionCut(NamedTuple):
    """Division of a tensor's dimension by one dimension of a mesh."""

    piece_count: int
    """Number of pieces: the extent of the mesh dimension."""
    piece: int
    """Index of this rank's piece."""
    split_factor: int = 1


def list_cuts(
    dimension: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshPlacement],
) -> list[DimensionCut]:
    """Return the cuts of a tensor's dimension in the order of the mesh dimensions."""
    return [
        DimensionCut(count, index, max(placement.split_factor, 1))
        for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True)
        if placement.kind in (PlacementKind.SHARD, PlacementKind.STRIDED_SHARD)
        and placement.dimension == dimension
    ]


def find_ranges(extent: int, cuts: Sequence[DimensionCut]) -> list[range]:
    """Return the indices that remain after the cuts, in order; adjoining ranges are joined."""
    held = [range(extent)]
    for cut in cuts:
        total = sum(map(len, held))
        size = -(-total // cut.split_factor)
        parts: list[range] = []
        for start in range(0, total, size or 1):
            stop = min(start + size, total)
            step = -(-(stop - start) // cut.piece_count)
            begin = min(start + step * cut.piece, stop)
            parts += _select_stretch(held, begin, min(begin + step, stop))
        held = _join_ranges(parts)
    return held


def order_cuts(cuts: Sequence[DimensionCut]) -> list[DimensionCut] | None:
    """Return cuts that are equivalent but plain, in the order in which the tensor was divided; None
    if cuts are truly strided.

    FSDP2 divides the pieces that tensor parallelism made, but comes first in the mesh: its split
    factor is the number of those pieces. The sizes of uneven pieces depend on this order.
    """
    ordered: list[DimensionCut] = []
    for cut in reversed(cuts):
        places = (
            place
            for place in range(len(ordered) + 1)
            if prod(earlier.piece_count for earlier in ordered[:place]) == cut.split_factor
        )
        place = next(places, None)
        if place is None:
            return None
        ordered.insert(place, DimensionCut(cut.piece_count, cut.piece))
    return ordered


def find_block_ranges(layout: TensorLayout, shape: Sequence[int]) -> list[list[range]]:
    """Return the indices of the logical tensor that a block has, as a list of ranges for each
    dimension.

    A block with several ranges has no single offset; any other block lies at the offset of its
    layout.
    """
    found: list[list[range]] = []
    for dimension, (begin, held) in enumerate(zip(layout.global_offset, shape, strict=True)):
        cuts = list_cuts(dimension, layout.mesh.shape, layout.coordinate, layout.placements)
        ranges = [range(begin, begin + held)]
        if order_cuts(cuts) is None:
            strided = find_ranges(layout.global_shape[dimension], cuts)
            ranges = strided if sum(map(len, strided)) == held else ranges
        found.append(ranges)
    return found


def make_block_layout(
    source: LayoutSource,
    global_shape: tuple[int, ...],
    shape: tuple[int, ...],
    mesh: RankMesh,
    coordinate: tuple[int, ...],
    placements: tuple[MeshPlacement, ...],
    logical_name: str = "",
) -> TensorLayout | None:
    """Return the layout of a local tensor of this shape; None if the placements contradict the
    shape.

    The offset of a strided shard is that of its first element.
    """
    if len(shape) != len(global_shape) or len(mesh.ranks) > MAX_LISTED_RANKS:
        return None
    offsets: list[int] = []
    for dimension, (extent, held) in enumerate(zip(global_shape, shape, strict=True)):
        cuts = list_cuts(dimension, mesh.shape, coordinate, placements)
        ordered = order_cuts(cuts)
        # Uneven parts of FSDP2 follow the order of the divisions, those of DTensor the order of the
        # mesh, so both are tried.
        for tried in (cuts,) if ordered is None else (ordered, cuts):
            ranges = find_ranges(extent, tried)
            if sum(map(len, ranges)) == held:
                offsets.append(ranges[0].start if ranges else extent)
                break
        else:
            return None
    layout = TensorLayout(
        source, global_shape, tuple(offsets), mesh, coordinate, placements, (), 0, logical_name
    )
    # The layout is checked here because the agent rejects a record with a contradictory layout.
    return None if find_layout_fault(layout, shape) else layout


def _select_stretch(held: Sequence[range], start: int, stop: int) -> list[range]:
    """Return the elements of joined ranges from their index `start` to `stop`, as ranges."""
    found: list[range] = []
    for each in held:
        part = each[max(start, 0) : max(stop, 0)]
        if part:
            found.append(part)
        start, stop = start - len(each), stop - len(each)
    return found


def _join_ranges(held: Sequence[range]) -> list[range]:
    joined: list[range] = []
    for each in held:
        if joined and joined[-1].stop == each.start:
            joined[-1] = range(joined[-1].start, each.stop)
        else:
            joined.append(each)
    return joined

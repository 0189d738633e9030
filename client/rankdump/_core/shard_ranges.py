"""Ranges of a tensor's dimension that a rank holds when dimensions of a mesh shard it. Pure.

A cut divides what is left of a dimension as torch.chunk does: all pieces have the rounded-up size,
and the last ones are smaller or empty. A strided cut divides each of `split_factor` pieces in the
same way, so that a rank has a part of each (torch.distributed.tensor, placement types:
_StridedShard).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from rankdump._core.tensor_layout import MeshPlacement, PlacementKind, TensorLayout


class DimensionCut(NamedTuple):
    """How one dimension of a mesh divides a dimension of a tensor."""

    piece_count: int
    """Extent of the dimension of the mesh."""
    piece: int
    """Number of this rank's piece."""
    split_factor: int = 1


def list_cuts(
    dimension: int,
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[MeshPlacement],
) -> list[DimensionCut]:
    """Return the cuts of a tensor's dimension, first dimension of the mesh first."""
    return [
        DimensionCut(count, index, max(placement.split_factor, 1))
        for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True)
        if placement.kind in (PlacementKind.SHARD, PlacementKind.STRIDED_SHARD)
        and placement.dimension == dimension
    ]


def find_ranges(extent: int, cuts: Sequence[DimensionCut]) -> list[range]:
    """Return which indices are left after the cuts, in order; adjoining ranges are joined."""
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
    """Return plain cuts, in the order in which they were made; None for cuts that are strided.

    FSDP2 divides what tensor parallelism left, but comes first in the mesh: its split factor is the
    number of pieces that were there before. Uneven pieces depend on that order.
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
    """Return which indices of the whole tensor a block has, one list for each dimension.

    A block of several ranges is at no single offset; any other one is where its layout places it.
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


def _select_stretch(held: Sequence[range], start: int, stop: int) -> list[range]:
    """Return the part of some ranges from their `start`-th index to their `stop`-th."""
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

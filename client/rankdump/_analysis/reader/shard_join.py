"""Join of the shards of a logical tensor: which shards are needed, where each of them belongs, and
whether they cover the tensor. Planning is pure; `join_shards` reads one array at a time.

Replicas are one block, partial values of a block are reduced in float64, and blocks are placed by
their global offset; if a tensor was flattened first, by their range.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.tensor_layout import PlacementKind, TensorLayout, find_block_ranges
from rankdump.errors import CorruptedError, UnsupportedError

_Array: TypeAlias = "npt.NDArray[Any]"
REDUCTIONS: Mapping[str, Callable[..., _Array]] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
}
"""Functions that reduce partial values; an average is a sum that is divided at the end."""


@dataclass(frozen=True, slots=True)
class TensorShard:
    """The part of a logical tensor that one rank recorded."""

    rank: int
    shape: tuple[int, ...]
    layout: TensorLayout
    digest: str = ""
    """Digest of the shard's elements; empty if it is unknown."""


@dataclass(frozen=True, slots=True)
class JoinBlock:
    """A part of the logical tensor, with the ranks whose arrays are reduced to it."""

    ranks: tuple[int, ...]
    """One rank for each partial value; a single rank if the value is not partial."""
    layout: TensorLayout
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JoinPlan:
    """Description of how shards are joined into the logical tensor."""

    shape: tuple[int, ...]
    blocks: tuple[JoinBlock, ...]
    different_replicas: tuple[tuple[int, ...], ...] = ()
    """Ranks that have the same part with different elements; the first one is used."""


def plan_join(shards: Sequence[TensorShard], *, name: str) -> JoinPlan:
    """Return how the shards of all ranks are joined; `name` is used in errors.

    CorruptedError when the shards contradict each other, or do not cover the tensor exactly.
    """
    first = shards[0].layout
    shapes = {shard.layout.global_shape for shard in shards}
    if len(shapes) > 1:
        raise CorruptedError(f"{name}: its shards have the global shapes {sorted(shapes)}")
    blocks: list[JoinBlock] = []
    different: list[tuple[int, ...]] = []
    for parts in _group_by_block(shards).values():
        different += [
            tuple(replica.rank for replica in replicas)
            for replicas in parts.values()
            if len({replica.digest for replica in replicas}) > 1
        ]
        used = [replicas[0] for _, replicas in sorted(parts.items())]
        _check_partial_values(used, name)
        ranks = tuple(shard.rank for shard in used)
        blocks.append(JoinBlock(ranks, used[0].layout, used[0].shape))
    _check_coverage(blocks, shards, name)
    return JoinPlan(first.global_shape, tuple(blocks), tuple(different))


def join_shards(plan: JoinPlan, load: Callable[[int], _Array], *, name: str) -> _Array:
    """Return the logical tensor, read-only; `load` returns the array of a rank.

    If replicas differ, a warning names their ranks.
    """
    for ranks in plan.different_replicas:
        warnings.warn(
            f"{name}: {name_first_ranks(ranks)} hold the same part with different elements; "
            f"those of rank {ranks[0]} are used",
            stacklevel=3,
        )
    result: _Array | None = None
    for block in plan.blocks:
        array = _reduce_partial_values(block, load)
        if result is None:
            result = np.empty(plan.shape, array.dtype)
        layout = block.layout
        if layout.flat_range:
            begin, end = layout.flat_range
            result.reshape(-1)[begin:end] = array.reshape(-1)[: end - begin]
        else:
            result[_select_block(layout, block.shape)] = array
    assert result is not None
    result.flags.writeable = False
    return result


def select_shard(whole: _Array, layout: TensorLayout, shape: tuple[int, ...]) -> _Array:
    """Return the elements of a logical tensor that belong to a shard with this shape, without
    padding.
    """
    if layout.flat_range:
        return whole.reshape(-1)[slice(*layout.flat_range)]
    return whole[_select_block(layout, shape)]


def _group_by_block(
    shards: Sequence[TensorShard],
) -> dict[tuple[object, ...], dict[tuple[int, ...], list[TensorShard]]]:
    """Return the replicas of each partial value of each block, sorted by rank."""
    found: defaultdict[tuple[object, ...], dict[tuple[int, ...], list[TensorShard]]] = defaultdict(
        dict
    )
    for shard in sorted(shards, key=lambda each: each.rank):
        layout = shard.layout
        block = (layout.global_offset, layout.flat_range, shard.shape)
        partial = tuple(
            at
            for at, placement in zip(layout.coordinate, layout.placements, strict=True)
            if placement.kind is PlacementKind.PARTIAL
        )
        found[block].setdefault(partial, []).append(shard)
    return found


def _check_partial_values(used: Sequence[TensorShard], name: str) -> None:
    """Raise a CorruptedError unless a block has all its partial values, with the same reduction."""
    layout = used[0].layout
    partial = [
        (extent, placement.reduction)
        for extent, placement in zip(layout.mesh.shape, layout.placements, strict=True)
        if placement.kind is PlacementKind.PARTIAL
    ]
    expected = prod(extent for extent, _ in partial)
    if len(used) != expected:
        ranks = name_first_ranks([shard.rank for shard in used])
        raise CorruptedError(
            f"{name}: {expected} partial values make a block, but only {ranks} recorded one"
        )
    reductions = {reduction for _, reduction in partial}
    if len(reductions) > 1 or not reductions <= set(REDUCTIONS):
        raise UnsupportedError(
            f"{name}: partial values with the reduction {', '.join(sorted(reductions))} cannot be "
            f"joined; allowed: one of {', '.join(REDUCTIONS)}"
        )


def _check_coverage(blocks: Sequence[JoinBlock], shards: Sequence[TensorShard], name: str) -> None:
    """Raise a CorruptedError unless the blocks cover each element exactly once."""
    shape = shards[0].layout.global_shape
    flat = {bool(block.layout.flat_range) for block in blocks}
    if len(flat) > 1:
        raise CorruptedError(f"{name}: some shards are of the flattened tensor, and others blocks")
    if True in flat:
        held = [[[range(*block.layout.flat_range)]] for block in blocks]
        shape = (prod(shape),)
    else:
        held = [find_block_ranges(block.layout, block.shape) for block in blocks]
    covered, is_overlapping = _count_covered(shape, held)
    if is_overlapping:
        raise CorruptedError(f"{name}: its shards overlap")
    if covered < prod(shape):
        missing = sorted({*shards[0].layout.mesh.list_ranks()} - {each.rank for each in shards})
        where = f"; {name_first_ranks(missing)} recorded none" if missing else ""
        raise CorruptedError(f"{name}: its shards cover {covered} of {prod(shape)} elements{where}")


def _count_covered(
    shape: tuple[int, ...], held: Sequence[Sequence[Sequence[range]]]
) -> tuple[int, bool]:
    """Return how many elements are covered by blocks, and whether any element is covered twice.

    Each dimension is divided at the ends of all ranges; all elements between two ends are covered
    alike, so there are few parts.
    """
    ends = [
        sorted({0, extent, *(end for own in held for r in own[at] for end in (r.start, r.stop))})
        for at, extent in enumerate(shape)
    ]
    numbers = [{end: number for number, end in enumerate(each)} for each in ends]
    counts = np.zeros([max(0, len(each) - 1) for each in ends], np.int64)
    for ranges in held:
        # Usually each dimension has one range; if it has several, each is combined with each of the
        # other dimensions.
        for box in product(*ranges):
            parts = zip(numbers, box, strict=True)
            counts[tuple(slice(known[r.start], known[r.stop]) for known, r in parts)] += 1
    if (counts == 1).all():
        return prod(shape), False
    sizes = np.ones((), np.int64)
    for each in ends:
        sizes = np.multiply.outer(sizes, np.diff(each))
    return int(sizes[counts > 0].sum()), bool((counts[sizes > 0] > 1).any())


def _select_block(layout: TensorLayout, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the indexes of a block: slices, or arrays if a strided shard has several ranges."""
    ranges = find_block_ranges(layout, shape)
    if all(len(each) <= 1 for each in ranges):
        return tuple(slice(each[0].start, each[0].stop) for each in ranges)
    return np.ix_(*(np.concatenate([np.asarray(part) for part in each]) for each in ranges))


def _reduce_partial_values(block: JoinBlock, load: Callable[[int], _Array]) -> _Array:
    first = load(block.ranks[0])
    if len(block.ranks) == 1:
        return first
    reduction = next(each.reduction for each in block.layout.placements if each.reduction)
    is_exact = first.dtype.kind in "biu"
    kind: Any = first.dtype if is_exact else np.result_type(first.dtype, np.float64)
    total: _Array = first.astype(kind)
    for rank in block.ranks[1:]:
        REDUCTIONS[reduction](total, load(rank), out=total)
    if reduction == "avg":
        total = total / len(block.ranks)
    return total.astype(first.dtype)

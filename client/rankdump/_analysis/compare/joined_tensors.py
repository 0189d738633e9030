"""Tensors of the whole model from the parts of all ranks: by their layouts, and where there are
none by the extents of the other side, and its elements where these do not decide.

What a layout says is certain. A way to join that was chosen for its result is called inferred: it
may hide a defect that happens to fit.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import permutations, product
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from rankdump._analysis.compare.joined_programs import describe_ranks
from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    DumpedTensor,
    ElementTolerances,
)
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._analysis.reader.shard_join import TensorShard, join_shards, plan_join
from rankdump._analysis.reader.tensor_loader import load
from rankdump._analysis.reader.tree import Entry
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_Array: TypeAlias = "npt.NDArray[Any]"
_NEAR_FACTOR, _NEAR_DISTANCE = 10.0, 1e-6
"""Distances up to so many times the least one, and so much more, say nothing of the way."""
_COPY, _SUM = "taken from the first", "added up"
"""Texts of two ways."""


class ActivationKind(Enum):
    """What a tensor without a layout is, for the ways to join it."""

    NONE = "parameter or gradient of one"
    VALUE = "activation"
    GRADIENT = "gradient of an activation"


@dataclass(frozen=True, slots=True)
class JoinWay:
    """A way to make one tensor of those that ranks have."""

    text: str
    """What it does: `joined along dimension 0`."""
    shape: tuple[int, ...]
    """Of the result."""
    join: Callable[[Sequence[_Array]], _Array]
    priority: int = 0
    """The likelier way has the lower one."""


def find_activation_kind(entry: Entry | None) -> ActivationKind:
    """Return what a tensor is, by the names of its operator."""
    if entry is None or entry.op_type == PARAMETER_OP_TYPE:
        return ActivationKind.NONE
    is_gradient = entry.op_name.startswith(GRADIENTS_PREFIX)
    return ActivationKind.GRADIENT if is_gradient else ActivationKind.VALUE


class JoinedTensor(NamedTuple):
    """A tensor of the whole model, and what is to be said about it."""

    array: _Array
    findings: tuple[str, ...]
    replicas: tuple[tuple[_Array, _Array], ...] = ()
    """Arrays of ranks that should have the same elements, and have not."""
    replica_ranks: str = ""
    """The ranks of the replicas in words."""
    is_sum: bool = False
    """Whether the replicas are terms of a sum that the other side has."""

    @property
    def copies(self) -> list[_Array]:
        """The arrays of other ranks that should be the whole tensor as well."""
        return [each for first, each in self.replicas if first is self.array]


def list_join_ways(shapes: Sequence[tuple[int, ...]], *, kind: ActivationKind) -> list[JoinWay]:
    """Return the ways to join arrays of these shapes that have no layout, in rank order.

    Parameters and their gradients are replicas on all ranks. Other arrays may be replicas, parts
    along one dimension in blocks or in turns, or terms of a sum or a mean. The loss of a rank is
    most often a mean over its own part of the batch: gradients of such a part are as many times
    larger as there are parts.
    """
    first, count = shapes[0], len(shapes)
    same = all(shape == first for shape in shapes)
    ways = [JoinWay(_COPY, first, lambda arrays: arrays[0], 2)] if same else []
    if kind is ActivationKind.NONE or count == 1:
        return ways
    for dimension in range(len(first)):
        if all(_drop(shape, dimension) == _drop(first, dimension) for shape in shapes):
            ways += _list_dimension_ways(shapes, dimension)
    if kind is ActivationKind.GRADIENT:
        # Of parts that are micro-batches, the loss of each may be divided already.
        divisors = [each for each in range(2, count + 1) if count % each == 0]
        ways += [_divide(way, each) for way in ways[same:] for each in divisors]
    if same:
        ways += _list_nested_ways(first, count, kind)
        # The loss of a batch is the mean of those of its parts.
        priority = 1 if prod(first) == 1 else 3
        ways.append(JoinWay("averaged", first, lambda arrays: _add(arrays, count), priority))
        ways.append(JoinWay(_SUM, first, lambda arrays: _add(arrays, 1), 4))
    return ways


def _list_nested_ways(shape: tuple[int, ...], count: int, kind: ActivationKind) -> list[JoinWay]:
    """Return the ways to join arrays of one shape on a mesh of two dimensions: neighbours along one
    dimension of the tensor, then the results along another.
    """
    ways: list[JoinWay] = []
    for inner in range(2, count // 2 + 1):
        if count % inner:
            continue
        for first, second in permutations(range(len(shape)), 2):
            way = _make_nested_way(shape, (inner, count // inner), (first, second))
            ways.append(way)
            if kind is ActivationKind.GRADIENT:
                ways += [_divide(way, inner), _divide(way, count // inner)]
    return ways


def _make_nested_way(
    shape: tuple[int, ...], extents: tuple[int, int], dimensions: tuple[int, int]
) -> JoinWay:
    sizes = list(shape)
    for extent, dimension in zip(extents, dimensions, strict=True):
        sizes[dimension] *= extent
    inner = extents[0]

    def join(arrays: Sequence[_Array]) -> _Array:
        joined = [
            np.concatenate(arrays[at : at + inner], axis=dimensions[0])
            for at in range(0, len(arrays), inner)
        ]
        return np.concatenate(joined, axis=dimensions[1])

    text = f"joined {inner} by {inner} along dimension {dimensions[0]} and then {dimensions[1]}"
    return JoinWay(text, tuple(sizes), join)


def _divide(way: JoinWay, divisor: int) -> JoinWay:
    return JoinWay(
        f"{way.text} and divided by {divisor}",
        way.shape,
        lambda arrays: np.asarray(way.join(arrays) / divisor, arrays[0].dtype),
    )


def _list_dimension_ways(shapes: Sequence[tuple[int, ...]], dimension: int) -> list[JoinWay]:
    first = shapes[0]
    extent = sum(shape[dimension] for shape in shapes)
    shape = (*first[:dimension], extent, *first[dimension + 1 :])
    ways = [
        JoinWay(
            f"joined along dimension {dimension}",
            shape,
            lambda arrays: np.concatenate(arrays, axis=dimension),
        )
    ]
    if len({each[dimension] for each in shapes}) == 1 and first[dimension] > 1:
        ways.append(
            JoinWay(
                f"joined in turns along dimension {dimension}",
                shape,
                lambda arrays: np.stack(arrays, axis=dimension + 1).reshape(shape),
            )
        )
    return ways


def _drop(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _add(arrays: Sequence[_Array], divisor: int) -> _Array:
    kind = np.result_type(arrays[0].dtype, np.float64)
    total = sum((array.astype(kind) for array in arrays[1:]), arrays[0].astype(kind))
    # Arithmetic makes a number of an array without dimensions.
    return np.asarray(total / divisor, arrays[0].dtype)


def load_joined_pair(a: DumpedTensor, b: DumpedTensor) -> tuple[JoinedTensor, JoinedTensor] | str:
    """Return both tensors of a pair, joined; or why no way to join them gives one shape.

    CorruptedError when shards contradict each other, or do not cover their tensor.
    """
    sides = [_load_side(name, each) for name, each in (("a", a), ("b", b))]
    fitting = [
        pair for pair in product(sides[0], sides[1]) if pair[0].way.shape == pair[1].way.shape
    ]
    if not fitting:
        # A tensor in fewer dimensions, or without extents of 1, is the caller's to decide.
        if all(len(side) == 1 for side in sides):
            fitting = [(sides[0][0], sides[1][0])]
        else:
            shapes = [_describe_side(name, side) for name, side in zip("ab", sides, strict=True)]
            return f"no way to join the ranks gives one shape: {' against '.join(shapes)}"
    if len(fitting) == 1:
        left, right = (each.make("extents") for each in fitting[0])
        return left, right
    left, right = _choose_ways(fitting)
    return (
        _find_replicas(left, sides[0]) or left.make("elements"),
        _find_replicas(right, sides[1]) or right.make("elements"),
    )


def _choose_ways(fitting: Sequence[tuple[_SideWay, _SideWay]]) -> tuple[_SideWay, _SideWay]:
    """Return the ways whose results are nearest to each other; of nearly equal ones the likeliest,
    as two ranks of one side are those of the other in whatever way both are joined.
    """
    found = [
        (pair, _measure_distance(*(each.way.join(each.arrays) for each in pair)))
        for pair in fitting
    ]
    limit = _NEAR_FACTOR * min(distance for _, distance in found) + _NEAR_DISTANCE
    near = [
        (max(each.way.priority for each in pair), distance, pair)
        for pair, distance in found
        if distance <= limit
    ]
    return min(near, key=lambda each: each[:2], default=(0, 0.0, fitting[0]))[2]


def _find_replicas(way: _SideWay, side: Sequence[_SideWay]) -> JoinedTensor | None:
    """Return the replicas of a side, if the other one has their sum: operators return such terms
    where a reduction is missing, which is to be told.
    """
    if way.way.text != _SUM:
        return None
    same = next(each for each in side if each.way.text == _COPY and each.arrays is way.arrays)
    return same.make("elements")._replace(is_sum=True)


class _SideWay(NamedTuple):
    """A way to join the tensor of one side, and the arrays of its ranks."""

    side: str
    tensor: DumpedTensor
    way: JoinWay
    arrays: Sequence[_Array]
    findings: tuple[str, ...] = ()
    """On how the arrays were joined from parts that layouts describe."""
    certain: JoinedTensor | None = None
    """Where a layout says how, or there is nothing to join."""

    def make(self, evidence: str) -> JoinedTensor:
        """Return the joined tensor; `evidence` is what the way was inferred from."""
        if self.certain is not None:
            return self.certain
        array = self.way.join(self.arrays)
        if len(self.arrays) == 1:
            return JoinedTensor(array, self.findings)
        ranks = f"{self.side}: {describe_ranks(self.tensor)}"
        if array is not self.arrays[0]:
            text = f"{ranks} {self.way.text}, inferred from {evidence}"
            return JoinedTensor(array, (*self.findings, text))
        replicas = tuple((array, each) for each in self.arrays[1:])
        named = f"{describe_ranks(self.tensor)} of {self.side}"
        return JoinedTensor(array, self.findings, replicas, named)


def _load_side(side: str, tensor: DumpedTensor) -> list[_SideWay]:
    """Return the ways to join the tensor of a side: one, where nothing has to be inferred."""
    if not tensor.parts:
        assert tensor.entry is not None
        return [_make_certain(side, tensor, JoinedTensor(load(tensor.entry), ()))]
    if tensor.layout is not None:
        found = [_join_by_layout(side, tensor, parts) for parts in _list_meshes(tensor.parts)]
        if len(found) == 1:
            return [_make_certain(side, tensor, found[0])]
    else:
        found = [JoinedTensor(load(entry), ()) for entry in tensor.parts]
    arrays, kind = [each.array for each in found], find_activation_kind(tensor.parts[0])
    findings = tuple(dict.fromkeys(text for each in found for text in each.findings))
    return [
        _SideWay(side, tensor, way, group, findings)
        for group in _list_groups(arrays)
        for way in list_join_ways([each.shape for each in group], kind=kind)
    ]


def _list_meshes(parts: Sequence[Entry]) -> list[list[Entry]]:
    """Return the parts of each mesh and micro-batch: other meshes may have the same tensor, or that
    of another part of the batch.
    """
    meshes: dict[tuple[object, ...], list[Entry]] = {}
    for entry in parts:
        record = entry.record
        if record is not None and record.layout is not None:
            key = record.layout.mesh.list_ranks(), record.microbatch
            meshes.setdefault(key, []).append(entry)
    return list(meshes.values())


def _list_groups(arrays: Sequence[_Array]) -> list[Sequence[_Array]]:
    """Return the arrays, and those of them that have no copy before them, if these are fewer: some
    ranks have the same, as those of a tensor-parallel group have of a batch.
    """
    first: dict[tuple[object, ...], _Array] = {}
    for array in arrays:
        digest = xxhash.xxh3_128_digest(np.ascontiguousarray(array).view(np.uint8).data)
        first.setdefault((array.dtype, array.shape, digest), array)
    unique = list(first.values())
    if len(unique) == 1:
        return [unique]
    return [arrays, unique] if len(unique) < len(arrays) else [arrays]


def _make_certain(side: str, tensor: DumpedTensor, joined: JoinedTensor) -> _SideWay:
    shape = tuple(joined.array.shape)
    way = JoinWay("", shape, lambda arrays: joined.array)
    return _SideWay(side, tensor, way, (), certain=joined)


def _join_by_layout(side: str, tensor: DumpedTensor, parts: Sequence[Entry]) -> JoinedTensor:
    name, entries = tensor.slot_name, {entry.key.rank: entry for entry in parts}
    shards = [
        TensorShard(rank, record.shape, record.layout, record.digest)
        for rank, entry in entries.items()
        if (record := entry.record) is not None and record.layout is not None
    ]
    plan = plan_join(shards, name=f"{side}: {name}")
    with warnings.catch_warnings():
        # The findings name them.
        warnings.simplefilter("ignore")
        array = join_shards(plan, lambda rank: load(entries[rank]), name=name)
    how = ", ".join(dict.fromkeys(map(str, shards[0].layout.placements)))
    findings = (f"{side}: joined by the layout of each rank: {how}",)
    replicas = _load_replicas(plan.different_replicas, entries)
    named = " or ".join(f"ranks {', '.join(map(str, each))}" for each in plan.different_replicas)
    return JoinedTensor(array, findings, replicas, f"{named} of {side}")


def _load_replicas(
    different: Sequence[tuple[int, ...]], entries: Mapping[int, Entry]
) -> tuple[tuple[_Array, _Array], ...]:
    return tuple(
        (load(entries[ranks[0]]), load(entries[rank])) for ranks in different for rank in ranks[1:]
    )


def find_drift(joined: JoinedTensor, tolerances: ElementTolerances) -> str:
    """Return what is to be said of replicas that differ; empty where they are within the
    tolerances.
    """
    found = [measure_difference(*pair, tolerances).measures for pair in joined.replicas]
    apart = [each for each in found if each.unequal]
    if not apart:
        return ""
    if joined.is_sum:
        terms = f"{joined.replica_ranks} are terms of the sum that the other side has"
        return f"{REPLICA_FINDING_PREFIX}{terms}: a reduction is missing"
    largest = max(math.inf if each.nonfinite_apart else each.max_absolute for each in apart)
    return f"{REPLICA_FINDING_PREFIX}{joined.replica_ranks} differ by at most {largest:.4g}"


def _describe_side(name: str, side: Sequence[_SideWay]) -> str:
    shapes = dict.fromkeys(str(list(each.way.shape)) for each in side)
    return f"{name} {' or '.join(shapes) or 'parts of different shapes'}"


def _measure_distance(a: _Array, b: _Array) -> float:
    """Return the relative Euclidean distance; infinity where a side is not finite."""
    kind = np.result_type(a.dtype, b.dtype, np.float64)
    with np.errstate(all="ignore"):
        wide = b.astype(kind)
        distance = float(np.linalg.norm((a.astype(kind) - wide).reshape(-1)))
        norm = float(np.linalg.norm(wide.reshape(-1)))
    if not np.isfinite(distance):
        return float("inf")
    return distance / norm if norm else distance

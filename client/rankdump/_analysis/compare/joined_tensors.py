"""Tensors of the whole model, joined from the parts of all ranks: according to their layouts;
without layouts, according to the extents on the other side, and to its elements where the extents
do not decide.

What a layout says is certain. If a way to join was chosen for its result, it is called inferred,
because it may hide a defect that happens to fit. Parts are not gathered in memory: a block of a
joined tensor is read from its parts when it is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, permutations, product
from math import prod
from typing import NamedTuple, TypeAlias

import numpy as np

from rankdump._analysis.compare.joined_elements import (
    DividedElements,
    PlacedElements,
    PlacedPart,
    ReducedElements,
    compute_content_digest,
    list_sample_spans,
    measure_distance,
    place_shards,
)
from rankdump._analysis.compare.joined_programs import describe_part_ranks
from rankdump._analysis.compare.report import (
    REPLICA_FINDING_PREFIX,
    DumpedTensor,
    ElementTolerances,
)
from rankdump._analysis.compare.tensor_blocks import ArrayElements, TensorElements
from rankdump._analysis.compare.tensor_measures import measure_difference
from rankdump._analysis.reader.shard_join import TensorShard, plan_join
from rankdump._analysis.reader.tensor_loader import opened_parts
from rankdump._analysis.reader.tree import Entry
from rankdump._core.manifest import ManifestRecord
from rankdump._core.selection import GRADIENTS_PREFIX, has_scope_prefix
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_NEAR_FACTOR, _NEAR_DISTANCE = 10.0, 1e-6
"""Ways to join count as equally near if their distances are at most this factor times the smallest
distance, plus this distance.
"""
_SURE_DISTANCE, _APART_DISTANCE = 0.02, 0.5
"""A sample decides if one way is nearer than the first distance, and all other ways are farther
than the second.
"""
_COPY, _SUM = "taken from the first", "added up"
"""Texts for two ways of joining."""
_Indices: TypeAlias = "tuple[range, ...]"


class ActivationKind(Enum):
    """Kind of a tensor without a layout, which decides on the ways to join it."""

    NONE = "parameter or gradient of one"
    VALUE = "activation"
    GRADIENT = "gradient of an activation"


@dataclass(frozen=True, slots=True)
class JoinWay:
    """A way to make one tensor from the tensors of the ranks."""

    text: str
    """Text about the way, such as `joined along dimension 0`."""
    shape: tuple[int, ...]
    """Shape of the result."""
    join: Callable[[Sequence[TensorElements]], TensorElements]
    priority: int = 0
    """Priority of the way; a likelier way has a lower number."""


def find_activation_kind(named: Entry | ManifestRecord | None) -> ActivationKind:
    """Return the kind of a tensor, judged by the names of its operator."""
    if named is None or named.op_type == PARAMETER_OP_TYPE:
        return ActivationKind.NONE
    is_gradient = has_scope_prefix(named.op_name, GRADIENTS_PREFIX)
    return ActivationKind.GRADIENT if is_gradient else ActivationKind.VALUE


class JoinedTensor(NamedTuple):
    """A tensor of the whole model, with remarks about how it was joined."""

    elements: TensorElements
    findings: tuple[str, ...]
    replicas: tuple[tuple[TensorElements, TensorElements], ...] = ()
    """Pairs of the ranks' tensors that should have the same elements and do not."""
    replica_ranks: str = ""
    """Text with the ranks of these tensors."""
    is_sum: bool = False
    """Whether the tensors are terms of a sum that the other side has."""

    @property
    def copies(self) -> list[TensorElements]:
        """Tensors of other ranks that should also equal the whole tensor."""
        return [each for first, each in self.replicas if first is self.elements]


def list_join_ways(shapes: Sequence[tuple[int, ...]], *, kind: ActivationKind) -> list[JoinWay]:
    """Return the ways to join tensors without a layout that have these shapes, in rank order.

    Parameters and their gradients are replicas on all ranks. Other tensors may be replicas, parts
    along one dimension (in blocks, in turns or in zigzag), or terms of a sum or a mean. The loss of
    a rank is most often a mean over its own part of the batch; gradients of parts are then larger
    by a factor that is the number of parts.
    """
    first, count = shapes[0], len(shapes)
    same = all(shape == first for shape in shapes)
    ways = [JoinWay(_COPY, first, lambda parts: parts[0], 2)] if same else []
    if kind is ActivationKind.NONE or count == 1:
        return ways
    for dimension in range(len(first)):
        if all(_drop(shape, dimension) == _drop(first, dimension) for shape in shapes):
            ways += _list_dimension_ways(shapes, dimension)
    if kind is ActivationKind.GRADIENT:
        # If the parts are micro-batches, the loss of each may be divided already.
        divisors = [each for each in range(2, count + 1) if count % each == 0]
        ways += [_divide(way, each) for way in ways[same:] for each in divisors]
    if same:
        ways += _list_nested_ways(first, count, kind)
        # The loss of a batch is the mean of the losses of its parts.
        priority = 1 if prod(first) == 1 else 3
        mean = partial(ReducedElements, divisor=count)
        ways += [
            JoinWay("averaged", first, mean, priority),
            JoinWay(_SUM, first, ReducedElements, 4),
        ]
    return ways


def _list_nested_ways(shape: tuple[int, ...], count: int, kind: ActivationKind) -> list[JoinWay]:
    """Return the ways to join tensors of one shape on a mesh with two dimensions: neighbours are
    joined along one dimension of the tensor, then the results along another.
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
    inner, outer = extents
    first, second = dimensions
    sizes = list(shape)
    sizes[first] *= inner
    sizes[second] *= outer
    indices: list[dict[int, _Indices]] = [
        {first: (_cut(at % inner, shape[first]),), second: (_cut(at // inner, shape[second]),)}
        for at in range(inner * outer)
    ]
    text = f"joined {inner} by {outer} along dimension {first} and then {second}"
    return _make_placed_way(text, tuple(sizes), indices)


def _cut(number: int, size: int) -> range:
    return range(number * size, (number + 1) * size)


def _make_placed_way(
    text: str,
    shape: tuple[int, ...],
    indices: Sequence[Mapping[int, _Indices]],
    priority: int = 0,
) -> JoinWay:
    """Return the way that places each part at indexes along some dimensions, and along all of any
    other dimension.
    """

    def join(parts: Sequence[TensorElements]) -> TensorElements:
        ranges = (
            [own.get(at, (range(extent),)) for at, extent in enumerate(part.shape)]
            for part, own in zip(parts, indices, strict=True)
        )
        placed = [
            PlacedPart(part, part.shape, each) for part, each in zip(parts, ranges, strict=True)
        ]
        return PlacedElements(placed, shape, np.result_type(*(part.dtype for part in parts)))

    return JoinWay(text, shape, join, priority)


def _divide(way: JoinWay, divisor: int) -> JoinWay:
    return JoinWay(
        f"{way.text} and divided by {divisor}",
        way.shape,
        lambda parts: DividedElements(way.join(parts), divisor, parts[0].dtype),
        way.priority,
    )


def _list_dimension_ways(shapes: Sequence[tuple[int, ...]], dimension: int) -> list[JoinWay]:
    first, count = shapes[0], len(shapes)
    sizes = [shape[dimension] for shape in shapes]
    ends = list(accumulate(sizes))
    shape = (*first[:dimension], ends[-1], *first[dimension + 1 :])
    blocks = [(range(end - size, end),) for size, end in zip(sizes, ends, strict=True)]
    found: list[tuple[str, Sequence[_Indices], int]] = [("joined", blocks, 0)]
    if len(set(sizes)) == 1 and sizes[0] > 1:
        turns = [(range(at, ends[-1], count),) for at in range(count)]
        found.append(("joined in turns", turns, 0))
        if sizes[0] % 2 == 0:
            found.append(("joined in zigzag", list_zigzag_indices(count, sizes[0]), 1))
    along = f"along dimension {dimension}"
    return [
        _make_placed_way(f"{how} {along}", shape, [{dimension: own} for own in indices], priority)
        for how, indices, priority in found
    ]


def list_zigzag_indices(count: int, size: int) -> list[tuple[range, range]]:
    """Return the indexes of parts that each consist of two chunks, as context parallelism cuts a
    sequence: the first and the last chunk, the second and the last but one, and so on.
    """
    half = size // 2
    return [(_cut(at, half), _cut(2 * count - 1 - at, half)) for at in range(count)]


def _drop(shape: tuple[int, ...], dimension: int) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


@contextmanager
def opened_joined_pair(
    a: DumpedTensor, b: DumpedTensor
) -> Generator[tuple[JoinedTensor, JoinedTensor] | str]:
    """Open both tensors of a pair and yield them joined; if no way to join them gives equal shapes,
    yield why.

    CorruptedError when shards contradict each other, or do not cover their tensor.
    """
    with opened_parts([*a.files, *b.files]) as opened:
        parts = [ArrayElements(each) if isinstance(each, np.ndarray) else each for each in opened]
        own = dict(zip(a.files, parts, strict=False))
        other = dict(zip(b.files, parts[len(a.files) :], strict=True))
        yield _join_pair([_list_side_ways("a", a, own), _list_side_ways("b", b, other)])


def _join_pair(sides: Sequence[list[_SideWay]]) -> tuple[JoinedTensor, JoinedTensor] | str:
    fitting = [
        pair for pair in product(sides[0], sides[1]) if pair[0].way.shape == pair[1].way.shape
    ]
    if not fitting:
        # The caller compares tensors whose shapes differ, such as in extents of 1.
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
    """Return the ways whose results are nearest to each other. Among ways that are nearly as near,
    return the likeliest, because if two ranks have the same data on both sides, every way of
    joining both gives equal results.
    """
    joined = [[each.way.join(each.parts) for each in pair] for pair in fitting]
    surest = _choose_by_sample(joined)
    if surest is not None:
        return fitting[surest]
    found = [(pair, measure_distance(a, b)) for pair, (a, b) in zip(fitting, joined, strict=True)]
    limit = _NEAR_FACTOR * min(distance for _, distance in found) + _NEAR_DISTANCE
    near = [
        # Rounded, because distances of the same elements in another order differ by their rounding
        # error.
        (max(each.way.priority for each in pair), float(f"{distance:.9e}"), pair)
        for pair, distance in found
        if distance <= limit
    ]
    return min(near, key=lambda each: each[:2], default=(0, 0.0, fitting[0]))[2]


def _choose_by_sample(joined: Sequence[Sequence[TensorElements]]) -> int | None:
    """Return the index of the pair whose sample is near, if the samples of all other pairs are far
    apart.
    """
    spans = [list_sample_spans(a.size) for a, _ in joined]
    if not all(spans):
        return None
    found = [measure_distance(a, b, spans=own) for (a, b), own in zip(joined, spans, strict=True)]
    best = min(found)
    is_sure = best < _SURE_DISTANCE and sum(each < _APART_DISTANCE for each in found) == 1
    return found.index(best) if is_sure else None


def _find_replicas(way: _SideWay, side: Sequence[_SideWay]) -> JoinedTensor | None:
    """Return the tensors of a side that are terms of a sum which the other side has; None if they
    are not. An operator returns such terms if a reduction is missing, so the comparison has to
    report them.
    """
    if way.way.text != _SUM:
        return None
    same = next(each for each in side if each.way.text == _COPY and each.parts is way.parts)
    return same.make("elements")._replace(is_sum=True)


class _SideWay(NamedTuple):
    """A way to join the tensor of one side, with the tensors of its ranks."""

    side: str
    tensor: DumpedTensor
    way: JoinWay
    parts: Sequence[TensorElements]
    findings: tuple[str, ...] = ()
    """Remarks about how parts with layouts were joined."""
    certain: JoinedTensor | None = None
    """The joined tensor, if a layout determines it or there is nothing to join."""

    def make(self, evidence: str) -> JoinedTensor:
        """Return the joined tensor; `evidence` says what the way was inferred from."""
        if self.certain is not None:
            return self.certain
        whole = self.way.join(self.parts)
        if len(self.parts) == 1:
            return JoinedTensor(whole, self.findings)
        ranks = f"{self.side}: {describe_part_ranks(self.tensor)}"
        if whole is not self.parts[0]:
            text = f"{ranks} {self.way.text}, inferred from {evidence}"
            return JoinedTensor(whole, (*self.findings, text))
        replicas = tuple((whole, each) for each in self.parts[1:])
        named = f"{describe_part_ranks(self.tensor)} of {self.side}"
        return JoinedTensor(whole, self.findings, replicas, named)


def _list_side_ways(
    side: str, tensor: DumpedTensor, opened: Mapping[Entry, TensorElements]
) -> list[_SideWay]:
    """Return the ways to join the tensor of a side; only one, if nothing has to be inferred."""
    if not tensor.parts:
        assert tensor.entry is not None
        return [_make_certain(side, tensor, JoinedTensor(opened[tensor.entry], ()))]
    digests: list[object] = []
    if tensor.layout is not None:
        found = [_join_by_layout(side, tensor, each, opened) for each in _list_meshes(tensor.parts)]
        if len(found) == 1:
            return [_make_certain(side, tensor, found[0])]
    else:
        found = [JoinedTensor(opened[entry], ()) for entry in tensor.parts]
        digests = [entry.record.digest for entry in tensor.parts if entry.record is not None]
    parts, kind = [each.elements for each in found], find_activation_kind(tensor.parts[0])
    findings = tuple(dict.fromkeys(text for each in found for text in each.findings))
    if len(digests) < len(parts) or not all(digests):
        digests = [compute_content_digest(each) for each in parts]
    return [
        _SideWay(side, tensor, way, group, findings)
        for group in _list_groups(parts, digests)
        for way in list_join_ways([each.shape for each in group], kind=kind)
    ]


def _list_meshes(parts: Sequence[Entry]) -> list[list[Entry]]:
    """Return the parts of each mesh and micro-batch, because other meshes may have the same tensor,
    or that of another part of the batch.
    """
    meshes: dict[tuple[object, ...], list[Entry]] = {}
    for entry in parts:
        record = entry.record
        if record is not None and record.layout is not None:
            key = record.layout.mesh.list_ranks(), record.microbatch
            meshes.setdefault(key, []).append(entry)
    return list(meshes.values())


def _list_groups(
    parts: Sequence[TensorElements], digests: Sequence[object]
) -> list[Sequence[TensorElements]]:
    """Return the list of all tensors and, if it is shorter, the list without repeated ones. Some
    ranks have the same tensor, as the ranks of a tensor-parallel group have the same batch.
    """
    first: dict[tuple[object, ...], TensorElements] = {}
    for part, digest in zip(parts, digests, strict=True):
        first.setdefault((part.dtype, part.shape, digest), part)
    unique = list(first.values())
    if len(unique) == 1:
        return [unique]
    return [parts, unique] if len(unique) < len(parts) else [parts]


def _make_certain(side: str, tensor: DumpedTensor, joined: JoinedTensor) -> _SideWay:
    way = JoinWay("", joined.elements.shape, lambda parts: joined.elements)
    return _SideWay(side, tensor, way, (), certain=joined)


def _join_by_layout(
    side: str,
    tensor: DumpedTensor,
    entries: Sequence[Entry],
    opened: Mapping[Entry, TensorElements],
) -> JoinedTensor:
    parts = {entry.key.rank: opened[entry] for entry in entries}
    shards = {
        entry.key.rank: TensorShard(entry.key.rank, record.shape, record.layout, record.digest)
        for entry in entries
        if (record := entry.record) is not None and record.layout is not None
    }
    plan = plan_join(list(shards.values()), name=f"{side}: {tensor.slot_name}")
    layout = next(iter(shards.values())).layout
    how = ", ".join(dict.fromkeys(map(str, layout.placements)))
    findings = (f"{side}: joined by the layout of each rank: {how}",)
    replicas = tuple(
        (parts[ranks[0]], parts[rank]) for ranks in plan.different_replicas for rank in ranks[1:]
    )
    named = " or ".join(f"ranks {', '.join(map(str, each))}" for each in plan.different_replicas)
    return JoinedTensor(place_shards(plan, parts), findings, replicas, f"{named} of {side}")


def find_drift(joined: JoinedTensor, tolerances: ElementTolerances) -> str:
    """Return a sentence about replicas that differ; empty if they are within the tolerances."""
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

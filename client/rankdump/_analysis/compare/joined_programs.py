"""Programs of all ranks of a dump, joined into one program, for dumps with different layouts: a
call that ranks have in common becomes one call, and its tensors are those of the whole model. Pure;
elements stay on disk.

If a tensor has the same elements on each rank, the tensor of the first rank is used. Any other
tensor gets the files of all ranks as its parts, which `joined_tensors` joins when elements are
compared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TypeAlias

from rankdump._analysis.compare.merged_shards import guess_whole_tensors, merge_shards
from rankdump._analysis.compare.report import (
    NO_STATISTICS,
    DumpedCall,
    DumpedProgram,
    DumpedTensor,
)
from rankdump._analysis.reader.tree import Entry
from rankdump._core.number_ranges import ranges
from rankdump._core.record import TensorSide
from rankdump._core.selection import GRADIENTS_PREFIX, has_scope_prefix
from rankdump._core.tensor_layout import PlacementKind, TensorLayout
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

_CALL_NUMBER = re.compile(r"-op\d+$")
_AFTER_MICROBATCHES = 1 << 62
_RankCall: TypeAlias = "tuple[int, DumpedCall]"
_OUTSIDE = "calls outside of micro-batches"


def have_same_layout(a: Sequence[DumpedProgram], b: Sequence[DumpedProgram]) -> bool:
    """Return whether two dumps have the same number of micro-batches, and whether the tensors that
    both have are placed in the same way on equal meshes; only the first iteration of each is
    considered.
    """
    if count_microbatches(a) != count_microbatches(b):
        return False
    own, other = _list_placements(a), _list_placements(b)
    return all(own[place] == other[place] for place in own.keys() & other.keys())


def _list_placements(
    programs: Sequence[DumpedProgram],
) -> dict[tuple[str, TensorSide, int], object]:
    """Return the extents of the mesh and the placements of each tensor, by the name of the call,
    side and slot; None for a tensor without a layout.
    """
    first = min((program.iteration for program in programs), default=0)
    return {
        (call.op_name, tensor.side, tensor.slot): layout and (layout.mesh.shape, layout.placements)
        for program in programs
        if program.iteration == first
        for call in program.calls
        for tensor in call.tensors
        for layout in [tensor.layout]
    }


def count_microbatches(programs: Iterable[DumpedProgram]) -> int:
    """Return the number of micro-batches; 0 if tensors have no micro-batch numbers."""
    calls = (call for program in programs for call in program.calls)
    numbers = (number for call in calls if (number := call.microbatch) is not None)
    return max(numbers, default=-1) + 1


def join_programs(
    programs: Sequence[DumpedProgram], notes: list[str], *, joins_microbatches: bool = False
) -> tuple[list[DumpedProgram], int]:
    """Return one program for each iteration, with the number of the lowest rank, and how many calls
    were left out. The calls of all micro-batches may be joined into one call. Calls of the same
    operators outside of micro-batches are left out then, because torch runs a stage once with
    made-up data.

    Adds a note for tensors that cannot be joined, because only their statistics or first elements
    are known and differ between ranks; the tensor of the first rank is used in place of them.
    """
    ranks_of: defaultdict[int, list[DumpedProgram]] = defaultdict(list)
    for program in programs:
        ranks_of[program.iteration].append(program)
    lowest = min((program.rank for program in programs), default=0)
    left: Counter[str] = Counter()
    joined = [
        DumpedProgram(lowest, iteration, _join_calls(ranks_of[iteration], left, joins_microbatches))
        for iteration in sorted(ranks_of)
    ]
    outside = left.pop(_OUTSIDE, 0)
    notes += [f"{what}: {count:,}" for what, count in left.items()]
    return joined, outside


def _join_calls(
    programs: Sequence[DumpedProgram], left: Counter[str], joins_microbatches: bool
) -> tuple[DumpedCall, ...]:
    """Return the calls of all ranks, in the order of the first time stamps of their tensors.

    The nth call with a name counts as the same call on all ranks, or in all micro-batches, that
    have it.
    """
    found: defaultdict[tuple[str, int], list[_RankCall]] = defaultdict(list)
    for program in sorted(programs, key=lambda each: each.rank):
        counts: Counter[tuple[str, int | None]] = Counter()
        for call in sorted(program.calls, key=_get_microbatch):
            name, number = _find_logical_name(call), call.microbatch
            if joins_microbatches:
                name = _CALL_NUMBER.sub("", name)
                # In sorted order, calls without a micro-batch number come last.
                if number is None and counts[name, 0]:
                    left[_OUTSIDE] += 1
                    continue
            found[name, counts[name, number]].append((program.rank, call))
            counts[name, number] += 1
    ordered = sorted(found.items(), key=lambda each: _find_time([call for _, call in each[1]]))
    return tuple(
        _join_call(position, f"{name}-op{number}" if is_numbered else name, calls, left)
        for position, ((name, number), calls) in enumerate(ordered)
        for is_numbered in [joins_microbatches and calls[0][1].microbatch is not None]
    )


def _get_microbatch(call: DumpedCall) -> int:
    return _AFTER_MICROBATCHES if call.microbatch is None else call.microbatch


def _find_logical_name(call: DumpedCall) -> str:
    """Return the call's name in the whole model, which a layout may have if it differs from the
    name on the rank.
    """
    layouts = (tensor.layout for tensor in call.tensors)
    return next((each.logical_name for each in layouts if each and each.logical_name), call.op_name)


def _find_time(calls: Sequence[DumpedCall]) -> tuple[int, int]:
    found = (tensor.entry or tensor.row_record for call in calls for tensor in call.tensors)
    times = [
        each.key.timestamp_us if isinstance(each, Entry) else each.timestamp_us
        for each in found
        if each is not None
    ]
    return min(times, default=0), calls[0].position


def _join_call(
    position: int, name: str, calls: Sequence[_RankCall], left: Counter[str]
) -> DumpedCall:
    places: defaultdict[tuple[TensorSide, int], list[DumpedTensor]] = defaultdict(list)
    every = [call for _, call in calls]
    first, last = _find_stages(calls) or (every, every)
    for tensor in (*(t for c in first for t in c.inputs), *(t for c in last for t in c.outputs)):
        places[tensor.side, tensor.slot].append(tensor)
    tensors = [_join_tensor(each, every[0], left) for each in places.values()]
    return every[0]._replace(
        position=position,
        op_name=name,
        inputs=tuple(each for each in tensors if each.side is TensorSide.INPUT),
        outputs=tuple(each for each in tensors if each.side is TensorSide.OUTPUT),
    )


def _find_stages(
    calls: Sequence[_RankCall],
) -> tuple[Sequence[DumpedCall], Sequence[DumpedCall]] | None:
    """If these calls belong to stages of a pipeline, return the calls of the first and of the last
    stage. They do if the results of one rank are the inputs of the next rank.
    """
    of_ranks: defaultdict[int, list[DumpedCall]] = defaultdict(list)
    for rank, call in calls:
        of_ranks[rank].append(call)
    for ranks in (sorted(of_ranks), sorted(of_ranks, reverse=True)):
        pairs = list(pairwise(ranks))
        if pairs and all(_is_passed_on(of_ranks[a], of_ranks[b]) for a, b in pairs):
            return of_ranks[ranks[0]], of_ranks[ranks[-1]]
    return None


def _is_passed_on(a: Sequence[DumpedCall], b: Sequence[DumpedCall]) -> bool:
    returned = {_get_digest(tensor) for call in a for tensor in call.outputs} - {""}
    return any(_get_digest(tensor) in returned for call in b for tensor in call.inputs)


def _get_digest(tensor: DumpedTensor) -> str:
    known = tensor.fingerprint
    if tensor.digest or known is None or known.digest is None:
        return tensor.digest
    return f"{known.digest} {tensor.dtype} {tensor.shape}"


def _join_tensor(
    tensors: Sequence[DumpedTensor], call: DumpedCall, left: Counter[str]
) -> DumpedTensor:
    """Return the tensor of the whole model, given the tensors or parts that the ranks have."""
    first, layout = tensors[0], tensors[0].layout
    if _are_replicas(tensors):
        return first
    reason = _find_obstacle(tensors)
    if reason:
        merged = _merge_tensors(tensors, call)
        if merged is None:
            left[f"tensors compared as the first of their ranks has them, because {reason}"] += 1
        return merged or first
    merged = merge_shards(tensors)
    meshes = {each.mesh.list_ranks() for t in tensors if (each := t.layout) is not None}
    return first._replace(
        # With several meshes, each mesh has a tensor, and these are joined afterwards.
        shape=layout.global_shape if layout is not None and len(meshes) == 1 else None,
        digest="",
        statistics=NO_STATISTICS,
        parts=tuple(entry for tensor in tensors if (entry := tensor.entry) is not None),
        fingerprint=merged.fingerprint if merged is not None else None,
    )


def _merge_tensors(tensors: Sequence[DumpedTensor], call: DumpedCall) -> DumpedTensor | None:
    """Return the tensor of the whole model, computed from what is known of the ranks' tensors
    besides elements; None if that is not sufficient. Other meshes may have the same tensor, or that
    of another part of the batch.
    """
    groups: defaultdict[object, list[DumpedTensor]] = defaultdict(list)
    for tensor in tensors:
        layout = tensor.layout
        key = object() if layout is None else (layout.mesh.list_ranks(), tensor.microbatch)
        groups[key].append(tensor)
    merged = [each[0] if each[0].layout is None else merge_shards(each) for each in groups.values()]
    wholes = [each for each in merged if each is not None]
    has_file = any(tensor.entry is not None and tensor.layout is None for tensor in tensors)
    if len(wholes) < len(merged) or has_file:
        return None
    first = wholes[0]
    known = [(each.shape, each.statistics, each.fingerprint) for each in wholes]
    if all(each == known[0] for each in known):
        return first if first.statistics or first.fingerprint else None
    if call.op_type == PARAMETER_OP_TYPE:
        return None
    is_gradient = has_scope_prefix(call.op_name, GRADIENTS_PREFIX)
    return first._replace(guesses=guess_whole_tensors(wholes, is_gradient=is_gradient))


def _are_replicas(tensors: Sequence[DumpedTensor]) -> bool:
    """Return whether each rank has all elements of the tensor, and the same ones."""
    first = tensors[0]
    if not all(_is_whole(tensor.layout) for tensor in tensors):
        return False
    if len(tensors) == 1:
        return True
    alike = all((tensor.shape, tensor.dtype) == (first.shape, first.dtype) for tensor in tensors)
    digests = {tensor.digest for tensor in tensors}
    if digests != {""}:
        return alike and len(digests) == 1
    has_files = any(tensor.entry is not None for tensor in tensors)
    known = first.statistics, first.fingerprint
    return alike and not has_files and all((t.statistics, t.fingerprint) == known for t in tensors)


def _is_whole(layout: TensorLayout | None) -> bool:
    return layout is None or (
        not layout.flat_range
        and all(each.kind is PlacementKind.REPLICATE for each in layout.placements)
    )


def _find_obstacle(tensors: Sequence[DumpedTensor]) -> str:
    """Return why tensors cannot be joined; empty if they can be."""
    if any(tensor.entry is None for tensor in tensors):
        return "ranks have different statistics, and no elements"
    layouts = [tensor.layout for tensor in tensors]
    if any(tensor.is_sample for tensor in tensors):
        return "ranks have different first elements, and no others"
    if any(each is None for each in layouts) and any(layouts):
        return "some ranks have a layout, and others none"
    return ""


def describe_part_ranks(tensor: DumpedTensor) -> str:
    """Return the ranks of a tensor's parts as text: `ranks 0-3`."""
    ranks = sorted({entry.key.rank for entry in tensor.parts})
    if len(ranks) == 1:
        return f"micro-batches of rank {ranks[0]}"
    has_numbers = any(entry.record and entry.record.microbatch for entry in tensor.parts)
    return f"{'micro-batches of ' if has_numbers else ''}ranks {ranges(ranks)}"

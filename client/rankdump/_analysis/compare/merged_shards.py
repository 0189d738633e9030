"""Statistics and fingerprints of a tensor of the whole model, computed from those of its parts on
all ranks, without elements. Pure.

Extremes, sums and counts merge without an error: a mean is weighted by the numbers of elements, the
2-norm is the root of the sum of squares. Fingerprints add up. Of partial values, which are terms of
a sum, only the sketches add up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from rankdump._analysis.compare.report import NO_STATISTICS, DumpedTensor
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._analysis.reader.shard_join import JoinPlan, TensorShard, plan_join
from rankdump._layout.foreign_calls import L1NORM_ITEM
from rankdump.errors import RankdumpError

_DIGEST_RANGE = 1 << 64
_LINEAR_REDUCTIONS = ("sum", "avg")


def merge_shards(tensors: Sequence[DumpedTensor]) -> DumpedTensor | None:
    """Return the tensor of the whole model, with the statistics and the fingerprint that follow
    from those of its shards. None if the shards have neither, if their layouts do not place them in
    one tensor, or if replicas differ.
    """
    is_known = all(each.fingerprint is not None for each in tensors)
    if not is_known and not any(each.entry is None for each in tensors):
        return None
    shards = [
        TensorShard(at, each.shape, layout, _find_content(each))
        for at, each in enumerate(tensors)
        if (layout := each.layout) is not None and not layout.is_sample and each.shape is not None
    ]
    parts = {(each.layout.mesh, each.microbatch) for each in tensors if each.layout is not None}
    if len(shards) < len(tensors) or len(parts) > 1:
        return None
    try:
        plan = plan_join(shards, name="")
    except RankdumpError:  # the error is reported when the elements are joined
        return None
    if plan.different_replicas:
        return None
    used = [tensors[at] for block in plan.blocks for at in block.ranks]
    is_partial = any(len(block.ranks) > 1 for block in plan.blocks)
    return tensors[0]._replace(
        shape=plan.shape,
        digest="",
        statistics=NO_STATISTICS if is_partial else merge_statistics(used),
        entry=None,
        fingerprint=_add_fingerprints(plan, tensors),
        # The layout of the first shard says how the whole tensor was divided.
        row_record=tensors[0].record,
    )


def guess_whole_tensors(
    tensors: Sequence[DumpedTensor], *, is_gradient: bool
) -> tuple[DumpedTensor, ...]:
    """Return guesses, as flat tensors, what the ranks' tensors without a layout are together: parts
    of one tensor, all of them or without repeated ones. Gradients of parts may be larger by a
    factor that divides the number of parts, so divided gradients are guesses, too.
    """
    unique = {(each.shape, repr(sorted(each.statistics.items()))): each for each in tensors}
    found: list[DumpedTensor] = []
    for parts in (tensors, list(unique.values())):
        sizes = [prod(each.shape) for each in parts if each.shape is not None]
        if len(sizes) < len(parts) or len(parts) == 1 or (found and len(parts) == len(tensors)):
            continue
        joined = tensors[0]._replace(
            shape=(sum(sizes),),
            digest="",
            statistics=merge_statistics(parts),
            fingerprint=None,
        )
        found.append(joined)
        divisors = range(2, len(parts) + 1) if is_gradient else ()
        found += [
            joined._replace(statistics=_divide(joined.statistics, divisor))
            for divisor in divisors
            if len(parts) % divisor == 0
        ]
    if all(each.shape is not None and prod(each.shape) == 1 for each in tensors):
        found.append(_average_numbers(tensors))
    return tuple(found)


def _average_numbers(tensors: Sequence[DumpedTensor]) -> DumpedTensor:
    """Return the mean of tensors with one element, because the loss of a batch is the mean of the
    losses of its parts.
    """
    items = [item for item in ("max", "min", "avg") if item in tensors[0].statistics]
    values = {
        item: math.fsum(each.statistics.get(item, math.nan) for each in tensors) / len(tensors)
        for item in items
    }
    return tensors[0]._replace(digest="", statistics=values, fingerprint=None)


def _divide(statistics: Mapping[str, float], divisor: int) -> Mapping[str, float]:
    return {
        item: value if item.endswith("count") else value / divisor
        for item, value in statistics.items()
    }


class GuessedPair(NamedTuple):
    """A pair of tensors that two sets of ranks may have in common."""

    a: DumpedTensor
    b: DumpedTensor
    findings: tuple[str, ...]
    is_complete: bool
    """Whether the pair includes the tensors of all ranks."""


def list_guessed_pairs(a: DumpedTensor, b: DumpedTensor) -> list[GuessedPair]:
    """Return the guesses for two tensors that have equal numbers of elements, those for whole
    tensors first.
    """
    found: list[GuessedPair] = []
    for own, other in product((*a.guesses, a), (*b.guesses, b)):
        if own.shape is None or other.shape is None or prod(own.shape) != prod(other.shape):
            continue
        told = [_tell_guess("a", a, own), _tell_guess("b", b, other)]
        whole = all(not each.guesses for each in (own, other))
        found.append(GuessedPair(own, other, tuple(filter(None, told)), whole))
    return found


def _tell_guess(side: str, tensor: DumpedTensor, chosen: DumpedTensor) -> str:
    if not tensor.guesses:
        return ""
    if chosen is tensor:
        return f"{side}: ranks have different statistics, and those of the first one are compared"
    return f"{side}: statistics of all ranks together, inferred from statistics"


def _find_content(tensor: DumpedTensor) -> str:
    """Return a value that replicas have in common: the digest of the elements, or whatever else is
    known.
    """
    known = tensor.fingerprint
    if tensor.digest:
        return tensor.digest
    return str(known.digest) if known is not None else repr(sorted(tensor.statistics.items()))


def merge_statistics(tensors: Sequence[DumpedTensor]) -> Mapping[str, float]:
    """Return the statistics of a whole, given those of parts without common elements."""
    every = [each.statistics for each in tensors]
    counts = [
        each.get("count", math.nan if tensor.shape is None else prod(tensor.shape))
        for each, tensor in zip(every, tensors, strict=True)
    ]
    found: dict[str, float] = {}
    for item in every[0]:
        values = [each[item] for each in every if item in each]
        merged = _merge_values(item, values, counts) if len(values) == len(every) else None
        if merged is not None:
            found[item] = merged
    return found


def _merge_values(item: str, values: Sequence[float], counts: Sequence[float]) -> float | None:
    if item in ("max", "min"):
        # numpy returns NaN if a part has NaN, which Python's max() may miss.
        return float(np.max(values) if item == "max" else np.min(values))
    if item.endswith("count") or item == L1NORM_ITEM:
        return math.fsum(values)
    if item == "l2norm":
        return math.hypot(*values)
    if item != "avg" or not sum(counts) > 0:
        return None
    return float(np.dot(values, counts)) / sum(counts)


def _add_fingerprints(
    plan: JoinPlan, tensors: Sequence[DumpedTensor]
) -> RecordedFingerprint | None:
    digest, is_partial = 0, False
    sketches: list[np.ndarray] = []
    for block in plan.blocks:
        reduction = next((each.reduction for each in block.layout.placements if each.reduction), "")
        if len(block.ranks) > 1 and reduction not in _LINEAR_REDUCTIONS:
            return None
        is_partial |= len(block.ranks) > 1
        for at in block.ranks:
            known = tensors[at].fingerprint
            if known is None:
                return None
            digest += known.digest or 0
            is_partial |= known.digest is None
            sketch = np.frombuffer(known.sketch, "<f4").astype(np.float64)
            sketches.append(sketch / len(block.ranks) if reduction == "avg" else sketch)
    # a sum beyond the range of float32 is infinite
    with np.errstate(over="ignore", invalid="ignore"):
        sketch = np.sum(sketches, axis=0).astype("<f4").tobytes()
    return RecordedFingerprint(None if is_partial else digest % _DIGEST_RANGE, sketch)

"""Comparison of a pair of tensors by digests, by statistics, or by all elements; and the division
of pairs into groups, each of which is large enough for one message to a worker.

Only the files of a pair are opened. An unreadable file is an outcome, not an error. A process holds
one pair of a group at a time, so the size of a group costs no memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.fingerprint_comparison import (
    have_equal_fingerprints,
    judge_by_fingerprints,
)
from rankdump._analysis.compare.joined_tensors import find_drift, opened_joined_pair
from rankdump._analysis.compare.merged_shards import list_guessed_pairs
from rankdump._analysis.compare.msaccucmp_measures import compute_msaccucmp_measures
from rankdump._analysis.compare.report import (
    DTYPE_FINDING_PREFIX,
    FACTOR_FINDING_PREFIX,
    ComparisonSettings,
    DumpedTensor,
    ElementTolerances,
    PairOutcome,
    TensorPair,
    TensorVerdict,
)
from rankdump._analysis.compare.tensor_blocks import TensorElements, select_comparison_dtype
from rankdump._analysis.compare.tensor_measures import MeasurementResult, measure_difference
from rankdump._analysis.reader.shard_join import select_shard
from rankdump._analysis.reader.tensor_loader import load, opened
from rankdump._analysis.reader.tree import Entry, are_statistics_finite
from rankdump._core.units import format_count
from rankdump._kernels.array_kernels import measure_array
from rankdump._layout.foreign_calls import XOR_KIND
from rankdump.errors import RankdumpError

_SAME_DIGEST = PairOutcome(TensorVerdict.SAME)
_SHARD_FINDING = "{0} has a shard {2} of {3}, compared with the same elements of {1}"
_Elements: TypeAlias = "npt.NDArray[Any] | TensorElements"
PairGroup: TypeAlias = "list[tuple[int, TensorPair]]"
"""Pairs, each with its position among all pairs."""
GroupOutcomes: TypeAlias = "list[tuple[int, PairOutcome]]"
"""Outcomes of the pairs in a group, with the same positions."""
_MAX_GROUP_BYTES = 32 << 20
_MAX_GROUP_PAIRS = 256
"""Largest number of pairs in a group, which also ends at _MAX_GROUP_BYTES bytes."""
_MIN_FACTOR_DISTANCE = 0.01
"""A constant factor between two tensors is reported if it differs from 1 by at least this much."""
NOTHING_KNOWN_FINDING = "neither elements nor statistics are known on both sides"
_EQUAL_SUMS = "only sums of exclusive ors are known, and different tensors may have equal ones"
_NO_GUESS = "ranks have different statistics, and the other side another number of elements"
_ADDED_UP = "fingerprints of the parts add up to the same"
_WORKER_DIED = "the process that compared it died, possibly because memory ran out"


def compare_statistics(
    a: Mapping[str, float], b: Mapping[str, float], tolerances: ElementTolerances
) -> tuple[TensorVerdict, Mapping[str, float]]:
    """Return the verdict, and the differences by name, for the statistics that both sides have.

    A statistic that is NaN on both sides is ignored, because the number of NaN may differ.
    """
    known = {name: (a[name], b[name]) for name in a if name in b}
    known = {name: pair for name, pair in known.items() if not all(map(math.isnan, pair))}
    if not known:
        return TensorVerdict.UNKNOWN, {}
    differences = {
        name: 0.0 if left == right else abs(left - right) for name, (left, right) in known.items()
    }
    if all(left == right for left, right in known.values()):
        return TensorVerdict.SAME, differences
    unequal = (pair for pair in known.values() if pair[0] != pair[1])
    if not all(math.isfinite(number) for pair in unequal for number in pair):
        return TensorVerdict.NAN, differences
    close = (
        differences[name] <= tolerances.atol + tolerances.rtol * abs(right)
        for name, (_, right) in known.items()
    )
    return (TensorVerdict.NORMAL if all(close) else TensorVerdict.DIFFERENT), differences


def compute_statistics(array: npt.NDArray[Any]) -> dict[str, float]:
    """Return the statistics of an array; empty for complex elements."""
    if array.dtype.kind == "c":
        return {}
    found = measure_array(array.reshape(-1))
    return {
        "max": found.maximum,
        "min": found.minimum,
        "avg": found.mean,
        "l2norm": found.l2norm,
        "count": found.size,
        "nan count": found.nans,
        "negative inf count": found.negative_infinities,
        "positive inf count": found.positive_infinities,
        "zero count": found.zeros,
    }


def has_nonfinite_statistics(tensor: DumpedTensor | None) -> bool | None:
    """Return whether statistics show that a tensor has NaN or infinity; None if they do
    not tell.
    """
    if tensor is None or tensor.dtype == "bool":
        return None if tensor is None else False
    finite = are_statistics_finite(tensor.statistics.get)
    return None if finite is None else not finite


def compare_pair_statistics(
    a: DumpedTensor, b: DumpedTensor, tolerances: ElementTolerances, findings: tuple[str, ...]
) -> PairOutcome:
    """Return the outcome of comparing the statistics of two tensors."""
    verdict, differences = compare_statistics(a.statistics, b.statistics, tolerances)
    kind, sign, _ = a.digest.partition(":")
    # Both tensors have a checksum of the same kind from another tool.
    if sign and b.digest.startswith(f"{kind}{sign}") and a.digest != b.digest:
        findings = (*findings, "their checksums differ")
        if verdict is TensorVerdict.SAME:
            verdict = TensorVerdict.NORMAL
        elif verdict is TensorVerdict.UNKNOWN:
            verdict = TensorVerdict.DIFFERENT
    elif verdict is TensorVerdict.UNKNOWN and not (a.fingerprint and b.fingerprint):
        both = a.digest and a.digest == b.digest
        findings = (*findings, _EQUAL_SUMS if both else NOTHING_KNOWN_FINDING)
    outcome = PairOutcome(
        verdict,
        findings,
        statistic_differences=differences,
        nonfinite_a=has_nonfinite_statistics(a),
        nonfinite_b=has_nonfinite_statistics(b),
    )
    return judge_by_fingerprints(outcome, a, b, tolerances)


def _compare_guesses(
    a: DumpedTensor, b: DumpedTensor, tolerances: ElementTolerances
) -> PairOutcome:
    """Return the outcome of comparing what two tensors most likely are as a whole, if only
    statistics are known for some ranks.
    """
    outcomes: list[PairOutcome] = []
    for guess in list_guessed_pairs(a, b):
        found = compare_pair_statistics(guess.a, guess.b, tolerances, guess.findings)
        if found.verdict.agrees and not guess.is_complete:
            # The first rank agrees, but the statistics of the ranks differ, so some rank cannot
            # agree.
            found = replace(found, verdict=TensorVerdict.UNKNOWN)
        outcomes.append(found)
    unknown = PairOutcome(TensorVerdict.UNKNOWN, (_NO_GUESS,))
    return min(outcomes, key=lambda each: not each.verdict.agrees, default=unknown)


def compare_pair(pair: TensorPair, settings: ComparisonSettings) -> PairOutcome:
    """Return the outcome of a pair; files are read only if nothing else decides."""
    decided = decide_without_reading(pair, settings)
    if decided is not None:
        return decided
    a, b = pair.a, pair.b
    assert a is not None
    assert b is not None
    try:
        return _compare_elements(a, b, settings)
    except RankdumpError as error:
        why = str(error)
    except MemoryError:
        sizes = f"{_count_tensor_bytes(a):,} and {_count_tensor_bytes(b):,}"
        why = f"not enough memory for both tensors: {sizes} bytes"
    return PairOutcome(TensorVerdict.UNREADABLE, (why,))


def decide_without_reading(pair: TensorPair, settings: ComparisonSettings) -> PairOutcome | None:
    """Return the outcome of a pair if no file is needed for it, else None."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        return _build_unread_outcome(TensorVerdict.UNMATCHED, a, b)
    if a.is_sample or b.is_sample:
        return _decide_samples(a, b)
    if a.guesses or b.guesses:
        return _compare_guesses(a, b, settings.tolerances)
    # What a manifest says of a file is valid only while the file has the size that the manifest
    # names.
    is_whole = not (_has_other_size(a.entry) or _has_other_size(b.entry))
    if is_whole and have_equal_fingerprints(a, b):
        findings = (_ADDED_UP,) if a.parts or b.parts else ()
        return _build_unread_outcome(TensorVerdict.SAME, a, b, *findings)
    if a.parts or b.parts:
        alone = a.entry is None or b.entry is None
        return compare_pair_statistics(a, b, settings.tolerances, ()) if alone else None
    same = a.digest and a.digest == b.digest and not a.digest.startswith(XOR_KIND)
    if is_whole and same and a.shape == b.shape and a.dtype and a.dtype == b.dtype:
        # Thousands of pairs share one outcome object if nothing else is known about them.
        known = a.statistics or b.statistics or a.dtype == "bool"
        return _build_unread_outcome(TensorVerdict.SAME, a, b) if known else _SAME_DIGEST
    if a.shape is not None and b.shape is not None and not _is_comparable(a.shape, b.shape):
        outcome = _build_unread_outcome(TensorVerdict.SHAPE, a, b, _format_shapes(a.shape, b.shape))
        # Tensors with different shapes are read to find whether they are finite, as with batches of
        # different sizes.
        unknown = outcome.nonfinite_a is None or outcome.nonfinite_b is None
        unknown = unknown or _has_shard_of(a, b) or _has_shard_of(b, a)
        return None if unknown and a.entry is not None and b.entry is not None else outcome
    if a.entry is None and b.entry is None:
        return compare_pair_statistics(a, b, settings.tolerances, _list_findings(a, b))
    return None


def _has_other_size(entry: Entry | None) -> bool:
    """Return whether a file has another size than its manifest says, where 0 stands for a link. The
    file is then damaged, or was packed later, which its content shows.
    """
    if entry is None or entry.record is None or entry.member:
        return False
    return entry.record.bytes_stored not in (0, entry.stored_bytes)


def _decide_samples(a: DumpedTensor, b: DumpedTensor) -> PairOutcome | None:
    """Return the outcome of a pair in which one side has only first elements; None if files are
    needed.
    """
    left, right, findings = _find_whole_shape(a), _find_whole_shape(b), _list_findings(a, b)
    if left is not None and right is not None and not _is_comparable(left, right):
        text = _format_shapes(left, right)
        return _build_unread_outcome(TensorVerdict.SHAPE, a, b, text, *findings)
    if a.entry is None or b.entry is None:
        text = "the statistics of all elements are known on the other side only"
        return _build_unread_outcome(TensorVerdict.UNKNOWN, a, b, *findings, text)
    if a.digest and a.digest == b.digest and a.shape == b.shape:
        return _build_unread_outcome(TensorVerdict.SAME, a, b, *findings)
    return None


def _find_whole_shape(tensor: DumpedTensor) -> tuple[int, ...] | None:
    """Return the shape of the whole tensor, even if only its first elements were kept."""
    layout = tensor.layout
    return layout.global_shape if layout is not None and layout.is_sample else tensor.shape


def _build_unread_outcome(
    verdict: TensorVerdict, a: DumpedTensor | None, b: DumpedTensor | None, *findings: str
) -> PairOutcome:
    return PairOutcome(
        verdict,
        findings,
        nonfinite_a=has_nonfinite_statistics(a),
        nonfinite_b=has_nonfinite_statistics(b),
    )


def _count_tensor_bytes(tensor: DumpedTensor | None) -> int:
    """Return the number of bytes needed to read a tensor, as far as the tree shows it; 0 without a
    file.
    """
    files = tensor.files if tensor is not None else ()
    return sum(max(file.bytes_in or 0, file.stored_bytes) for file in files)


def _compare_elements(
    a: DumpedTensor, b: DumpedTensor, settings: ComparisonSettings
) -> PairOutcome:
    if a.parts or b.parts:
        return _compare_joined(a, b, settings)
    if a.entry is None or b.entry is None:
        return compare_pair_statistics(
            _add_statistics(a), _add_statistics(b), settings.tolerances, _list_findings(a, b)
        )
    with opened(a.entry) as left, opened(b.entry) as right:
        a, b = _describe_from_file(a, left), _describe_from_file(b, right)
        if _is_comparable(left.shape, right.shape):
            return _measure_elements(a, b, left, right, settings)
        if _has_shard_of(a, b) or _has_shard_of(b, a):
            return _measure_shard(a, b, settings)
        return PairOutcome(
            TensorVerdict.SHAPE,
            (_format_shapes(left.shape, right.shape),),
            nonfinite_a=_has_nonfinite_elements(_load_array(a, left)),
            nonfinite_b=_has_nonfinite_elements(_load_array(b, right)),
        )


def _compare_joined(a: DumpedTensor, b: DumpedTensor, settings: ComparisonSettings) -> PairOutcome:
    """Return the outcome of a pair in which a side is joined from the parts of its ranks.

    If replicas have different elements, those that differ most are compared.
    """
    with opened_joined_pair(a, b) as found:
        if isinstance(found, str):
            return PairOutcome(TensorVerdict.SHAPE, (found,))
        joined = (*found[0].findings, *found[1].findings)
        shapes = found[0].elements.shape, found[1].elements.shape
        if not _is_comparable(*shapes):
            return PairOutcome(TensorVerdict.SHAPE, (_format_shapes(*shapes), *joined))
        a, b = a._replace(shape=shapes[0]), b._replace(shape=shapes[1])
        settings = replace(settings, msaccucmp=False)
        drifts = [find_drift(each, settings.tolerances) for each in found]
        own, other = (
            [each.elements, *each.copies] if drift else [each.elements]
            for each, drift in zip(found, drifts, strict=True)
        )
        outcomes = [_measure_elements(a, b, x, y, settings) for x in own for y in other]
    outcome = max(outcomes, key=_get_severity)
    told = [text for text in drifts if text]
    verdict = TensorVerdict.DIFFERENT if told and outcome.verdict.agrees else outcome.verdict
    return replace(outcome, verdict=verdict, findings=(*told, *outcome.findings, *joined))


def _get_severity(outcome: PairOutcome) -> tuple[bool, float]:
    largest = outcome.measures.max_absolute if outcome.measures is not None else 0.0
    return not outcome.verdict.agrees, largest


def _measure_elements(
    a: DumpedTensor,
    b: DumpedTensor,
    left: _Elements,
    right: _Elements,
    settings: ComparisonSettings,
) -> PairOutcome:
    found = measure_difference(left, right, settings.tolerances, dtype_a=a.dtype, dtype_b=b.dtype)
    measures = found.measures
    return PairOutcome(
        _decide_verdict(found),
        (
            *_list_findings(a, b),
            *_list_nonfinite_findings(found, left.shape, settings),
            *_list_factor_findings(found),
        ),
        measures,
        extra=compute_msaccucmp_measures(_load_array(a, left), _load_array(b, right))
        if settings.msaccucmp
        else {},
        nonfinite_a=measures.nonfinite_a > 0,
        nonfinite_b=measures.nonfinite_b > 0,
    )


def _has_shard_of(tensor: DumpedTensor, whole: DumpedTensor) -> bool:
    """Return whether a tensor is a shard of a logical tensor, and `whole` is that tensor as a
    whole.
    """
    layout = tensor.layout
    return (
        layout is not None
        and not layout.is_partial
        and layout.global_shape == whole.shape
        and whole.layout is None
    )


def _measure_shard(a: DumpedTensor, b: DumpedTensor, settings: ComparisonSettings) -> PairOutcome:
    """Return the outcome of comparing a shard with the same elements of the whole tensor."""
    assert a.entry is not None
    assert b.entry is not None
    left, right = load(a.entry), load(b.entry)
    if _has_shard_of(a, b):
        left, right = _align_shard(left, a, right)
        found = _SHARD_FINDING.format("a", "b", list(a.shape or ()), list(b.shape or ()))
    else:
        right, left = _align_shard(right, b, left)
        found = _SHARD_FINDING.format("b", "a", list(b.shape or ()), list(a.shape or ()))
    a, b = a._replace(shape=left.shape), b._replace(shape=right.shape)
    outcome = _measure_elements(a, b, left, right, replace(settings, msaccucmp=False))
    return replace(outcome, findings=(*outcome.findings, found))


def _align_shard(
    shard: npt.NDArray[Any], tensor: DumpedTensor, whole: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the elements of a shard without padding, and the same elements of the whole tensor."""
    layout = tensor.layout
    assert layout is not None
    part = np.ascontiguousarray(select_shard(whole, layout, shard.shape))
    return (shard.reshape(-1)[: part.size] if layout.flat_range else shard), part


def _load_array(tensor: DumpedTensor, found: _Elements) -> npt.NDArray[Any]:
    """Return all elements of a tensor as one array."""
    if isinstance(found, np.ndarray) or tensor.entry is None:
        return np.asarray(found)
    return load(tensor.entry)


def _describe_from_file(tensor: DumpedTensor, array: _Elements) -> DumpedTensor:
    """Return a tensor; if the tree does not have its type or shape, with those of its file."""
    if tensor.dtype and tensor.shape == array.shape:
        return tensor
    return tensor._replace(dtype=tensor.dtype or str(array.dtype), shape=array.shape)


def _add_statistics(tensor: DumpedTensor) -> DumpedTensor:
    """Return a tensor; if it has a file, with the statistics of its elements."""
    if tensor.entry is None:
        return tensor
    array = load(tensor.entry)
    return _describe_from_file(tensor, array)._replace(
        statistics={**compute_statistics(array), **tensor.statistics}
    )


def _decide_verdict(found: MeasurementResult) -> TensorVerdict:
    measures = found.measures
    if found.same_bytes:
        return TensorVerdict.SAME
    if measures.nonfinite_apart:
        return TensorVerdict.NAN
    if measures.unequal:
        return TensorVerdict.DIFFERENT
    # Numbers that were rounded to a narrower type may look equal although they were not.
    exact = not measures.max_absolute > 0 and not found.rounded_dtype
    return TensorVerdict.SAME if exact else TensorVerdict.NORMAL


def _is_comparable(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether shapes differ only in extents of 1, or one is flat and has the same size."""
    left, right = _squeeze_shape(a), _squeeze_shape(b)
    return left == right or (1 in (len(left), len(right)) and prod(left) == prod(right))


def _squeeze_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _format_shapes(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    return f"shape {[*a]} against {[*b]}"


def _list_findings(a: DumpedTensor, b: DumpedTensor) -> tuple[str, ...]:
    """Return findings about the types and shapes of two comparable tensors."""
    found = [f"{side} has {each.layout}" for side, each in (("a", a), ("b", b)) if each.is_sample]
    if a.dtype and b.dtype and a.dtype != b.dtype:
        terms = select_comparison_dtype(a.dtype, b.dtype)
        how = f", compared as {terms}" if terms else ""
        found.append(f"{DTYPE_FINDING_PREFIX}{a.dtype} against {b.dtype}{how}")
    if a.shape is not None and b.shape is not None and a.shape != b.shape:
        alike = _squeeze_shape(a.shape) == _squeeze_shape(b.shape)
        how = "without extents of 1" if alike else "element by element"
        found.append(f"{_format_shapes(a.shape, b.shape)}, compared {how}")
    return tuple(found)


def _list_factor_findings(found: MeasurementResult) -> tuple[str, ...]:
    """Return a finding if one tensor is a multiple of the other, such as a gradient that was
    divided by a wrong number.
    """
    is_one = abs(found.factor - 1) < _MIN_FACTOR_DISTANCE
    if math.isnan(found.factor) or is_one or not found.measures.unequal:
        return ()
    return (f"{FACTOR_FINDING_PREFIX}{found.factor:.4g} times b",)


def _list_nonfinite_findings(
    found: MeasurementResult, shape: tuple[int, ...], settings: ComparisonSettings
) -> tuple[str, ...]:
    measures = found.measures
    if found.first_nonfinite_apart is not None:
        first = [int(at) for at in np.unravel_index(found.first_nonfinite_apart, shape)]
        counts = f"{measures.nonfinite_a:,} in a, {measures.nonfinite_b:,} in b"
        places = f"{measures.nonfinite_apart:,} of {measures.count:,} places"
        return (f"NaN or infinity differs at {places} ({counts}), first at {first}",)
    if found.nan_both:
        counted = "the same" if settings.tolerances.equal_nan or found.same_bytes else "unequal"
        places = format_count(found.nan_both, "place")
        return (f"NaN on both sides at {places}, which counts as {counted}",)
    return ()


def _has_nonfinite_elements(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "fc" and not bool(np.isfinite(array).all())


def group_pairs(placed: Iterable[tuple[int, TensorPair]]) -> Iterator[PairGroup]:
    """Yield adjacent pairs in groups; a pair that reaches a limit ends its group."""
    group: PairGroup = []
    held = 0
    for place, pair in placed:
        group.append((place, pair))
        held += count_pair_bytes(pair)
        if held >= _MAX_GROUP_BYTES or len(group) >= _MAX_GROUP_PAIRS:
            yield group
            group, held = [], 0
    if group:
        yield group


def count_pair_bytes(pair: TensorPair) -> int:
    """Return the bytes needed to read both tensors of a pair."""
    return _count_tensor_bytes(pair.a) + _count_tensor_bytes(pair.b)


def compare_group(group: PairGroup, settings: ComparisonSettings) -> GroupOutcomes:
    """Return the outcome of each pair of a group."""
    return [(place, compare_pair(pair, settings)) for place, pair in group]


def mark_group_unreadable(group: PairGroup) -> GroupOutcomes:
    """Return outcomes for pairs whose comparison ended the worker process."""
    return [(place, PairOutcome(TensorVerdict.UNREADABLE, (_WORKER_DIED,))) for place, _ in group]

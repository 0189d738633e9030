"""A pair of tensors to its outcome: by digests, by figures, or by all of its elements.

Opens the files of the pair and nothing else. What cannot be read is an outcome, not an error.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.contract.errors import RankdumpError
from rankdump.diff.figures import by_figures, figures_of, nonfinite_of
from rankdump.diff.measures import Measured, measure, msaccucmp, terms_of
from rankdump.diff.values import TYPES, Outcome, Settings, Tensor, TensorPair, Verdict
from rankdump.reader import Opened, load, opened


def outcome_of(pair: TensorPair, settings: Settings) -> Outcome:
    """Return what comparing a pair comes to; reads files only where nothing else decides it."""
    decided = decided_unread(pair, settings)
    if decided is not None:
        return decided
    a, b = pair.a, pair.b
    assert a is not None
    assert b is not None
    try:
        return _of_elements(a, b, settings)
    except RankdumpError as error:
        return Outcome(Verdict.UNREADABLE, (str(error),))
    except MemoryError:
        sizes = " and ".join(f"{weight:,}" for weight in (bytes_of(a), bytes_of(b)))
        return Outcome(Verdict.UNREADABLE, (f"no memory for the two: {sizes} bytes",))


_SAME = Outcome(Verdict.EQUAL)
"""By their digests."""


def decided_unread(pair: TensorPair, settings: Settings) -> Outcome | None:
    """Return the outcome of a pair that needs no file for it; None for any other."""
    a, b = pair.a, pair.b
    if a is None or b is None:
        return _unread(Verdict.UNMATCHED, a, b)
    if a.digest and a.digest == b.digest and a.shape == b.shape and a.dtype and a.dtype == b.dtype:
        # Thousands of pairs have one outcome, where nothing more is known of them.
        known = a.figures or b.figures or a.dtype == "bool"
        return _unread(Verdict.EQUAL, a, b) if known else _SAME
    if a.shape is not None and b.shape is not None and not _comparable(a.shape, b.shape):
        return _unread(Verdict.SHAPE, a, b, _shapes(a.shape, b.shape))
    if a.entry is None and b.entry is None:
        return by_figures(a, b, settings.tolerances, _findings(a, b))
    return None


def _unread(verdict: Verdict, a: Tensor | None, b: Tensor | None, *findings: str) -> Outcome:
    return Outcome(verdict, findings, nonfinite_a=nonfinite_of(a), nonfinite_b=nonfinite_of(b))


def bytes_of(tensor: Tensor | None) -> int:
    """Return how many bytes reading a tensor takes up, as far as the tree knows; 0 for none."""
    if tensor is None or tensor.entry is None:
        return 0
    return max(tensor.entry.bytes_in or 0, tensor.entry.stored_bytes)


def _of_elements(a: Tensor, b: Tensor, settings: Settings) -> Outcome:
    if a.entry is None or b.entry is None:
        return by_figures(_with_figures(a), _with_figures(b), settings.tolerances, _findings(a, b))
    with opened(a.entry) as left, opened(b.entry) as right:
        a, b = _described(a, left), _described(b, right)
        if _comparable(left.shape, right.shape):
            return _measured(a, b, left, right, settings)
        return Outcome(
            Verdict.SHAPE,
            (_shapes(left.shape, right.shape),),
            nonfinite_a=_nonfinite(_array(a, left)),
            nonfinite_b=_nonfinite(_array(b, right)),
        )


def _measured(a: Tensor, b: Tensor, left: Opened, right: Opened, settings: Settings) -> Outcome:
    found = measure(left, right, settings.tolerances, dtype_a=a.dtype, dtype_b=b.dtype)
    measures = found.measures
    return Outcome(
        _verdict(found),
        (*_findings(a, b), *_nonfinite_findings(found, left.shape, settings)),
        measures,
        extra=msaccucmp(_array(a, left), _array(b, right)) if settings.msaccucmp else {},
        nonfinite_a=measures.nonfinite_a > 0,
        nonfinite_b=measures.nonfinite_b > 0,
    )


def _array(tensor: Tensor, found: Opened) -> npt.NDArray[Any]:
    """Return all elements of a tensor as one array."""
    if isinstance(found, np.ndarray) or tensor.entry is None:
        return np.asarray(found)
    return load(tensor.entry)


def _described(tensor: Tensor, array: Opened) -> Tensor:
    """Return a tensor with the type and shape of its file, where the tree did not say them."""
    if tensor.dtype and tensor.shape == array.shape:
        return tensor
    return tensor._replace(dtype=tensor.dtype or str(array.dtype), shape=array.shape)


def _with_figures(tensor: Tensor) -> Tensor:
    """Return a tensor with figures of its elements, where it has elements."""
    if tensor.entry is None:
        return tensor
    array = load(tensor.entry)
    return _described(tensor, array)._replace(figures={**figures_of(array), **tensor.figures})


def _verdict(found: Measured) -> Verdict:
    measures = found.measures
    if found.same_bytes:
        return Verdict.EQUAL
    if measures.nonfinite_apart:
        return Verdict.NAN
    if measures.unequal:
        return Verdict.DIFFERENT
    # Rounded to a narrower type, numbers may only look the same.
    exact = not measures.max_absolute > 0 and not found.terms
    return Verdict.EQUAL if exact else Verdict.CLOSE


def _comparable(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Return whether shapes differ by extents of 1 at most, or by one of them being flat."""
    left, right = _squeezed(a), _squeezed(b)
    return left == right or (1 in (len(left), len(right)) and prod(left) == prod(right))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for extent in shape if extent != 1)


def _shapes(a: tuple[int, ...], b: tuple[int, ...]) -> str:
    return f"shape {_listed(a)} against {_listed(b)}"


def _listed(numbers: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, numbers))}]"


def _findings(a: Tensor, b: Tensor) -> tuple[str, ...]:
    """Return what two tensors that are compared all the same differ in."""
    found: list[str] = []
    if a.dtype and b.dtype and a.dtype != b.dtype:
        terms = terms_of(a.dtype, b.dtype)
        how = f", compared as {terms}" if terms else ""
        found.append(f"{TYPES}{a.dtype} against {b.dtype}{how}")
    if a.shape is not None and b.shape is not None and a.shape != b.shape:
        alike = _squeezed(a.shape) == _squeezed(b.shape)
        how = "without extents of 1" if alike else "element by element"
        found.append(f"{_shapes(a.shape, b.shape)}, compared {how}")
    return tuple(found)


def _nonfinite_findings(
    found: Measured, shape: tuple[int, ...], settings: Settings
) -> tuple[str, ...]:
    measures = found.measures
    if found.first_apart is not None:
        first = _listed(tuple(int(at) for at in np.unravel_index(found.first_apart, shape)))
        counts = f"{measures.nonfinite_a:,} in a, {measures.nonfinite_b:,} in b"
        places = f"{measures.nonfinite_apart:,} of {measures.count:,} places"
        return (f"NaN or infinity differs at {places} ({counts}), first at {first}",)
    if found.nan_both:
        counted = "the same" if settings.tolerances.equal_nan or found.same_bytes else "unequal"
        noun = "place" if found.nan_both == 1 else "places"
        return (f"NaN on both sides at {found.nan_both:,} {noun}, which counts as {counted}",)
    return ()


def _nonfinite(array: npt.NDArray[Any]) -> bool:
    return array.dtype.kind in "fc" and not bool(np.isfinite(array).all())

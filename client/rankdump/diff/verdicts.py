"""What comparing two tensors comes to. Pure values; the others stand in `values`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


@dataclass(frozen=True, slots=True)
class Tolerances:
    """When two elements count as equal: `abs(a - b) <= atol + rtol * abs(b)`, as numpy's isclose.

    `b` is the reference. Between bfloat16 and a wider type, the wider one is rounded to bfloat16
    first and `rtol` is at least 2**-8, half a unit of its last place.
    """

    rtol: float = 1e-4
    atol: float = 1e-4
    equal_nan: bool = False
    """Whether NaN equals NaN at the same place. Without it, every NaN is unequal."""


class Verdict(str, Enum):
    """What a comparison of two tensors came to; the value is the word in reports."""

    EQUAL = "equal"
    """The same bytes, or the same numbers."""
    CLOSE = "close"
    """All elements within the tolerances."""
    DIFFERENT = "different"
    NAN = "nan"
    """NaN or infinity where the other side has none, or another one."""
    SHAPE = "shape"
    """The shapes differ, even where extents of 1 do not count."""
    UNMATCHED = "unmatched"
    """One side has no partner."""
    UNREADABLE = "unreadable"
    """A file could not be read; the comparison goes on."""
    UNKNOWN = "unknown"
    """There is nothing to compare: no elements, and no figures that both sides have."""

    @property
    def agrees(self) -> bool:
        """Whether the two count as the same."""
        return self in (Verdict.EQUAL, Verdict.CLOSE)


@dataclass(frozen=True, slots=True)
class Measures:
    """How far two tensors of one shape are apart; elements that are finite on both sides count.

    Sums are in float64. `relative` divides by `abs(b)`, the reference, where that is not 0. NaN
    where a measure has no meaning: nothing finite, a norm of 0.
    """

    count: int
    """Elements of each side; a complex one is two, its parts."""
    unequal: int
    """Elements that are not close, those that are not finite included."""
    max_absolute: float
    max_relative: float
    mean_absolute: float
    mean_relative: float
    cosine: float
    """1 when both norms are 0, NaN when one is."""
    rmse: float
    relative_euclidean: float
    """`norm(a - b) / norm(b)`."""
    kl_divergence: float
    """Of a from b, each scaled to sum 1; NaN where an element is negative, or sums are 0."""
    mean_absolute_unequal: float
    """Over the unequal elements alone, as `api_dump_compare` has it; 0 without any."""
    max_absolute_unequal: float
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_apart: int
    """Places where one side is not finite and the other has not the same there."""

    @property
    def close_share(self) -> float:
        """Share of elements that are close, from 0 to 1; 1 for no elements."""
        return 1.0 - self.unequal / self.count if self.count else 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What comparing one pair of tensors came to."""

    verdict: Verdict
    findings: tuple[str, ...] = ()
    """One sentence each: dtypes differ, shapes differ, NaN at other places, a file is damaged."""
    measures: Measures | None = None
    """None where the elements were not read: identical digests, figures only, no partner."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """Differences of figures by name, where only figures are known."""
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    """msaccucmp's measures by their names, when they were asked for."""
    nonfinite_a: bool | None = None
    """Whether side a holds NaN or infinity; None when unknown."""
    nonfinite_b: bool | None = None

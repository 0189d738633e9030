"""Values that the parts of a comparison hand to each other, up to the report: dumped tensors, calls
and programs, pairs, verdicts, measures and origins. Pure values.

The order is: two trees -> DumpedProgram (calls in order) -> CallPair -> TensorPair ->
PairOutcome -> ComparisonReport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from rankdump._analysis.reader.tree import Entry
from rankdump._core.graph import SourceLine
from rankdump._core.record import TensorSide

NO_STATISTICS: Mapping[str, float] = {}
"""Of a tensor of which none are known."""
CONSTANTS_ITERATION = -1
"""Iteration of the program that holds the constants of a rank: they belong to none."""
PairingRule = Literal["exact", "mapping", "type", "sequence", ""]
"""Which rule paired two calls; empty for a call that has no partner.

`exact`: the same name. `mapping`: the user's file. `type`: the same type, in the same order.
`sequence`: in the longest common subsequence.
"""
DTYPE_FINDING_PREFIX = "dtype "
"""Start of a finding about the element types of the two sides."""
OriginKind: TypeAlias = Literal["difference", "nonfinite"]


@dataclass(frozen=True, slots=True)
class ElementTolerances:
    """Tolerances: two elements are close when `abs(a - b) <= atol + rtol * abs(b)`, as in numpy.

    `b` is the reference. Between bfloat16 and a wider type, the wider one is rounded to bfloat16
    first and `rtol` is at least 2**-8, half a unit of its last place.
    """

    rtol: float = 1e-4
    atol: float = 1e-4
    equal_nan: bool = False
    """Whether NaN equals NaN at the same place. Without it, every NaN is unequal."""


class TensorVerdict(str, Enum):
    """Verdict on two tensors; the value is the word in reports."""

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
    """There is nothing to compare: no elements, and no statistics that both sides have."""

    @property
    def agrees(self) -> bool:
        """Whether the two count as the same."""
        return self in (TensorVerdict.EQUAL, TensorVerdict.CLOSE)


@dataclass(frozen=True, slots=True)
class DifferenceMeasures:
    """Differences of two tensors of one shape, over elements that are finite on both sides.

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
class PairOutcome:
    """Outcome of the comparison of one pair of tensors."""

    verdict: TensorVerdict
    findings: tuple[str, ...] = ()
    """One sentence each: dtypes differ, shapes differ, NaN at other places, a file is damaged."""
    measures: DifferenceMeasures | None = None
    """None where the elements were not read: identical digests, statistics only, no partner."""
    statistic_differences: Mapping[str, float] = field(default_factory=dict[str, float])
    """Differences of statistics by name, where only statistics are known."""
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    """msaccucmp's measures by their names, when they were asked for."""
    nonfinite_a: bool | None = None
    """Whether side a holds NaN or infinity; None when unknown."""
    nonfinite_b: bool | None = None


class DumpedTensor(NamedTuple):
    """One tensor of a call, as a tree knows it; its elements stay on the disk.

    There are as many as files: no value is made faster. So it is with a `Call` and a `Row`.
    """

    side: TensorSide
    slot: int
    argument: str
    """Place in the arguments or results of the call; empty when unknown."""
    dtype: str
    """As the framework held it; the file may hold a wider type. Empty when only the file knows."""
    shape: tuple[int, ...] | None
    """None when only the file knows."""
    digest: str = ""
    """xxh3-128 of the elements as the framework held them; empty when unknown."""
    entry: Entry | None = None
    """File with the elements; None when only statistics are known."""
    statistics: Mapping[str, float] = NO_STATISTICS
    """By the names of `statistic_category`: `max`, `min`, `avg`, `l2norm`, `nan count`, ..."""
    seen_order: int = 0
    """Place among the tensors of its program, in the order in which they were seen."""

    @property
    def slot_name(self) -> str:
        """`input.0`, as reports call it."""
        return f"{self.side.value}.{self.slot}"


class DumpedCall(NamedTuple):
    """One call of an operator in one iteration of one rank, or the backward of one."""

    position: int
    """Among the calls of its program, in execution order."""
    op_type: str
    op_name: str
    """Raw where the tree knows it."""
    inputs: tuple[DumpedTensor, ...] = ()
    """By slot."""
    outputs: tuple[DumpedTensor, ...] = ()
    graph: int = 0
    backward: bool = False
    recomputed: bool = False

    @property
    def tensors(self) -> tuple[DumpedTensor, ...]:
        """Inputs first."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True, slots=True)
class DumpedProgram:
    """Calls of one rank in one iteration, in order."""

    rank: int
    iteration: int
    """CONSTANTS for what never changes."""
    calls: tuple[DumpedCall, ...]


@dataclass(frozen=True, slots=True)
class CallPair:
    """A call of each side that stand for each other; one of them is None when it has no partner."""

    a: DumpedCall | None
    b: DumpedCall | None
    rule: PairingRule = ""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to be compared; one of them is None when it has no partner."""

    a: DumpedTensor | None
    b: DumpedTensor | None


class ComparisonRow(NamedTuple):
    """One line of a report: a pair of tensors of a pair of calls."""

    rank: int
    """Of side a; of b where a has no partner."""
    iteration: int
    """CONSTANTS for what never changes."""
    position: int
    """Of the pair of calls, in execution order of its program."""
    rule: PairingRule
    op_type: str
    name_a: str
    """Name of the call on that side; empty where there is none."""
    name_b: str
    backward: bool
    pair: TensorPair
    outcome: PairOutcome

    @property
    def slot_name(self) -> str:
        """`input.0` or `output.1`."""
        tensor = self.pair.a or self.pair.b
        return tensor.slot_name if tensor is not None else ""


@dataclass(frozen=True, slots=True)
class SuspectCall:
    """An operator where it may have started."""

    rank: int
    iteration: int
    position: int
    op_type: str
    name_a: str
    name_b: str
    backward: bool
    reason: str
    """One sentence: which inputs agree, which outputs do not, and by how much."""
    source: tuple[SourceLine, ...] = ()
    """The stack it was called from, outermost first; empty when the tree has none."""


@dataclass(frozen=True, slots=True)
class DivergenceOrigin:
    """Origin of a difference or of non-finite values, in the whole job or on one rank."""

    kind: OriginKind
    side: Literal["", "a", "b"]
    """Of `nonfinite`: in which dump."""
    certain: bool
    """False when the origin is ambiguous and may be any of the suspects."""
    suspects: tuple[SuspectCall, ...]
    """The first is the likeliest; exactly one where it is certain."""
    ambiguity: str = ""
    """Why it is ambiguous; empty where it is certain."""


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Settings of a comparison."""

    tolerances: ElementTolerances = field(default_factory=ElementTolerances)
    rules: tuple[PairingRule, ...] = ("exact", "type", "sequence")
    """Tried in this order, each on what the ones before it left."""
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of side b by names of side a: of operators, or of what they begin with."""
    msaccucmp: bool = False
    """Whether msaccucmp's measures are computed as well."""


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """A whole comparison."""

    a: str
    """The path that was compared, as it was given, with rank and iteration if given."""
    b: str
    settings: ComparisonSettings
    rows: tuple[ComparisonRow, ...]
    """By iteration, then in execution order; ranks side by side where the order is merged."""
    origins: tuple[DivergenceOrigin, ...] = ()
    """Of the whole: at most one `difference`, and one `nonfinite` for each side."""
    rank_origins: tuple[DivergenceOrigin, ...] = ()
    """Of each rank, by rank and kind."""
    notes: tuple[str, ...] = ()
    """Remarks for the reader: ranks of one side only, files without a partner, damage."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether everything has a partner and counts as the same."""
        return all(row.outcome.verdict.agrees for row in self.rows) and not self.notes

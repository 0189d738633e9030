"""Values of a comparison: dumped tensors, calls and programs, pairs, verdicts, measures, origins
and the report. All are immutable.

A comparison makes them in this order: two trees -> DumpedProgram (calls in order) -> CallPair ->
TensorPair -> PairOutcome -> ComparisonReport.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from rankdump._analysis.compare.card_findings import CardFinding
from rankdump._analysis.reader.fingerprints import RecordedFingerprint
from rankdump._analysis.reader.tree import Entry
from rankdump._core.graph import SourceLine
from rankdump._core.manifest import ManifestRecord
from rankdump._core.record import TensorSide, name_argument
from rankdump._core.tensor_layout import TensorLayout

NO_STATISTICS: Mapping[str, float] = {}
"""Statistics of a tensor about which none are known."""
CONSTANTS_ITERATION = -1
"""Iteration of the program with the constants of a rank, which belong to no iteration."""
PairingRule = Literal["exact", "mapping", "type", "sequence", ""]
"""Rule that paired two calls; empty for a call without a partner.

`exact`: the same name. `mapping`: the user's file. `type`: the same type, in the same order.
`sequence`: in the longest common subsequence.
"""
DTYPE_FINDING_PREFIX = "dtype "
"""Start of a finding about the element types of the two sides."""
REPLICA_FINDING_PREFIX = "replicas on "
"""Start of a finding about ranks that should have the same elements."""
FACTOR_FINDING_PREFIX = "a is "
"""Start of a finding that one side is a multiple of the other."""
OriginKind: TypeAlias = Literal["difference", "nonfinite"]
ProgramPlace: TypeAlias = "tuple[int, int]"
"""Rank and iteration of a program."""


def get_dated_iteration(number: int) -> int | None:
    """Return the iteration of a program; None for the program of the constants."""
    return None if number == CONSTANTS_ITERATION else number


@dataclass(frozen=True, slots=True)
class ElementTolerances:
    """Tolerances: two elements are close when `abs(a - b) <= atol + rtol * abs(b)`, as in numpy.

    `b` is the reference. Between bfloat16 and a wider type, the wider one is rounded to bfloat16
    first and `rtol` is at least 2**-8, half a unit of its last place.
    """

    rtol: float = 1e-4
    atol: float = 1e-4
    equal_nan: bool = False
    """Whether NaN equals NaN at the same place. If not, every NaN is unequal."""


@dataclass(frozen=True, slots=True)
class NamedTolerance:
    """The largest normal error of tensors whose operator has a matching name."""

    pattern: str
    """Glob for the name of the operator, as in `--op`."""
    error: float | None
    """Root mean square of the difference, relative to that of the reference; None for the error
    that rounding explains.
    """


class TensorVerdict(str, Enum):
    """Verdict on two tensors; reports show the value."""

    SAME = "same"
    """The tensors have the same bytes, or the same numbers."""
    NORMAL = "normal"
    """The difference is within the tolerances, or is explained by rounding or noise runs."""
    SUSPICIOUS = "suspicious"
    """The error is larger than noise runs, rounding or a tolerance by name explain, but
    not by far.
    """
    DIFFERENT = "different"
    """The error is larger than that of a suspicious tensor."""
    NAN = "nan"
    """At some place one side has NaN or infinity and the other side has a different value."""
    SHAPE = "shape"
    """The shapes differ in more than extents of 1."""
    UNMATCHED = "unmatched"
    """The tensor has no partner."""
    UNREADABLE = "unreadable"
    """A file of the pair could not be read."""
    UNKNOWN = "unknown"
    """There are neither elements nor statistics that are known on both sides."""

    @property
    def agrees(self) -> bool:
        """Whether two tensors with this verdict count as equal."""
        return self in (TensorVerdict.SAME, TensorVerdict.NORMAL)


@dataclass(frozen=True, slots=True)
class DifferenceMeasures:
    """Differences of two tensors with the same shape, over elements that are finite on both sides.

    Sums are in float64. `relative` divides by `abs(b)`, the reference, where that is not 0. A
    measure without a meaning is NaN: without finite elements, or with a norm of 0.
    """

    count: int
    """Number of elements on each side; a complex element counts as two."""
    unequal: int
    """Number of elements that are not close, including those that are not finite."""
    max_absolute: float
    max_relative: float
    mean_absolute: float
    mean_relative: float
    cosine: float
    """Cosine similarity; 1 when both norms are 0, NaN when only one is."""
    rmse: float
    relative_euclidean: float
    """`norm(a - b) / norm(b)`."""
    kl_divergence: float
    """Kullback-Leibler divergence of a from b, each scaled to the sum 1; NaN for negative elements
    or sums of 0.
    """
    mean_absolute_unequal: float
    """Mean absolute difference over the unequal elements, as in `api_dump_compare`; 0 if there are
    none.
    """
    max_absolute_unequal: float
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_apart: int
    """Number of places where the sides differ and at least one of them is not finite."""

    @property
    def close_share(self) -> float:
        """Share of elements that are close, from 0 to 1; 1 if there are no elements."""
        return 1.0 - self.unequal / self.count if self.count else 1.0


@dataclass(frozen=True, slots=True)
class PairOutcome:
    """Outcome of the comparison of one pair of tensors."""

    verdict: TensorVerdict
    findings: tuple[str, ...] = ()
    """One sentence for each finding, such as: dtypes differ, shapes differ, NaN at other places, a
    file is damaged.
    """
    measures: DifferenceMeasures | None = None
    """Measures of the elements; None if they were not read: identical digests, statistics only, no
    partner.
    """
    statistic_differences: Mapping[str, float] = field(default_factory=dict[str, float])
    """Differences of statistics by name, if only statistics are known."""
    extra: Mapping[str, float] = field(default_factory=dict[str, float])
    """msaccucmp's measures by name, if they were requested."""
    nonfinite_a: bool | None = None
    """Whether side a has NaN or infinity; None if that is unknown."""
    nonfinite_b: bool | None = None
    error_ratio: float | None = None
    """Ratio of the error to the error that noise runs, rounding or a tolerance by name explain;
    None if elements were judged one by one.
    """
    judged_by: str = ""
    """What explained the error, such as `rounding`; empty if elements were judged one by one."""


NOT_COMPARED = PairOutcome(TensorVerdict.UNKNOWN)
"""Outcome of a pair before it is compared."""


class DumpedTensor(NamedTuple):
    """One tensor of a call, as a tree describes it; its elements stay on disk.

    This is a NamedTuple, like `DumpedCall` and `ComparisonRow`, because a dump has many of them and
    no other kind of value is created faster.
    """

    side: TensorSide
    slot: int
    argument: str
    """Place in the arguments or results of the call; empty if it is unknown."""
    dtype: str
    """Element type in the framework; the file may have a wider type. Empty if only the file tells
    it.
    """
    shape: tuple[int, ...] | None
    """Shape; None if only the file tells it."""
    digest: str = ""
    """xxh3-128 of the elements as the framework had them; empty if it is unknown."""
    entry: Entry | None = None
    """File with the elements; None if only statistics are known."""
    statistics: Mapping[str, float] = NO_STATISTICS
    """Statistics by the names of `statistic_category`: `max`, `min`, `avg`, `l2norm`, `nan count`,
    ...
    """
    seen_order: int = 0
    """Position in the order in which the tensors of its program were seen."""
    parts: tuple[Entry, ...] = ()
    """Files of the ranks that the tensor is joined from; empty for the tensor of one rank."""
    fingerprint: RecordedFingerprint | None = None
    """Fingerprint of the whole tensor, even if it is joined from parts; None if it is unknown."""
    row_record: ManifestRecord | None = None
    """Record of a tensor without a file; None if it is unknown."""
    guesses: tuple[DumpedTensor, ...] = ()
    """Guesses what the ranks' tensors are together, if only their statistics are known."""

    @property
    def files(self) -> tuple[Entry, ...]:
        """Files with the tensor's elements, or with those of its parts; empty if none are known."""
        return self.parts or ((self.entry,) if self.entry is not None else ())

    @property
    def record(self) -> ManifestRecord | None:
        """Record of the tensor in its manifest; None if there is none."""
        return self.entry.record if self.entry is not None else self.row_record

    @property
    def slot_name(self) -> str:
        """Side and slot, as `input.0`, which is how reports name them."""
        return f"{self.side.value}.{self.slot}"

    @property
    def layout(self) -> TensorLayout | None:
        """Layout, which says which part of a tensor of the whole model this is; None if it is
        unknown.
        """
        record = self.record
        return record.layout if record is not None else None

    @property
    def is_sample(self) -> bool:
        """Whether only the first elements of the tensor were kept."""
        return self.layout is not None and self.layout.is_sample

    @property
    def microbatch(self) -> int | None:
        """Number of the tensor's micro-batch; None if it has none."""
        record = self.record
        return record.microbatch if record is not None else None


class DumpedCall(NamedTuple):
    """One call of an operator in one iteration of one rank, or the backward pass of one."""

    position: int
    """Position among the calls of its program, in execution order."""
    op_type: str
    op_name: str
    """Name of the operator; the raw name if the tree has it."""
    inputs: tuple[DumpedTensor, ...] = ()
    """Input tensors, sorted by slot."""
    outputs: tuple[DumpedTensor, ...] = ()
    graph: int = 0
    backward: bool = False
    recomputed: bool = False

    @property
    def tensors(self) -> tuple[DumpedTensor, ...]:
        """All tensors of the call, inputs first."""
        return (*self.inputs, *self.outputs)

    @property
    def microbatch(self) -> int | None:
        """Number of the call's micro-batch; None if its tensors have none."""
        tensors = self.inputs or self.outputs
        return tensors[0].microbatch if tensors else None


@dataclass(frozen=True, slots=True)
class DumpedProgram:
    """Calls of one rank in one iteration, in order."""

    rank: int
    iteration: int
    """Iteration; CONSTANTS_ITERATION for constants."""
    calls: tuple[DumpedCall, ...]

    @property
    def place(self) -> ProgramPlace:
        """Rank and iteration of the program."""
        return self.rank, self.iteration

    @property
    def tensors(self) -> Iterator[DumpedTensor]:
        """Tensors of all calls."""
        return (tensor for call in self.calls for tensor in call.tensors)


@dataclass(frozen=True, slots=True)
class CallPair:
    """Paired calls of both sides; one of them is None if a call has no partner."""

    a: DumpedCall | None
    b: DumpedCall | None
    rule: PairingRule = ""

    @property
    def either(self) -> DumpedCall:
        """The call of side a; that of side b if side a has none."""
        call = self.a or self.b
        assert call is not None
        return call


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to compare; one of them is None if a tensor has no partner."""

    a: DumpedTensor | None
    b: DumpedTensor | None


class ComparisonRow(NamedTuple):
    """One line of a report: a pair of tensors of a pair of calls."""

    rank: int
    """Rank on side a, as the iteration is that of side a; `ComparisonReport.places_of_b` has those
    of side b.
    """
    iteration: int
    """Iteration; CONSTANTS_ITERATION for constants."""
    position: int
    """Position of the pair of calls in the execution order of its program."""
    rule: PairingRule
    op_type: str
    name_a: str
    """Name of the call on side a; empty if side a has no call."""
    name_b: str
    backward: bool
    pair: TensorPair
    outcome: PairOutcome

    @property
    def place(self) -> ProgramPlace:
        """Rank and iteration of the row."""
        return self.rank, self.iteration

    @property
    def name(self) -> str:
        """Name of the call on side a; that on side b if side a has none."""
        return self.name_a or self.name_b

    @property
    def agrees(self) -> bool:
        """Whether the two tensors count as equal."""
        return self.outcome.verdict.agrees

    @property
    def slot_name(self) -> str:
        """Side and slot, such as `input.0` or `output.1`."""
        tensor = self.pair.a or self.pair.b
        return tensor.slot_name if tensor is not None else ""

    @property
    def place_name(self) -> str:
        """Side and slot; with the name of the argument if it has one: `output.0 (loss)`."""
        named = [name_argument(each.argument) for each in (self.pair.a, self.pair.b) if each]
        name = next(filter(None, named), "")
        return f"{self.slot_name} ({name})" if name else self.slot_name


@dataclass(frozen=True, slots=True)
class SuspectCall:
    """A call that may be the origin."""

    rank: int
    """Rank in the dump that the origin is about, as is the iteration; for an origin on side b,
    those of side b.
    """
    iteration: int
    position: int
    op_type: str
    name_a: str
    name_b: str
    backward: bool
    reason: str
    """One sentence about the call's inputs and outputs, and the size of the difference."""
    source: tuple[SourceLine, ...] = ()
    """Call stack, outermost line first; empty if the tree has none."""
    row_place: ProgramPlace | None = None
    """Rank and iteration of the call in the rows of the report, if they differ from these."""


@dataclass(frozen=True, slots=True)
class DivergenceOrigin:
    """Origin of a difference or of non-finite values, in the whole job or on one rank."""

    kind: OriginKind
    side: Literal["", "a", "b"]
    """Dump with the non-finite values; empty for `difference`."""
    certain: bool
    """Whether the origin is certain; if not, any of the suspects may be it."""
    suspects: tuple[SuspectCall, ...]
    """Suspected calls, the likeliest first; exactly one if the origin is certain."""
    ambiguity: str = ""
    """Reason why the origin is not certain."""


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Settings of a comparison."""

    tolerances: ElementTolerances = field(default_factory=ElementTolerances)
    rules: tuple[PairingRule, ...] = ("exact", "type", "sequence")
    """Rules in the order in which they apply, each to the calls that the earlier rules left
    unpaired.
    """
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of side b by names of side a: names of operators, or of their prefixes."""
    msaccucmp: bool = False
    """Whether msaccucmp's measures are computed as well."""
    noise: tuple[str, ...] = ()
    """Names of runs that should agree with side b; if there are any, their errors are the
    tolerances.
    """
    named: tuple[NamedTolerance, ...] = ()
    """Tolerances by name; the last one that matches a name applies, before any other tolerance."""
    by_rounding: bool = False
    """Whether the error of rounding is the tolerance if no noise runs are given."""


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """Result of a comparison."""

    a: str
    """Path of side a as it was given, with rank and iteration if these were given."""
    b: str
    settings: ComparisonSettings
    rows: tuple[ComparisonRow, ...]
    """Rows sorted by iteration, then in execution order, then by rank."""
    origins: tuple[DivergenceOrigin, ...] = ()
    """Origins in the whole job: at most one `difference`, and one `nonfinite` for each side."""
    rank_origins: tuple[DivergenceOrigin, ...] = ()
    """Origins on each rank, by rank."""
    notes: tuple[str, ...] = ()
    """Sentences about ranks and iterations that only one side has, and about damage."""
    seconds: float = 0.0
    places_of_b: Mapping[ProgramPlace, ProgramPlace] = field(
        default_factory=dict[ProgramPlace, ProgramPlace]
    )
    """Rank and iteration of side b for those of side a, if they differ."""
    card_findings: tuple[CardFinding, ...] = ()
    """Differences before the first operator according to run cards, and remarks about run cards."""
    is_joined: bool = False
    """Whether the ranks of each side were joined before the comparison."""

    @property
    def agrees(self) -> bool:
        """Whether nothing is missing, every tensor has a partner, and all pairs count as equal;
        differences between run cards are ignored.
        """
        lacking = any(each.subject in ("ranks", "files") for each in self.card_findings)
        return all(row.agrees for row in self.rows) and not self.notes and not lacking

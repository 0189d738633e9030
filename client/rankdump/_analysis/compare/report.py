"""Values of a comparison: dumped tensors, calls and programs, pairs, verdicts, measures, origins
and the report. Pure values.

The order is: two trees -> DumpedProgram (calls in order) -> CallPair -> TensorPair ->
PairOutcome -> ComparisonReport.
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
"""Statistics of a tensor without known statistics."""
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
    """Return the iteration of a program; None for that of the constants."""
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
    """Whether NaN equals NaN at the same place. Without it, every NaN is unequal."""


@dataclass(frozen=True, slots=True)
class NamedTolerance:
    """The largest normal error of tensors whose operator has a name."""

    pattern: str
    """Glob, as in `--op`."""
    error: float | None
    """Root mean square of the difference, relative to that of the reference; None for the error of
    rounding."""


class TensorVerdict(str, Enum):
    """Verdict on two tensors; reports show the value."""

    SAME = "same"
    """The same bytes, or the same numbers."""
    NORMAL = "normal"
    """Different within the tolerances, as rounding or noise runs explain it."""
    SUSPICIOUS = "suspicious"
    """Above what noise runs, rounding or a tolerance by name explain, but not far above."""
    DIFFERENT = "different"
    """Beyond that."""
    NAN = "nan"
    """NaN or infinity at a place where the other side has a different value."""
    SHAPE = "shape"
    """The shapes differ in more than extents of 1."""
    UNMATCHED = "unmatched"
    """The tensor has no partner."""
    UNREADABLE = "unreadable"
    """A file could not be read."""
    UNKNOWN = "unknown"
    """Neither elements nor statistics are known on both sides."""

    @property
    def agrees(self) -> bool:
        """Whether the two count as equal."""
        return self in (TensorVerdict.SAME, TensorVerdict.NORMAL)


@dataclass(frozen=True, slots=True)
class DifferenceMeasures:
    """Differences of two tensors of one shape, over elements that are finite on both sides.

    Sums are in float64. `relative` divides by `abs(b)`, the reference, where that is not 0. A
    measure without a meaning is NaN: without finite elements, or with a norm of 0.
    """

    count: int
    """Elements of each side; a complex one counts as two."""
    unequal: int
    """Elements that are not close, including those that are not finite."""
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
    """Of a from b, each scaled to sum 1; NaN for negative elements or sums of 0."""
    mean_absolute_unequal: float
    """Mean over the unequal elements, as in `api_dump_compare`; 0 without any."""
    max_absolute_unequal: float
    nonfinite_a: int
    nonfinite_b: int
    nonfinite_apart: int
    """Places where the sides differ and one is not finite."""

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
    """msaccucmp's measures by name, when they were requested."""
    nonfinite_a: bool | None = None
    """Whether side a holds NaN or infinity; None when unknown."""
    nonfinite_b: bool | None = None
    error_ratio: float | None = None
    """Ratio of the error to the one that noise runs, rounding or a tolerance by name explain; None
    where elements were judged by themselves."""
    judged_by: str = ""
    """Which of these it was: `rounding`; empty where elements were judged by themselves."""


NOT_COMPARED = PairOutcome(TensorVerdict.UNKNOWN)
"""Outcome of a pair before it is compared."""


class DumpedTensor(NamedTuple):
    """One tensor of a call, as a tree describes it; its elements stay on disk.

    A NamedTuple, like `DumpedCall` and `ComparisonRow`: a dump has many of them, and no other
    value is created faster.
    """

    side: TensorSide
    slot: int
    argument: str
    """Place in the arguments or results of the call; empty when unknown."""
    dtype: str
    """Type in the framework; the file may have a wider one. Empty when only the file has it."""
    shape: tuple[int, ...] | None
    """None when only the file has it."""
    digest: str = ""
    """xxh3-128 of the elements as the framework held them; empty when unknown."""
    entry: Entry | None = None
    """File with the elements; None when only statistics are known."""
    statistics: Mapping[str, float] = NO_STATISTICS
    """By the names of `statistic_category`: `max`, `min`, `avg`, `l2norm`, `nan count`, ..."""
    seen_order: int = 0
    """Position in the order in which the tensors of its program were seen."""
    parts: tuple[Entry, ...] = ()
    """Files of the ranks that it is to be joined from; empty for the tensor of one rank."""
    fingerprint: RecordedFingerprint | None = None
    """Of all of it, also where it is to be joined; None when unknown."""
    row_record: ManifestRecord | None = None
    """Record of a tensor without a file; None when unknown."""
    guesses: tuple[DumpedTensor, ...] = ()
    """What it may be together with those of other ranks, of which statistics alone are known."""

    @property
    def files(self) -> tuple[Entry, ...]:
        """Files with its elements, or with those of its parts; empty where none are known."""
        return self.parts or ((self.entry,) if self.entry is not None else ())

    @property
    def record(self) -> ManifestRecord | None:
        """What the manifest says of it; None where there is none."""
        return self.entry.record if self.entry is not None else self.row_record

    @property
    def slot_name(self) -> str:
        """`input.0`, as reports call it."""
        return f"{self.side.value}.{self.slot}"

    @property
    def layout(self) -> TensorLayout | None:
        """Which part of a tensor of the whole model it is; None where that is not known."""
        record = self.record
        return record.layout if record is not None else None

    @property
    def is_sample(self) -> bool:
        """Whether only its first elements were kept."""
        return self.layout is not None and self.layout.is_sample

    @property
    def microbatch(self) -> int | None:
        """Number of its micro-batch; None where it has none."""
        record = self.record
        return record.microbatch if record is not None else None


class DumpedCall(NamedTuple):
    """One call of an operator in one iteration of one rank, or the backward of one."""

    position: int
    """Position among the calls of its program, in execution order."""
    op_type: str
    op_name: str
    """Raw name where the tree has it."""
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

    @property
    def microbatch(self) -> int | None:
        """Number of its micro-batch; None where tensors have none."""
        tensors = self.inputs or self.outputs
        return tensors[0].microbatch if tensors else None


@dataclass(frozen=True, slots=True)
class DumpedProgram:
    """Calls of one rank in one iteration, in order."""

    rank: int
    iteration: int
    """CONSTANTS_ITERATION for constants."""
    calls: tuple[DumpedCall, ...]

    @property
    def place(self) -> ProgramPlace:
        """Rank and iteration."""
        return self.rank, self.iteration

    @property
    def tensors(self) -> Iterator[DumpedTensor]:
        """Tensors of all calls."""
        return (tensor for call in self.calls for tensor in call.tensors)


@dataclass(frozen=True, slots=True)
class CallPair:
    """Calls of both sides that are paired; one is None for a call without a partner."""

    a: DumpedCall | None
    b: DumpedCall | None
    rule: PairingRule = ""

    @property
    def either(self) -> DumpedCall:
        """The call of a, or that of b without one."""
        call = self.a or self.b
        assert call is not None
        return call


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to compare; one is None for a tensor without a partner."""

    a: DumpedTensor | None
    b: DumpedTensor | None


class ComparisonRow(NamedTuple):
    """One line of a report: a pair of tensors of a pair of calls."""

    rank: int
    """Rank, like the iteration, of side a; `ComparisonReport.places_of_b` has those of side b."""
    iteration: int
    """CONSTANTS_ITERATION for constants."""
    position: int
    """Position of the pair of calls, in execution order of its program."""
    rule: PairingRule
    op_type: str
    name_a: str
    """Name of the call of side a; empty without one."""
    name_b: str
    backward: bool
    pair: TensorPair
    outcome: PairOutcome

    @property
    def place(self) -> ProgramPlace:
        """Rank and iteration."""
        return self.rank, self.iteration

    @property
    def name(self) -> str:
        """Name of the call of side a, or of side b without one."""
        return self.name_a or self.name_b

    @property
    def agrees(self) -> bool:
        """Whether the two tensors count as equal."""
        return self.outcome.verdict.agrees

    @property
    def slot_name(self) -> str:
        """`input.0` or `output.1`."""
        tensor = self.pair.a or self.pair.b
        return tensor.slot_name if tensor is not None else ""

    @property
    def place_name(self) -> str:
        """`input.0`, with the name of an argument that has one: `output.0 (loss)`."""
        named = [name_argument(each.argument) for each in (self.pair.a, self.pair.b) if each]
        name = next(filter(None, named), "")
        return f"{self.slot_name} ({name})" if name else self.slot_name


@dataclass(frozen=True, slots=True)
class SuspectCall:
    """A call that may be the origin."""

    rank: int
    """Rank, like the iteration, of the dump that the origin is about: of side b where that is."""
    iteration: int
    position: int
    op_type: str
    name_a: str
    name_b: str
    backward: bool
    reason: str
    """One sentence about its inputs and outputs, and the amount of the difference."""
    source: tuple[SourceLine, ...] = ()
    """Call stack, outermost first; empty when the tree has none."""
    row_place: ProgramPlace | None = None
    """Rank and iteration of the call in the rows of the report, where they are others."""


@dataclass(frozen=True, slots=True)
class DivergenceOrigin:
    """Origin of a difference or of non-finite values, in the whole job or on one rank."""

    kind: OriginKind
    side: Literal["", "a", "b"]
    """Dump with the non-finite values; empty for `difference`."""
    certain: bool
    """False when the origin may be any of the suspects."""
    suspects: tuple[SuspectCall, ...]
    """The likeliest first; exactly one when the origin is certain."""
    ambiguity: str = ""
    """Reason why the origin is not certain."""


@dataclass(frozen=True, slots=True)
class ComparisonSettings:
    """Settings of a comparison."""

    tolerances: ElementTolerances = field(default_factory=ElementTolerances)
    rules: tuple[PairingRule, ...] = ("exact", "type", "sequence")
    """In the order in which they apply, each to the calls that the rules before it left."""
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of side b by names of side a: of operators, or of their prefixes."""
    msaccucmp: bool = False
    """Whether msaccucmp's measures are computed as well."""
    noise: tuple[str, ...] = ()
    """Runs that should agree with side b; with some, their errors are the tolerances."""
    named: tuple[NamedTolerance, ...] = ()
    """The last one that matches a name holds for it, before any other tolerance."""
    by_rounding: bool = False
    """Whether the error of rounding is the tolerance, where no noise run is given."""


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """Report of a comparison."""

    a: str
    """Path of side a as it was given, with rank and iteration if given."""
    b: str
    settings: ComparisonSettings
    rows: tuple[ComparisonRow, ...]
    """By iteration, then in execution order, then by rank."""
    origins: tuple[DivergenceOrigin, ...] = ()
    """In the whole job: at most one `difference`, and one `nonfinite` for each side."""
    rank_origins: tuple[DivergenceOrigin, ...] = ()
    """Origins on each rank, by rank."""
    notes: tuple[str, ...] = ()
    """Sentences about ranks and iterations of one side only, and about damage."""
    seconds: float = 0.0
    places_of_b: Mapping[ProgramPlace, ProgramPlace] = field(
        default_factory=dict[ProgramPlace, ProgramPlace]
    )
    """Rank and iteration of side b by those of side a, where they differ."""
    card_findings: tuple[CardFinding, ...] = ()
    """What differs before the first operator according to run cards, and remarks on these."""
    is_joined: bool = False
    """Whether the ranks of each side were joined before."""

    @property
    def agrees(self) -> bool:
        """Whether everything is there, has a partner and counts as the same; whatever run cards
        say.
        """
        lacking = any(each.subject in ("ranks", "files") for each in self.card_findings)
        return all(row.agrees for row in self.rows) and not self.notes and not lacking

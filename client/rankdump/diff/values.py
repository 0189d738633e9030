"""What the parts of a comparison hand to each other. Pure values.

two trees -> Program (calls in order) -> PairedCalls -> TensorPair -> Comparison -> Report
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from rankdump.contract.graph import SourceLine
from rankdump.contract.key import Side
from rankdump.diff.verdicts import Measures, Outcome, Tolerances, Verdict
from rankdump.reader import Entry

__all__ = [
    "CONSTANTS",
    "NO_FIGURES",
    "Call",
    "Measures",
    "Origin",
    "OriginKind",
    "Outcome",
    "PairedCalls",
    "Program",
    "Report",
    "Row",
    "Rule",
    "Settings",
    "Suspect",
    "Tensor",
    "TensorPair",
    "Tolerances",
    "Verdict",
]

NO_FIGURES: Mapping[str, float] = {}
"""Of a tensor of which none are known."""
CONSTANTS = -1
"""Iteration of the program that holds the constants of a rank: they belong to none."""

Rule = Literal["exact", "mapping", "type", "sequence", ""]
"""Which rule paired two calls; empty for a call that has no partner.

`exact`: the same name. `mapping`: the user's file. `type`: the same type, in the same order.
`sequence`: in the longest common subsequence.
"""


class Tensor(NamedTuple):
    """One tensor of a call, as a tree knows it; its elements stay on the disk.

    There are as many as files: no value is made faster. So it is with a `Call` and a `Row`.
    """

    side: Side
    slot: int
    argument: str
    """Where in the call it stood, as the tree says it; empty when unknown."""
    dtype: str
    """As the framework held it; the file may hold a wider type. Empty when only the file knows."""
    shape: tuple[int, ...] | None
    """None when only the file knows."""
    digest: str = ""
    """xxh3-128 of the elements as the framework held them; empty when unknown."""
    entry: Entry | None = None
    """Where the elements are; None when only figures are known."""
    figures: Mapping[str, float] = NO_FIGURES
    """By the names of `contract.statistics`: `max`, `min`, `avg`, `l2norm`, `nan count`, ..."""
    seen: int = 0
    """Place among the tensors of its program, in the order in which they were seen."""

    @property
    def place(self) -> str:
        """`input.0`, as reports call it."""
        return f"{self.side.value}.{self.slot}"


class Call(NamedTuple):
    """One call of an operator in one iteration of one rank, or the backward of one."""

    position: int
    """Among the calls of its program, in execution order."""
    op_type: str
    op_name: str
    """Raw where the tree knows it."""
    inputs: tuple[Tensor, ...] = ()
    """By slot."""
    outputs: tuple[Tensor, ...] = ()
    graph: int = 0
    backward: bool = False
    recomputed: bool = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Inputs first."""
        return (*self.inputs, *self.outputs)


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank ran in one iteration, in order."""

    rank: int
    iteration: int
    """CONSTANTS for what never changes."""
    calls: tuple[Call, ...]


@dataclass(frozen=True, slots=True)
class PairedCalls:
    """A call of each side that stand for each other; one of them is None when it has no partner."""

    a: Call | None
    b: Call | None
    rule: Rule = ""


TYPES = "dtype "
"""What a finding begins with that says of which types the two sides are."""


@dataclass(frozen=True, slots=True)
class TensorPair:
    """Two tensors to be compared; one of them is None when it has no partner."""

    a: Tensor | None
    b: Tensor | None


class Row(NamedTuple):
    """One line of a report: a pair of tensors of a pair of calls."""

    rank: int
    """Of side a; of b where a has no partner."""
    iteration: int
    """CONSTANTS for what never changes."""
    position: int
    """Of the pair of calls, in execution order of its program."""
    rule: Rule
    op_type: str
    name_a: str
    """Name of the call on that side; empty where there is none."""
    name_b: str
    backward: bool
    pair: TensorPair
    outcome: Outcome

    @property
    def place(self) -> str:
        """`input.0` or `output.1`."""
        tensor = self.pair.a or self.pair.b
        return tensor.place if tensor is not None else ""


OriginKind: TypeAlias = Literal["difference", "nonfinite"]


@dataclass(frozen=True, slots=True)
class Suspect:
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
class Origin:
    """Where it starts: in the whole, or on one rank."""

    kind: OriginKind
    side: Literal["", "a", "b"]
    """Of `nonfinite`: in which dump."""
    certain: bool
    """Without this it is ambiguous, and any of the suspects may be meant."""
    suspects: tuple[Suspect, ...]
    """The first is the likeliest; exactly one where it is certain."""
    why: str = ""
    """Why it is ambiguous; empty where it is certain."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How a comparison was asked for."""

    tolerances: Tolerances = field(default_factory=Tolerances)
    rules: tuple[Rule, ...] = ("exact", "type", "sequence")
    """Tried in this order, each on what the ones before it left."""
    mapping: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names of side b by names of side a: of operators, or of what they begin with."""
    msaccucmp: bool = False
    """Whether msaccucmp's measures are computed as well."""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole comparison."""

    a: str
    """What was compared: paths as they were given, with rank and iteration where they were."""
    b: str
    settings: Settings
    rows: tuple[Row, ...]
    """By iteration, then in execution order; ranks side by side where the order is merged."""
    origins: tuple[Origin, ...] = ()
    """Of the whole: at most one `difference`, and one `nonfinite` for each side."""
    rank_origins: tuple[Origin, ...] = ()
    """Of each rank, by rank and kind."""
    notes: tuple[str, ...] = ()
    """What a reader has to know: ranks of one side only, files of no partner, damage."""
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether everything has a partner and counts as the same."""
        return all(row.outcome.verdict.agrees for row in self.rows) and not self.notes

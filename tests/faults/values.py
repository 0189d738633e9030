"""Values that modules of the rig exchange."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class FaultKind(str, Enum):
    """A kind of fault."""

    KILL_RANK = "kill_rank"
    KILL_AGENT = "kill_agent"
    KILL_WORKER = "kill_worker"
    KILL_COORDINATOR = "kill_coordinator"
    CUT = "cut"
    DELAY = "delay"
    HOLE = "hole"
    EIO = "eio"
    ENOSPC = "enospc"
    INODES = "inodes"
    STATE_FULL = "state_full"
    STALL = "stall"
    STOPPED = "stopped"
    DOUBLED = "doubled"
    SWAPPED = "swapped"
    FLIPPED_CHUNK = "flipped_chunk"
    FLIPPED_SLAB = "flipped_slab"
    CLOCK = "clock"
    DESCRIPTORS = "descriptors"
    FREEZE = "freeze"
    CONTROL = "control"


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One fault of a schedule."""

    at_s: float
    """Since the run began."""
    kind: FaultKind
    target: int
    """Index of the target, modulo the processes that this kind can hit."""
    lasts_s: float
    """0 for a fault without duration."""
    amount: int
    """Strength or variant; the meaning depends on the kind."""


@dataclass(frozen=True, slots=True, order=True)
class TensorName:
    """Identity of a tensor of a job; it determines the elements."""

    rank: int
    life: int
    iteration: int
    number: int
    slot: int


@dataclass(frozen=True, slots=True)
class RankLife:
    """One process of a rank, by its journal."""

    rank: int
    life: int
    session_id: str
    root: str
    begun: int
    """The last iteration that it began; -1 for none."""
    ended: Mapping[int, int]
    """Tensors of each iteration that it ended."""
    closed: bool
    """Whether it said goodbye and everything was taken."""
    acknowledged: int
    """The highest number that it was told is safe."""
    left: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What it kept when it said goodbye, and in which state it waited no longer."""


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A tensor in an agent's ledger."""

    session_id: str
    sequence: int
    name: TensorName | None
    """None for one that nobody dumped."""
    fate: str
    reason: str
    path: str


@dataclass(frozen=True, slots=True)
class IterationEndRow:
    """The end of an iteration in an agent's ledger."""

    session_id: str
    iteration: int
    expected: int
    dropped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LedgerContent:
    """Content of the ledgers of all agents."""

    rows: tuple[LedgerRow, ...]
    ends: tuple[IterationEndRow, ...]
    sequences: Mapping[str, frozenset[int]]
    """Numbers that stand there, by session."""
    figures: Mapping[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    """Rows of figures that are kept, by session and iteration."""
    refused: Mapping[tuple[str, int], Mapping[str, int]] = field(
        default_factory=dict[tuple[str, int], Mapping[str, int]]
    )
    """Those that are not, by reason."""
    folded: Mapping[tuple[str, int], Mapping[str, int]] = field(
        default_factory=dict[tuple[str, int], Mapping[str, int]]
    )
    """Tensors of old iterations of which the ledger keeps sums, by fate, or by a drop's reason."""


@dataclass(frozen=True, slots=True)
class FoundTensor:
    """A tensor in the tree, or a row of statistics."""

    root: str
    path: str
    name: TensorName | None
    """None for one that nobody dumped."""
    fault: str
    """Why it is not the tensor of that name, bit for bit; empty when it is."""
    row: bool = False


@dataclass(frozen=True, slots=True)
class ListedManifest:
    """A manifest."""

    session_id: str
    iteration: int
    expected: int
    kept: int
    dropped: Mapping[str, int]
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PlacedOperator:
    """An operator in the published order of the job of a tree."""

    root: str
    name: TensorName | None
    """Its first slot; None for one that nobody executed."""


@dataclass(frozen=True, slots=True)
class ProcessGrowth:
    """Resources of one daemon process after the first tenth of its life, and in the last."""

    who: str
    seconds: float
    early_mib: float
    """Resident, without what it shares; the median of a tenth of its life, as all of these."""
    late_mib: float
    early_descriptors: int
    """But for folders that it may hold."""
    late_descriptors: int


@dataclass(frozen=True, slots=True)
class RunObservation:
    """All observations at the end of a run."""

    lives: tuple[RankLife, ...]
    ledger: LedgerContent
    files: tuple[FoundTensor, ...]
    manifests: tuple[ListedManifest, ...]
    balances: Mapping[tuple[str, int], tuple[int, int, int]]
    """As the coordinator has them, by session and iteration: expected, kept, dropped."""
    complaints: tuple[str, ...] = ()
    """What was wrong while the run went on, or at its end."""
    placed: Mapping[PlacedOperator, int] = field(default_factory=dict[PlacedOperator, int])
    """How often each operator stands in the published orders."""
    late: Mapping[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Of ranks and iterations the events that came too late for them, as the coordinator says."""
    growths: tuple[ProcessGrowth, ...] = ()


@dataclass(frozen=True, slots=True)
class LawBreach:
    """A violation of a law."""

    law: str
    what: str


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Result of a run."""

    seed: int
    seconds: float
    happened: Mapping[str, int]
    """Faults that really did, by kind."""
    missed: Mapping[str, int]
    figures: Mapping[str, Any]
    breaches: tuple[LawBreach, ...]

"""What an agent, a coordinator or a finished tree knows of a job, for people and scripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump.contract.events import EventKind


class SessionState(str, Enum):
    """How a session stands."""

    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"
    """Its stream ended without a goodbye."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """One rank's session."""

    job_id: str
    session_id: str
    rank: int
    world_size: int
    device: int
    host: str
    pid: int
    state: SessionState
    excluded: str = ""
    """Why the plan selects nothing here; empty when it selects something."""
    iterations_seen: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class IterationStatus:
    """What became of the tensors of one iteration of one rank.

    Once complete, expected = stored + linked + degraded + sum(dropped).
    """

    job_id: str
    session_id: str
    rank: int
    iteration: int
    complete: bool
    expected: int = 0
    stored: int = 0
    linked: int = 0
    """Stored as a hard link to identical bytes."""
    degraded: int = 0
    """Kept as statistics only."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """By reason."""
    bytes_in: int = 0
    bytes_stored: int = 0

    @property
    def balanced(self) -> bool:
        """Whether every expected tensor is accounted for."""
        return self.expected == self.accounted

    @property
    def accounted(self) -> int:
        """Tensors whose fate is known."""
        return self.kept + sum(self.dropped.values())

    @property
    def kept(self) -> int:
        """Tensors that are in the tree in some form."""
        return self.stored + self.linked + self.degraded


@dataclass(frozen=True, slots=True)
class Load:
    """How much is under way, and how much room is left."""

    queued_records: int = 0
    queued_bytes: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StatusView:
    """The whole picture."""

    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    load: Load = Load()
    roots: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankEvents:
    """Where a batch of events comes from; the columns travel beside it."""

    job_id: str
    rank: int


@dataclass(frozen=True, slots=True)
class OrderEntry:
    """One line of the global execution order; a collective is one entry with all its members."""

    position: int
    graph: int
    iteration: int
    ranks: tuple[int, ...]
    name: str
    kind: EventKind
    group: str = ""
    sequence: int = 0
    start_us: int = 0
    end_us: int = 0
    missing: tuple[int, ...] = ()
    """Members of the group that have not reported this collective."""


@dataclass(frozen=True, slots=True)
class ArrivalHint:
    """The collective of a group whose members arrived furthest apart."""

    job_id: str
    group: str
    kind: EventKind
    iteration: int
    sequence: int
    spread_us: int
    first_rank: int
    last_rank: int
    reason: str

"""What an agent, a coordinator or a finished tree knows of a job, for people and scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump.contract.events import EventKind
from rankdump.contract.findings import Finding
from rankdump.contract.room import DiskStatus, JobNeed, JobUsage, LedgerStatus, MemoryStatus
from rankdump.contract.timeouts import TimeoutHint


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
    framework: str = ""
    """Name and version, as `torch 2.13.0`."""
    device_target: str = ""
    selected: str = ""
    """The iterations its plan selects, as a configuration writes them: `0|5-8`, `all`."""


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
    stall_us: int = 0
    """Time the training thread was held up by dumping."""
    first_position: int = 0
    last_position: int = 0
    """Positions in the rank's program that belong to it; both 0 when that is not known."""

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


_MOST = (1 << 63) - 1
"""What agents say of themselves is any number; together it still has to fit into a message."""


def total_load(loads: Iterable[Load]) -> Load:
    """Return all that is under way, and the room on the fullest disk that any writes to."""
    all_loads = list(loads)
    # Who has no session knows no disk.
    known = [load for load in all_loads if load.disk_total_bytes]
    fullest = min(known, key=lambda load: load.disk_free_bytes, default=Load())
    return Load(
        queued_records=min(_MOST, sum(load.queued_records for load in all_loads)),
        queued_bytes=min(_MOST, sum(load.queued_bytes for load in all_loads)),
        disk_free_bytes=fullest.disk_free_bytes,
        disk_total_bytes=fullest.disk_total_bytes,
    )


@dataclass(frozen=True, slots=True)
class ClockEstimate:
    """How far the coordinator's clock is ahead of an agent's."""

    offset_us: int = 0
    error_us: int = 0
    """The offset is wrong by at most this."""
    steps: int = 0
    """Times the agent's clock was set while it ran."""
    known: bool = False


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """An agent as its coordinator knows it."""

    agent_id: str
    host: str
    heard_s: float
    """Since it last said something."""
    connected: bool
    clock: ClockEstimate = ClockEstimate()
    held_events: int = 0
    """Events that wait there to be reported."""
    lost_events: int = 0
    """Events that were dropped because too many waited."""
    load: Load = Load()


@dataclass(frozen=True, slots=True)
class MergeStatus:
    """How far the merged order of a job is."""

    job_id: str
    published_iterations: int = 0
    published_events: int = 0
    pending_iterations: int = 0
    pending_events: int = 0
    lag_s: float = 0.0
    """Since the oldest event that is not published came; 0 when all are."""


@dataclass(frozen=True, slots=True)
class StatusView:
    """The whole picture."""

    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    load: Load = Load()
    roots: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    """What people should know, a sentence each."""
    agents: tuple[AgentStatus, ...] = ()
    """This comes from coordinators only, and so do merges and hints."""
    merges: tuple[MergeStatus, ...] = ()
    hints: tuple[TimeoutHint, ...] = ()
    order_findings: tuple[Finding, ...] = ()
    disks: tuple[DiskStatus, ...] = ()
    """This and what follows comes from agents only."""
    usage: tuple[JobUsage, ...] = ()
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    needs: tuple[JobNeed, ...] = ()
    ledger: LedgerStatus = field(default_factory=LedgerStatus)


@dataclass(frozen=True, slots=True)
class RankEvents:
    """Where a batch of events comes from; the columns travel beside it."""

    job_id: str
    rank: int
    session_id: str = ""


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
    rank_positions: tuple[int, ...] = ()
    """Its place in the program of each of the ranks."""
    streams: tuple[int, ...] = ()
    """The stream it ran on, of each of the ranks."""
    element_count: int = 0
    """Of a collective or message."""
    dtype: str = ""
    """Type of the elements."""
    peer: int = -1
    """Global rank at the other end of a send or receive."""

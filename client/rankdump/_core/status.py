"""Status of a job as an agent, a coordinator or a finished tree knows it, for people, scripts and
monitoring: sessions, iterations, agents, merges, limits and what is used of them. Pure values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from rankdump._core.events import EventKind, Finding
from rankdump._core.timeouts import TimeoutHint


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """A disk that dumps stand on."""

    root: str
    """A tree on it."""
    free_bytes: int = 0
    total_bytes: int = 0
    floor_bytes: int = 0
    """Tensors are refused rather than leave less than this."""
    free_inodes: int = 0
    total_inodes: int = 0
    used_bytes: int = 0
    """What dumps of this agent take on it."""
    limit_bytes: int = 0
    """What they may take; 0: no limit."""
    floor_inodes: int = 0
    """Tensors are refused rather than leave room for fewer files."""
    unfinished_ranks: int = 0
    """Ranks with that tree that may send more, or of which something is still to be written."""


@dataclass(frozen=True, slots=True)
class JobUsage:
    """What the dump of a job takes."""

    job_id: str
    bytes_stored: int = 0
    limit_bytes: int = 0
    """What it may take; 0: no limit."""
    pinned: bool = False
    """It is not removed, whatever its age."""
    retired_iterations: int = 0
    """Iterations of ranks that were removed because of their age, or for room."""


@dataclass(frozen=True, slots=True)
class JobNeed:
    """What each iteration that a job has still to dump into a tree will take, all ranks together.

    By the largest that each rank has ended.
    """

    job_id: str
    root: str
    iterations: int = 0
    """How many are to come by the plan; 0: it has no end."""
    bytes_stored: int = 0
    """Of tensors."""
    disk_bytes: int = 0
    """In whole blocks, with tables, manifests and folders."""
    inodes: int = 0
    """Files and folders."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """What an agent's ledger takes, and the room that its disk has left."""

    folder: str = ""
    used_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    """Of the disk."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What queue, slabs and sessions take together."""

    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A number as Prometheus names it."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


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
    def is_balanced(self) -> bool:
        """Whether every expected tensor is accounted for."""
        return self.expected == self.accounted_tensors

    @property
    def accounted_tensors(self) -> int:
        """Tensors whose fate is known."""
        return self.kept_tensors + sum(self.dropped.values())

    @property
    def kept_tensors(self) -> int:
        """Tensors that are in the tree in some form."""
        return self.stored + self.linked + self.degraded


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """How much is under way, and how much room is left."""

    queued_records: int = 0
    queued_bytes: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0


_MAX_COUNT = (1 << 63) - 1
"""What agents say of themselves is any number; together it still has to fit into a message."""


def sum_loads(loads: Iterable[AgentLoad]) -> AgentLoad:
    """Return all that is under way, and the room on the fullest disk that any writes to."""
    all_loads = list(loads)
    # Who has no session knows no disk.
    known = [load for load in all_loads if load.disk_total_bytes]
    fullest = min(known, key=lambda load: load.disk_free_bytes, default=AgentLoad())
    return AgentLoad(
        queued_records=min(_MAX_COUNT, sum(load.queued_records for load in all_loads)),
        queued_bytes=min(_MAX_COUNT, sum(load.queued_bytes for load in all_loads)),
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
    load: AgentLoad = AgentLoad()


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
    load: AgentLoad = AgentLoad()
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
class EventSource:
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

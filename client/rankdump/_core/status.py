"""Status of jobs, from an agent, a coordinator or a finished tree, for people, scripts and
monitoring: sessions, iterations, agents, merges, limits and usage. Pure values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum

from rankdump._core.events import EventKind, Finding
from rankdump._core.number_ranges import name_ranks
from rankdump._core.timeouts import TimeoutHint, hint_to_json


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """A disk that holds dumps."""

    root: str
    """A tree on it."""
    free_bytes: int = 0
    total_bytes: int = 0
    floor_bytes: int = 0
    """Tensors that would leave less than this free are rejected."""
    free_inodes: int = 0
    total_inodes: int = 0
    used_bytes: int = 0
    """Bytes that dumps of this agent take on it."""
    limit_bytes: int = 0
    """Most bytes that they may take; 0: no limit."""
    floor_inodes: int = 0
    """Tensors that would leave fewer inodes than this free are rejected."""
    unfinished_ranks: int = 0
    """Ranks with that tree that may send more, or have something left to be written."""


@dataclass(frozen=True, slots=True)
class JobUsage:
    """Size of a job's dump, and its limit."""

    job_id: str
    bytes_stored: int = 0
    limit_bytes: int = 0
    """Most bytes that it may take; 0: no limit."""
    pinned: bool = False
    """Its iterations are not retired."""
    retired_iterations: int = 0
    """Iterations of ranks that were retired, by age or size."""


@dataclass(frozen=True, slots=True)
class JobNeed:
    """Space that each remaining iteration of a job will take in a tree, all ranks together.

    It is estimated from the largest iteration that each rank has ended.
    """

    job_id: str
    root: str
    iterations: int = 0
    """Remaining iterations of the plan; 0: it has no end."""
    bytes_stored: int = 0
    """Of tensors."""
    disk_bytes: int = 0
    """In whole blocks, with tables, manifests and folders."""
    inodes: int = 0
    """Files and folders."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Size of an agent's ledger, and free space on its disk."""

    folder: str = ""
    used_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    """Of the disk."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory of queue, slabs, sessions and rings of steps together."""

    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackBacklog:
    """Files that an agent under pressure stored unpacked, to pack them when it has time."""

    waiting_files: int = 0
    waiting_bytes: int = 0
    packed_files: int = 0
    """Files that the agent has packed later since it was started."""
    packed_bytes: int = 0
    """Bytes that they took before."""
    saved_bytes: int = 0
    """Bytes by which they became smaller."""


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One sample of a Prometheus metric."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])


class SessionState(str, Enum):
    """State of a session."""

    OPEN = "open"
    CLOSED = "closed"
    LOST = "lost"
    """Its stream ended without the end of the session."""


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
    """Why the plan selects nothing on this rank; empty when it selects something."""
    iterations_seen: int = 0
    notes: tuple[str, ...] = ()
    framework: str = ""
    """Name and version, as `torch 2.13.0`."""
    device_target: str = ""
    selected: str = ""
    """The iterations its plan selects, as a configuration writes them: `0|5-8`, `all`."""
    ended_by: str = ""
    """How the process of a lost session ended: `SIGABRT`, `exit code 1`; empty when unknown."""
    last_events_known: bool = False
    """Whether a lost session is known to the end: its process is gone, and what that had in shared
    memory was read. Otherwise its last events may be missing."""
    attempt: int = 0
    """Number of the attempt of the job that the rank's process belongs to."""
    is_elastic: bool = False
    """The launcher restarts all ranks together."""
    started_us: int = 0
    """When the rank began it, on the clock of its records; 0 when it is not known."""
    raised_in: int | None = None
    """The iteration in which an error ended it; None when none did."""
    operators: str = ""
    """The operators that its plan selects now, as entries of a configuration: `conv, fc`, `all`."""
    saved_data: str = ""
    """What is kept of their tensors: `tensor`, `statistic` or `full`."""
    changed_in: int | None = None
    """First iteration with the present plan; None while that is the one of the configuration."""


@dataclass(frozen=True, slots=True)
class IterationStatus:
    """Counts of the tensors of one iteration of one rank, by result.

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
    """Identical bytes are stored already: a hard link to them, or none for `same_as_baseline`."""
    degraded: int = 0
    """Kept as less than the plan selects: statistics, or the first elements."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """By reason."""
    bytes_in: int = 0
    bytes_stored: int = 0
    stall_us: int = 0
    """Time the training thread was held up by dumping."""
    first_position: int = 0
    last_position: int = 0
    """Positions in the rank's program that belong to it; both 0 when that is not known."""
    attempt: int = 0
    """Number of the attempt that ran it."""
    degraded_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """Degraded tensors by reason."""
    same_as_baseline: int = 0
    """Those of `linked` that have no file, because they equal their counterpart in the baseline."""

    @property
    def is_balanced(self) -> bool:
        """Whether every expected tensor is accounted for."""
        return self.expected == self.accounted_tensors

    @property
    def accounted_tensors(self) -> int:
        """Tensors that are stored, linked, degraded or dropped."""
        return self.kept_tensors + sum(self.dropped.values())

    @property
    def kept_tensors(self) -> int:
        """Tensors that are in the tree in some form, or in its baseline."""
        return self.stored + self.linked + self.degraded


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Queued records of agents, and free space of their disk."""

    queued_records: int = 0
    queued_bytes: int = 0
    disk_free_bytes: int = 0
    disk_total_bytes: int = 0


_MAX_COUNT = (1 << 63) - 1
"""Limit of sums: an agent may report any number, and a sum must still fit into a message."""


def sum_loads(loads: Iterable[AgentLoad]) -> AgentLoad:
    """Return the sum of all queues, and the free space of the fullest disk."""
    all_loads = list(loads)
    # An agent without sessions reports no disk.
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
    """An agent, as its coordinator reports it."""

    agent_id: str
    host: str
    heard_s: float
    """Seconds since its last message."""
    connected: bool
    clock: ClockEstimate = ClockEstimate()
    held_events: int = 0
    """Events that wait on the agent to be reported."""
    lost_events: int = 0
    """Events that were dropped because too many waited."""
    load: AgentLoad = AgentLoad()


@dataclass(frozen=True, slots=True)
class MergeStatus:
    """Progress of the merged order of a job."""

    job_id: str
    published_iterations: int = 0
    published_events: int = 0
    pending_iterations: int = 0
    pending_events: int = 0
    lag_s: float = 0.0
    """Seconds since the oldest unpublished event arrived; 0 when all are published."""
    unpublished: tuple[int, ...] = ()
    """Iterations that are not published yet, the first few of them."""


@dataclass(frozen=True, slots=True)
class RankWait:
    """A collective or message that a rank has entered and not left, even if its process is gone."""

    job_id: str
    rank: int
    iteration: int
    kind: str
    """As EventKind's name in lower case."""
    name: str
    group: str
    sequence: int
    start_us: int
    """Microseconds since the epoch on the coordinator's clock."""
    waited_us: int
    """From then until now."""
    source: str = ""
    """`file:line` of the script that made the call; empty when it is not known."""
    absent: tuple[int, ...] = ()
    """Ranks that have not arrived, the first few of them."""
    stuck: bool = False
    """It is part of a deadlock or a mismatch, so it cannot end."""


@dataclass(frozen=True, slots=True)
class FreezeStatus:
    """A freeze of the black boxes of a job."""

    job_id: str
    iteration: int
    kind: str
    """Why: a word of `FaultKind`."""
    text: str
    """A sentence about the cause."""
    root: str = ""
    """The folder of the frozen tree; empty until it is written."""
    frozen_us: int = 0
    """Microseconds since the epoch on the agent's clock."""


@dataclass(frozen=True, slots=True)
class BlackBoxStatus:
    """What the black boxes of the ranks of an agent hold, and the freezes that there were."""

    steps: int = 0
    step_bytes: int = 0
    dropped_steps: int = 0
    """Oldest steps that were dropped because the agent's memory had no room for them."""
    freezes: tuple[FreezeStatus, ...] = ()
    dropped_tensors: int = 0
    """Oldest full tensors that were dropped for the same reason; their steps are kept longer."""


@dataclass(frozen=True, slots=True)
class StatusView:
    """Complete status of one source."""

    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    load: AgentLoad = AgentLoad()
    roots: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    """A sentence for each problem."""
    agents: tuple[AgentStatus, ...] = ()
    """From coordinators only, like merges and hints."""
    merges: tuple[MergeStatus, ...] = ()
    hints: tuple[TimeoutHint, ...] = ()
    order_findings: tuple[Finding, ...] = ()
    disks: tuple[DiskStatus, ...] = ()
    """From agents only, like the fields that follow."""
    usage: tuple[JobUsage, ...] = ()
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    needs: tuple[JobNeed, ...] = ()
    ledger: LedgerStatus = field(default_factory=LedgerStatus)
    waits: tuple[RankWait, ...] = ()
    """From coordinators only: the call that each rank waits in."""
    backlog: PackBacklog = field(default_factory=PackBacklog)
    """From agents only."""
    black_box: BlackBoxStatus = field(default_factory=BlackBoxStatus)
    """From agents, and of a tree the freezes beside it."""


_REJECTED = " rejected: "


def describe_rejection(ranks: Collection[int], why: str) -> str:
    """Return the finding of an agent about ranks that it rejected for one reason."""
    return f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}{_REJECTED}{why}"


def is_rejection(finding: str) -> bool:
    """Return whether a finding of an agent says that it rejected ranks."""
    return _REJECTED in finding


def view_as_json(view: StatusView) -> dict[str, object]:
    """Return the JSON form of a view: the fields of StatusView, and the hints with shares."""
    fields: dict[str, object] = asdict(view)
    fields["hints"] = list(map(hint_to_json, view.hints))
    return fields


@dataclass(frozen=True, slots=True)
class EventSource:
    """Origin of a batch of events; the columns are sent beside it."""

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
    """Its position in the program of each of the ranks."""
    streams: tuple[int, ...] = ()
    """The stream it ran on, on each of the ranks."""
    element_count: int = 0
    """Of a collective or message."""
    dtype: str = ""
    """Type of the elements."""
    peer: int = -1
    """Global rank at the other end of a send or receive."""
    attempt: int = 0
    """Number of the attempt that ran it."""

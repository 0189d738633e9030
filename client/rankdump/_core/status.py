"""Status of jobs from an agent, a coordinator or a finished tree, for people, scripts and
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
    """State of a disk that holds dumps."""

    root: str
    """Root of a tree on the disk."""
    free_bytes: int = 0
    total_bytes: int = 0
    floor_bytes: int = 0
    """Free bytes to be kept: a tensor that would leave less is rejected."""
    free_inodes: int = 0
    total_inodes: int = 0
    used_bytes: int = 0
    """Bytes that the dumps of this agent take on the disk."""
    limit_bytes: int = 0
    """Maximum bytes that these dumps may take; 0 means no limit."""
    floor_inodes: int = 0
    """Free inodes to be kept: a tensor that would leave fewer is rejected."""
    unfinished_ranks: int = 0
    """Number of ranks with this tree that may send more, or for which something is left to be
    written.
    """


@dataclass(frozen=True, slots=True)
class JobUsage:
    """Size of a job's dump, and its limit."""

    job_id: str
    bytes_stored: int = 0
    limit_bytes: int = 0
    """Maximum bytes that the dump may take; 0 means no limit."""
    pinned: bool = False
    """Whether the job is pinned: its iterations are not retired."""
    retired_iterations: int = 0
    """Number of iterations, counted for each rank, that were retired by age or size."""


@dataclass(frozen=True, slots=True)
class JobNeed:
    """Space that each remaining iteration of a job will take in a tree, all ranks together.

    The space is estimated from the largest iteration that each rank has ended.
    """

    job_id: str
    root: str
    iterations: int = 0
    """Number of remaining iterations of the plan; 0 if the plan has no end."""
    bytes_stored: int = 0
    """Bytes of tensor files."""
    disk_bytes: int = 0
    """Bytes on the disk in whole blocks, including tables, manifests and folders."""
    inodes: int = 0
    """Number of files and folders."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """Size of an agent's ledger, and free space on its disk."""

    folder: str = ""
    used_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    """Capacity of the disk in bytes."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """Memory that an agent uses for queue, slabs, sessions and rings of steps together, and its
    limit.
    """

    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PackBacklog:
    """Files that an agent stored unpacked when it did not keep up, and packs when it has time."""

    waiting_files: int = 0
    waiting_bytes: int = 0
    packed_files: int = 0
    """Number of files that the agent has packed later since it was started."""
    packed_bytes: int = 0
    """Bytes that these files took before they were packed."""
    saved_bytes: int = 0
    """Bytes by which packing made these files smaller."""


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
    """The stream of the session ended before the session did."""


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Status of one rank's session."""

    job_id: str
    session_id: str
    rank: int
    world_size: int
    device: int
    host: str
    pid: int
    state: SessionState
    excluded: str = ""
    """Why the plan selects nothing on this rank; empty if it selects something."""
    iterations_seen: int = 0
    notes: tuple[str, ...] = ()
    framework: str = ""
    """Name and version of the framework, such as `torch 2.13.0`."""
    device_target: str = ""
    selected: str = ""
    """Iterations that the plan selects, as a configuration writes them, such as `0|5-8`
    or `all`.
    """
    ended_by: str = ""
    """How the process of a lost session ended, such as `SIGABRT` or `exit code 1`; empty if
    unknown.
    """
    last_events_known: bool = False
    """Whether all events of a lost session are known, because its process has ended and its shared
    memory was read. Otherwise the last events may be missing.
    """
    attempt: int = 0
    """Number of the job's attempt that the rank's process belongs to."""
    is_elastic: bool = False
    """Whether the launcher restarts all ranks together."""
    started_us: int = 0
    """Time at which the rank began the session, in microseconds on the clock of its records; 0 if
    unknown.
    """
    raised_in: int | None = None
    """Iteration in which an error ended the session; None if no error did."""
    operators: str = ""
    """Operators that the plan selects now, as entries of a configuration, such as `conv, fc` or
    `all`.
    """
    saved_data: str = ""
    """What is kept of the tensors of these operators: `tensor`, `statistic` or `full`."""
    changed_in: int | None = None
    """First iteration with the present plan; None while the plan is that of the configuration."""


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
    """Tensors whose bytes are stored already: they are hard links to the earlier file, or have no
    file if they count in `same_as_baseline`.
    """
    degraded: int = 0
    """Tensors of which less is kept than the plan selects: statistics, or the first elements."""
    dropped: Mapping[str, int] = field(default_factory=dict[str, int])
    """Dropped tensors by reason."""
    bytes_in: int = 0
    bytes_stored: int = 0
    stall_us: int = 0
    """Microseconds for which dumping delayed the training thread."""
    first_position: int = 0
    last_position: int = 0
    """Last position of the iteration in the rank's program, after `first_position`; both are 0 if
    unknown.
    """
    attempt: int = 0
    """Number of the attempt that ran the iteration."""
    degraded_by: Mapping[str, int] = field(default_factory=dict[str, int])
    """Degraded tensors by reason."""
    same_as_baseline: int = 0
    """Linked tensors without a file, because they equal their counterpart in the baseline."""

    @property
    def is_balanced(self) -> bool:
        """Whether every expected tensor is stored, linked, degraded or dropped."""
        return self.expected == self.accounted_tensors

    @property
    def accounted_tensors(self) -> int:
        """Number of tensors that are stored, linked, degraded or dropped."""
        return self.kept_tensors + sum(self.dropped.values())

    @property
    def kept_tensors(self) -> int:
        """Number of tensors that are in the tree in some form, or in its baseline."""
        return self.stored + self.linked + self.degraded


@dataclass(frozen=True, slots=True)
class AgentLoad:
    """Queued records of one or more agents, and free space of the disk of their trees."""

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
    """Estimate of the microseconds by which the coordinator's clock is ahead of an agent's."""

    offset_us: int = 0
    error_us: int = 0
    """Maximum error of the estimate in microseconds."""
    steps: int = 0
    """Number of times that the agent's clock was set while it ran."""
    known: bool = False


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """Status of an agent, as its coordinator reports it."""

    agent_id: str
    host: str
    heard_s: float
    """Seconds since the last message of the agent."""
    connected: bool
    clock: ClockEstimate = ClockEstimate()
    held_events: int = 0
    """Number of events that the agent has yet to report."""
    lost_events: int = 0
    """Number of events that were dropped because too many waited."""
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
    """The first of the iterations that are not published yet."""


@dataclass(frozen=True, slots=True)
class RankWait:
    """A collective or message that a rank has entered and not left, even if the rank's process has
    ended.
    """

    job_id: str
    rank: int
    iteration: int
    kind: str
    """Kind of the call, such as `all_reduce` or `send`."""
    name: str
    group: str
    sequence: int
    start_us: int
    """Time at which the rank entered the call, in microseconds since the epoch on the coordinator's
    clock.
    """
    waited_us: int
    """Microseconds for which the rank has waited."""
    source: str = ""
    """`file:line` of the script that made the call; empty if unknown."""
    absent: tuple[int, ...] = ()
    """The first of the ranks that have not arrived."""
    stuck: bool = False
    """Whether the call is part of a deadlock or a mismatch, so that it cannot end."""


@dataclass(frozen=True, slots=True)
class FreezeStatus:
    """A freeze of the black boxes of a job."""

    job_id: str
    iteration: int
    kind: str
    """Kind of the reason, such as `non_finite`, `jump`, `lost_rank` or `request`."""
    text: str
    """A sentence about the cause."""
    root: str = ""
    """Root of the frozen tree; empty until the tree is written."""
    frozen_us: int = 0
    """Time of the freeze in microseconds since the epoch on the agent's clock."""


@dataclass(frozen=True, slots=True)
class BlackBoxStatus:
    """Contents of the black boxes of an agent's ranks, and the freezes so far."""

    steps: int = 0
    step_bytes: int = 0
    dropped_steps: int = 0
    """Number of steps, the oldest ones, that were dropped because the agent's memory
    had no room.
    """
    freezes: tuple[FreezeStatus, ...] = ()
    dropped_tensors: int = 0
    """Number of full tensors, the oldest ones, that were dropped because the agent's memory had no
    room; their steps are kept longer.
    """


@dataclass(frozen=True, slots=True)
class StatusView:
    """Complete status from one source."""

    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    load: AgentLoad = AgentLoad()
    roots: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    """Problems, one sentence each."""
    agents: tuple[AgentStatus, ...] = ()
    """Status of agents; only from coordinators, as are `merges`, `hints` and `waits`."""
    merges: tuple[MergeStatus, ...] = ()
    hints: tuple[TimeoutHint, ...] = ()
    order_findings: tuple[Finding, ...] = ()
    disks: tuple[DiskStatus, ...] = ()
    """Status of disks; only from agents, as are `usage`, `memory`, `needs` and `ledger`."""
    usage: tuple[JobUsage, ...] = ()
    memory: MemoryStatus = field(default_factory=MemoryStatus)
    needs: tuple[JobNeed, ...] = ()
    ledger: LedgerStatus = field(default_factory=LedgerStatus)
    waits: tuple[RankWait, ...] = ()
    """Call that each rank waits in; only from coordinators."""
    backlog: PackBacklog = field(default_factory=PackBacklog)
    """Files to be packed later; only from agents."""
    black_box: BlackBoxStatus = field(default_factory=BlackBoxStatus)
    """Status of black boxes from agents; from a tree, only the freezes beside it."""


_REJECTED = " rejected: "


def describe_waiting_ranks(ranks: Collection[int], why: str, waited_s: float) -> str:
    """Return the finding of an agent about ranks whose sessions cannot be opened at present."""
    verb, whose = ("waits", "its session") if len(ranks) == 1 else ("wait", "their sessions")
    return f"{name_ranks(ranks)} {verb} for {waited_s:.0f} s, and {whose} cannot be opened: {why}"


def describe_rejection(ranks: Collection[int], why: str) -> str:
    """Return the finding of an agent that it rejected some ranks for one reason."""
    return f"{name_ranks(ranks)} {'was' if len(ranks) == 1 else 'were'}{_REJECTED}{why}"


def is_rejection(finding: str) -> bool:
    """Return whether a finding of an agent says that it rejected ranks."""
    return _REJECTED in finding


def view_as_json(view: StatusView) -> dict[str, object]:
    """Return a view as JSON: the fields of StatusView, with the shares of the hints."""
    fields: dict[str, object] = asdict(view)
    fields["hints"] = list(map(hint_to_json, view.hints))
    return fields


@dataclass(frozen=True, slots=True)
class EventSource:
    """Origin of a batch of events, whose columns are sent beside it."""

    job_id: str
    rank: int
    session_id: str = ""


@dataclass(frozen=True, slots=True)
class OrderEntry:
    """One entry, and line, of the global execution order; a collective is one entry with all its
    members.
    """

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
    """Members of the group that have not reported the collective."""
    rank_positions: tuple[int, ...] = ()
    """Position of the entry in the program of each of `ranks`."""
    streams: tuple[int, ...] = ()
    """Stream that the operator or collective ran on, for each of `ranks`."""
    element_count: int = 0
    """For a collective or message: number of elements."""
    dtype: str = ""
    """For a collective or message: element type."""
    peer: int = -1
    """For a message: global rank at the other end."""
    attempt: int = 0
    """Number of the attempt that executed the entry."""

"""Immutable values that the packages of the coordinator exchange: reports and their answers, views
of jobs and iterations, merged orders with their calls and findings, published offsets. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from rankdump._core.black_box import RankStep
from rankdump._core.events import (
    EventColumn,
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
)
from rankdump._core.freeze_record import JobFreeze, RelayedFreeze
from rankdump._core.job_control import ControlAnswer
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    ClockEstimate,
    EventSource,
    IterationStatus,
    MergeStatus,
    OrderEntry,
    RankWait,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts, TimeoutHint

DEADLOCK_TEXT = "deadlock: "
"""First words of the sentence about a cycle of calls that cannot end, after the
iteration number.
"""


def is_deadlock(finding: Finding) -> bool:
    """Return whether a finding is about a cycle of calls that cannot end.

    The kind of the finding is not sufficient, because calls that have ended can form a cycle, too.
    """
    return finding.kind is FindingKind.CYCLE and DEADLOCK_TEXT in finding.text


@dataclass(frozen=True, slots=True)
class PublishedOffsets:
    """Committed part of a job's order in its tree; if the files have more, the rest is
    not valid.
    """

    root: str
    sizes: Mapping[str, int]
    """Committed bytes of each file, by file name."""
    position: int
    """Position of the next entry in the order."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Timeouts and sessions of the ranks of a job, from which its hints are computed."""

    job_id: str
    timeouts: Mapping[int, RankTimeouts] = field(default_factory=dict[int, RankTimeouts])
    """Timeout limits that each rank has read."""
    sessions: Mapping[int, SessionStatus] = field(default_factory=dict[int, SessionStatus])
    """Newest session of each rank."""


@dataclass(frozen=True, slots=True)
class RankCoverage:
    """Time up to which all events of a rank are known."""

    until_us: int
    """Every event that began before this time has arrived; microseconds on the
    coordinator's clock.
    """
    agent: str = ""
    """Sentence on the state of the rank's agent."""


@dataclass(frozen=True, slots=True)
class ReportedRankCoverage:
    """Statement of an agent that it has reported every event that a rank began before a time."""

    job_id: str
    rank: int
    session_id: str
    until_us: int


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One report of an agent after all checks, with times on the coordinator's clock."""

    agent_id: str
    sequence: int
    """Number of the report's last item; 0 for a report without items."""
    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    events: tuple[tuple[EventSource, EventColumns], ...] = ()
    timeouts: tuple[tuple[str, int, RankTimeouts], ...] = ()
    """Job id, rank, and the timeout limits that the rank has read."""
    roots: Mapping[str, str] = field(default_factory=dict[str, str])
    """Root of the tree of each job in the report."""
    coverage: tuple[ReportedRankCoverage, ...] = ()
    host: str = ""
    host_id: str = ""
    """Id that distinguishes hosts with the same name."""
    clock: ClockEstimate = field(default_factory=ClockEstimate)
    load: AgentLoad = field(default_factory=AgentLoad)
    held_events: int = 0
    lost_events: int = 0
    control_answers: tuple[ControlAnswer, ...] = ()
    """Answers of ranks to orders that control their jobs."""
    freezes: tuple[JobFreeze, ...] = ()
    """Freezes that the agent began or joined in the last minute."""
    steps: tuple[RankStep, ...] = ()
    """Finished steps, to be compared with those of other ranks."""

    @property
    def items(self) -> int:
        """Number of items that have sequence numbers."""
        return sum(map(len, (self.sessions, self.timeouts, self.events, self.iterations)))


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer to a report."""

    acknowledged: int
    """Sequence number up to which all items are committed."""
    received: int
    warnings: tuple[tuple[str, str], ...] = ()
    """Job ids, each with a warning that the ranks of the job should log."""
    freezes: tuple[RelayedFreeze, ...] = ()
    """Freezes that the agent should join."""


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """Result of publishing an iteration."""

    offsets: PublishedOffsets | None
    """Offsets of the job after the publication."""
    written: bool
    """Whether the order of the iteration is in the tree."""
    findings: tuple[Finding, ...]
    hint_state: str
    """Hint state of the job as JSON text."""


@dataclass(frozen=True, slots=True)
class IterationView:
    """Collected events of one iteration of one job, as input of a merge.

    Equal views result in the same order; batches of events are compared by identity.
    """

    job_id: str
    iteration: int
    root: str = field(compare=False)
    """Root of the job's tree; empty until a report names it."""
    events: Mapping[int, tuple[EventColumns, ...]]
    """Batches of each rank, in the order of their arrival."""
    excluded: frozenset[int]
    """Ranks that the plan excludes."""
    late: tuple[int, ...]
    """Ranks that have neither completed the iteration nor closed their session; only
    the first few.
    """
    late_count: int
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """First and last position of the iteration in the program of each rank that has reported them;
    if an event between them is missing, it was lost.
    """
    clocks: Mapping[int, str] = field(default_factory=dict[int, str])
    """Name of the clock that each rank reads; ranks of the same host share one."""
    stalls: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)
    """Microseconds that dumping has stalled each rank since its session began, as last reported."""
    coverage: Mapping[int, RankCoverage] = field(
        default_factory=dict[int, RankCoverage], compare=False
    )
    """Time up to which the events of each rank are known; ranks without reports have no entry."""
    lost: Mapping[int, bool] = field(default_factory=dict[int, bool])
    """Ranks whose session was lost before they ended it. True if the process is known to have ended
    and all of its events are known.
    """
    ranks_in_later_iteration: frozenset[int] = frozenset()
    """Lost ranks that are known to have begun another iteration after this one."""
    ends_reported_elsewhere: frozenset[int] = frozenset()
    """Lost ranks whose end is a finding of another iteration."""
    raised: Mapping[int, int] = field(default_factory=dict[int, int])
    """Ranks whose session was ended by an error, and the iteration in which the error occurred."""
    provisional: bool = False
    """Whether the iteration is still running, so that missing events may arrive."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""


@dataclass(frozen=True, slots=True)
class JobView:
    """Data of one job that has been collected so far."""

    job_id: str
    roots: tuple[str, ...]
    sessions: tuple[SessionStatus, ...]
    iterations: tuple[IterationStatus, ...]
    """The newest balances."""
    older_iterations: int
    """Number of older balances, which the view omits."""
    merge: MergeStatus
    hints: tuple[TimeoutHint, ...]
    findings: tuple[Finding, ...]
    more_findings: int
    """Number of findings that the view omits; the findings file of the job has all of them."""
    waits: tuple[RankWait, ...] = ()
    """The call that each rank waits in."""
    agents: frozenset[str] = frozenset()
    """Ids of the agents that have reported sessions of the job."""
    awaited_agents: frozenset[str] = frozenset()
    """Ids of the agents with sessions that have not ended; empty when the job is over."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Data of all jobs and agents that has been collected so far."""

    jobs: Mapping[str, JobView]
    latest: str
    """Id of the job that reported last; empty before the first report."""
    agents: tuple[AgentStatus, ...]


_LINE_FIELDS = ("call", "graph", "name", "rank", "start_us", "end_us", "stream", "position")
_CALL_FIELDS = (
    *("graph", "name", "kind", "group", "sequence", "start_us", "end_us"),
    *("element_count", "dtype", "peer"),
)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedCalls:
    """Collectives and messages of one iteration, in order, with all members.

    Element i of every column of `columns` describes call i; the members of call i are the elements
    `bounds[i]` to `bounds[i + 1]` of every column of `members`.
    """

    columns: dict[str, EventColumn]
    """Columns of the calls: graph, name, kind, group (index into the groups), sequence, start_us,
    end_us, and of the call's first member element_count, dtype (index into the names), peer.
    """
    bounds: EventColumn
    members: dict[str, EventColumn]
    """Columns of the members: rank, start_us, end_us, position, end_position (OPEN_END_POSITION for
    members that still wait), stream, stall_us, peer.
    """
    missing: Mapping[int, tuple[int, ...]]
    """Ranks that should have taken part in a call and did not; complete calls have no entry."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def locate_members(self, calls: EventColumn) -> tuple[EventColumn, EventColumn]:
        """Return the number of members of each of these calls, and the positions of all members."""
        starts = self.bounds[calls]
        counts = self.bounds[calls + 1] - starts
        shifts = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        return counts, np.arange(len(shifts)) + shifts


@dataclass(frozen=True, slots=True, eq=False)
class GlobalOrder:
    """The merged order of one iteration in columns; `entries` yields its lines."""

    iteration: int
    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, EventColumn]
    """Columns with one element per line: call (-1 for an operator), graph, name, rank, start_us,
    end_us, stream, position (in the program of the rank; for a call, of its first member).
    """
    calls: OrderedCalls
    findings: tuple[Finding, ...]
    skews: Mapping[str, int] = field(default_factory=dict[str, int])
    """Correction in microseconds by clock, which was added to the last times of that clock, because
    its ranks left their collectives before or after the others. Clocks without a correction have no
    entry.
    """
    attempt: int = 0
    """Number of the attempt that ran the iteration."""

    def __len__(self) -> int:
        return len(self.columns["call"])

    def entries(self, first_position: int = 0) -> Iterator[OrderEntry]:
        """Yield the lines in order, numbered from `first_position` on."""
        columns = (self.columns[column].tolist() for column in _LINE_FIELDS)
        lines: Iterable[tuple[int, ...]] = zip(*columns, strict=True)
        for position, line in enumerate(lines, first_position):
            call = line[0]
            yield self._operator(position, line) if call < 0 else self.call_entry(position, call)

    def _operator(self, position: int, line: tuple[int, ...]) -> OrderEntry:
        _, graph, name, rank, start, end, stream, place = line
        return OrderEntry(
            position=position,
            graph=graph,
            iteration=self.iteration,
            ranks=(rank,),
            name=self.names[name],
            kind=EventKind.OPERATOR,
            start_us=start,
            end_us=end,
            rank_positions=(place,),
            streams=(stream,),
            attempt=self.attempt,
        )

    def call_entry(self, position: int, call: int) -> OrderEntry:
        """Return the line of one call at a position of the order."""
        low, high = self.calls.bounds[call : call + 2]
        members = self.calls.members
        graph, name, kind, group, sequence, start, end, elements, dtype, peer = (
            int(self.calls.columns[column][call]) for column in _CALL_FIELDS
        )
        return OrderEntry(
            position=position,
            graph=graph,
            iteration=self.iteration,
            ranks=tuple(members["rank"][low:high].tolist()),
            name=self.names[name],
            kind=EventKind(kind),
            group=self.groups[group].name,
            sequence=sequence,
            start_us=start,
            end_us=end,
            missing=self.calls.missing.get(call, ()),
            rank_positions=tuple(members["position"][low:high].tolist()),
            streams=tuple(members["stream"][low:high].tolist()),
            element_count=elements,
            dtype=self.names[dtype],
            peer=peer,
            attempt=self.attempt,
        )

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
"""Begins the sentence of a cycle of calls that cannot end, after the number of its iteration."""


def is_deadlock(finding: Finding) -> bool:
    """Return whether a finding is a cycle of calls that cannot end.

    The kind alone does not say that: calls that have ended can form a cycle too.
    """
    return finding.kind is FindingKind.CYCLE and DEADLOCK_TEXT in finding.text


@dataclass(frozen=True, slots=True)
class PublishedOffsets:
    """Committed part of a job's order in its tree, which counts where the files differ from it."""

    root: str
    sizes: Mapping[str, int]
    """Committed bytes of each file, by its name in the folder."""
    position: int
    """Position of the next entry."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Timeouts and sessions of the ranks of a job, from which its hints are computed."""

    job_id: str
    timeouts: Mapping[int, RankTimeouts] = field(default_factory=dict[int, RankTimeouts])
    """Limits that each rank has read."""
    sessions: Mapping[int, SessionStatus] = field(default_factory=dict[int, SessionStatus])
    """Newest session of each rank."""


@dataclass(frozen=True, slots=True)
class RankCoverage:
    """Time up to which the events of a rank are known."""

    until_us: int
    """Every event that began before it has arrived; on the coordinator's clock."""
    agent: str = ""
    """Sentence on the state of its agent."""


@dataclass(frozen=True, slots=True)
class ReportedRankCoverage:
    """Statement of an agent that it has reported every event a rank began before a time."""

    job_id: str
    rank: int
    session_id: str
    until_us: int


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One report of an agent, checked, with times on the coordinator's clock."""

    agent_id: str
    sequence: int
    """Number of its last item; 0 when it has none."""
    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    events: tuple[tuple[EventSource, EventColumns], ...] = ()
    timeouts: tuple[tuple[str, int, RankTimeouts], ...] = ()
    """Job, rank, and the limits that the rank has read."""
    roots: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tree of each job that the report is about."""
    coverage: tuple[ReportedRankCoverage, ...] = ()
    host: str = ""
    host_id: str = ""
    """Distinguishes hosts of the same name."""
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
        """Number of its items with sequence numbers."""
        return sum(map(len, (self.sessions, self.timeouts, self.events, self.iterations)))


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """Answer to a report."""

    acknowledged: int
    """Number of the last item up to which all are committed."""
    received: int
    warnings: tuple[tuple[str, str], ...] = ()
    """Job ids, each with a warning that its ranks are to log."""
    freezes: tuple[RelayedFreeze, ...] = ()
    """Freezes that the agent is to join."""


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """Result of the publication of an iteration."""

    offsets: PublishedOffsets | None
    """Offsets of its job afterwards."""
    written: bool
    """Whether its order is in the tree."""
    findings: tuple[Finding, ...]
    hint_state: str
    """JSON text."""


@dataclass(frozen=True, slots=True)
class IterationView:
    """Collected events of one iteration of one job, to be merged.

    Equal views give the same order; batches of events are compared by identity.
    """

    job_id: str
    iteration: int
    root: str = field(compare=False)
    """Tree of the job; empty until a report names it."""
    events: Mapping[int, tuple[EventColumns, ...]]
    """Batches of each rank, in the order of their arrival."""
    excluded: frozenset[int]
    """Ranks that the plan leaves out."""
    late: tuple[int, ...]
    """Ranks that have neither completed it nor closed their session; the first few of them."""
    late_count: int
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """First and last position of the iteration in the program of each rank that reported them; an
    event missing between them was lost."""
    clocks: Mapping[int, str] = field(default_factory=dict[int, str])
    """Name of the clock that each rank reads; ranks of one host share one."""
    stalls: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)
    """Time that dumping has stalled each rank since its session began, as reported last."""
    coverage: Mapping[int, RankCoverage] = field(
        default_factory=dict[int, RankCoverage], compare=False
    )
    """Time up to which each rank is known; without ranks that reported nothing."""
    lost: Mapping[int, bool] = field(default_factory=dict[int, bool])
    """Ranks whose session was lost before they ended it; true for those whose process is known to
    have ended, and of which every event is known."""
    went_on: frozenset[int] = frozenset()
    """Those of them that are known to have begun another iteration after this one."""
    told: frozenset[int] = frozenset()
    """Those of them whose end is a finding of another iteration."""
    raised: Mapping[int, int] = field(default_factory=dict[int, int])
    """Ranks whose session an error ended, and the iteration in which it did."""
    provisional: bool = False
    """Whether the iteration still runs, so that missing events may arrive."""
    attempt: int = 0
    """Number of the attempt that ran it."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as collected so far."""

    job_id: str
    roots: tuple[str, ...]
    sessions: tuple[SessionStatus, ...]
    iterations: tuple[IterationStatus, ...]
    """The newest balances."""
    older_iterations: int
    """Number of older balances, which are omitted."""
    merge: MergeStatus
    hints: tuple[TimeoutHint, ...]
    findings: tuple[Finding, ...]
    more_findings: int
    """Number of omitted findings; the file of the job has them."""
    waits: tuple[RankWait, ...] = ()
    """The call that each rank waits in."""
    agents: frozenset[str] = frozenset()
    """Agents that have reported sessions of it."""
    awaited_agents: frozenset[str] = frozenset()
    """Those with sessions that have not ended, while the job is not over."""


@dataclass(frozen=True, slots=True)
class FleetView:
    """Every job as collected so far, and all agents."""

    jobs: Mapping[str, JobView]
    latest: str
    """The job that reported last; empty before the first report."""
    agents: tuple[AgentStatus, ...]


_LINE_FIELDS = ("call", "graph", "name", "rank", "start_us", "end_us", "stream", "position")
_CALL_FIELDS = (
    *("graph", "name", "kind", "group", "sequence", "start_us", "end_us"),
    *("element_count", "dtype", "peer"),
)


@dataclass(frozen=True, slots=True, eq=False)
class OrderedCalls:
    """Collectives and messages of one iteration, in their order, with all members.

    Element i of every column of `columns` describes call i; the members of call i are the
    elements `bounds[i]` to `bounds[i + 1]` of every column of `members`.
    """

    columns: dict[str, EventColumn]
    """graph, name, kind, group (index into the groups), sequence, start_us, end_us, and of its
    first member element_count, dtype (index into the names), peer."""
    bounds: EventColumn
    members: dict[str, EventColumn]
    """rank, start_us, end_us, position, end_position (OPEN_END_POSITION for those that wait),
    stream, stall_us, peer."""
    missing: Mapping[int, tuple[int, ...]]
    """Ranks that should have taken part and did not, by call; without complete calls."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def locate_members(self, calls: EventColumn) -> tuple[EventColumn, EventColumn]:
        """Return how many members each of these calls has, and the places of all of them."""
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
    """One element per line: call (-1 for an operator), graph, name, rank, start_us, end_us,
    stream, position (in the program of the rank; of a call, that of its first member)."""
    calls: OrderedCalls
    findings: tuple[Finding, ...]
    skews: Mapping[str, int] = field(default_factory=dict[str, int])
    """Microseconds added to the last times of each clock whose ranks left their collectives before
    or after the others; without clocks that needed no correction."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""

    def __len__(self) -> int:
        return len(self.columns["call"])

    def entries(self, first_position: int = 0) -> Iterator[OrderEntry]:
        """Yield the lines in order, with positions from `first_position` on."""
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
        """Return the line of one call."""
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

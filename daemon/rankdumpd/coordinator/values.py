"""The frozen values that the rooms of the coordinator hand to each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rankdump.contract.events import OPEN, Column, EventColumns, EventKind, ProcessGroup
from rankdump.contract.findings import Finding
from rankdump.contract.status import (
    AgentStatus,
    ClockEstimate,
    IterationStatus,
    Load,
    MergeStatus,
    OrderEntry,
    RankEvents,
    SessionStatus,
)
from rankdump.contract.timeouts import TimeoutHint, Timeouts


@dataclass(frozen=True, slots=True)
class Book:
    """What is committed of a job's order in its tree: the truth when files say otherwise."""

    root: str
    sizes: Mapping[str, int]
    """Bytes of each file that count, by its name in the folder."""
    position: int
    """Of the next entry."""


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the hints of a job need to know of its ranks."""

    job_id: str
    timeouts: Mapping[int, Timeouts] = field(default_factory=dict[int, Timeouts])
    """What each rank read of its limits."""
    sessions: Mapping[int, SessionStatus] = field(default_factory=dict[int, SessionStatus])
    """The newest of each rank."""


@dataclass(frozen=True, slots=True)
class Heard:
    """How far a rank is known."""

    until_us: int
    """What it began before that has come, on the coordinator's clock."""
    agent: str = ""
    """How its agent stands, in words."""


@dataclass(frozen=True, slots=True)
class RankHeard:
    """That everything a rank began before a time has been reported."""

    job_id: str
    rank: int
    session_id: str
    until_us: int


@dataclass(frozen=True, slots=True)
class Report:
    """What an agent says at once, checked; its times are already those of the coordinator."""

    agent_id: str
    sequence: int
    """Number of its last item; 0 when it has none."""
    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    events: tuple[tuple[RankEvents, EventColumns], ...] = ()
    timeouts: tuple[tuple[str, int, Timeouts], ...] = ()
    """Job and rank, and what it knows of its limits."""
    roots: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tree of each job named above."""
    heard: tuple[RankHeard, ...] = ()
    host: str = ""
    host_id: str = ""
    """Which host of that name."""
    clock: ClockEstimate = field(default_factory=ClockEstimate)
    load: Load = field(default_factory=Load)
    held_events: int = 0
    lost_events: int = 0

    @property
    def items(self) -> int:
        """How many numbered items it has."""
        return sum(map(len, (self.sessions, self.timeouts, self.events, self.iterations)))


@dataclass(frozen=True, slots=True)
class Answer:
    """What an agent hears of a report."""

    acknowledged: int
    """Every item up to here survives this process."""
    received: int
    warnings: tuple[tuple[str, str], ...] = ()
    """Jobs of the agent, and what their ranks should say."""


@dataclass(frozen=True, slots=True)
class Settled:
    """What an iteration came to that was handed out to be published."""

    book: Book | None
    """Of its job, now."""
    written: bool
    """Its order is in the tree."""
    findings: tuple[Finding, ...]
    hint_state: str
    """JSON text."""


@dataclass(frozen=True, slots=True, eq=False)
class IterationView:
    """What is gathered of one iteration of one job, to be merged."""

    job_id: str
    iteration: int
    root: str
    """Tree of the job; empty while no report has named it."""
    events: Mapping[int, tuple[EventColumns, ...]]
    """Batches of each rank, as they came."""
    excluded: frozenset[int]
    """Ranks that the plan leaves out."""
    late: tuple[int, ...]
    """Ranks that have neither completed it nor closed their session; the first few of them."""
    late_count: int
    spans: Mapping[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """First and last position of the iteration in each rank's program, for ranks that said so:
    what is not among the events between them was lost."""
    clocks: Mapping[int, str] = field(default_factory=dict[int, str])
    """Which clock each rank reads: those of one host share one."""
    stalls: Mapping[int, int] = field(default_factory=dict[int, int])
    """How long dumping had held each rank up since its session began, as it said last."""
    heard: Mapping[int, Heard] = field(default_factory=dict[int, Heard])
    """How far each rank is known; ranks of which nothing is known are absent."""
    provisional: bool = False
    """The iteration still runs: what is missing may come."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as gathered so far."""

    job_id: str
    roots: tuple[str, ...]
    sessions: tuple[SessionStatus, ...]
    iterations: tuple[IterationStatus, ...]
    """The newest balances."""
    older_iterations: int
    """Balances that are not among them."""
    merge: MergeStatus
    hints: tuple[TimeoutHint, ...]
    findings: tuple[Finding, ...]
    more_findings: int
    """Those there was no room for; they stand in the job's file."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """Every job as gathered so far, and the agents."""

    jobs: Mapping[str, JobView]
    latest: str
    """The job that reported last; empty before the first report."""
    agents: tuple[AgentStatus, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Calls:
    """Collectives and messages of one iteration, in their order, with all who took part.

    Element i of every column of `columns` describes call i; the members of call i are the
    elements `bounds[i]` to `bounds[i + 1]` of every column of `members`.
    """

    columns: dict[str, Column]
    """graph, name, kind, group (index into the groups), sequence, start_us, end_us, and as its
    first member has them element_count, dtype (index into the names), peer."""
    bounds: Column
    members: dict[str, Column]
    """rank, start_us, end_us, position, end_position (OPEN for those that wait), stream,
    stall_us, peer."""
    missing: Mapping[int, tuple[int, ...]]
    """Members that should have taken part and did not, by call; calls without any are absent."""

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def waiting(self, call: int) -> tuple[int, ...]:
        """Return the ranks that have arrived at a call and wait in it."""
        members = slice(*self.bounds[call : call + 2])
        opened = self.members["end_position"][members] == OPEN
        return tuple(self.members["rank"][members][opened].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class GlobalOrder:
    """The merged order of one iteration; columns first, entries where they are written down."""

    iteration: int
    names: tuple[str, ...]
    groups: tuple[ProcessGroup, ...]
    columns: dict[str, Column]
    """One element per line: call (-1 for an operator), graph, name, rank, start_us, end_us,
    stream, position (in the rank's program; of a call its first member's)."""
    calls: Calls
    findings: tuple[Finding, ...]
    skews: Mapping[str, int] = field(default_factory=dict[str, int])
    """Microseconds added to the times of a clock, last of all, because its members left their
    collectives so much before or after the others; clocks that needed nothing are absent."""

    def __len__(self) -> int:
        return len(self.columns["call"])

    def entries(self, first_position: int = 0) -> Iterator[OrderEntry]:
        """Yield the lines in order, their positions rising from the one given."""
        columns = (self.columns[column].tolist() for column in _LINE)
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
        )

    def call_entry(self, position: int, call: int) -> OrderEntry:
        """Return the line of one call, at that position."""
        low, high = self.calls.bounds[call : call + 2]
        members = self.calls.members
        graph, name, kind, group, sequence, start, end, elements, dtype, peer = (
            int(self.calls.columns[column][call]) for column in _CALL
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
        )


_LINE = ("call", "graph", "name", "rank", "start_us", "end_us", "stream", "position")
_CALL = (
    *("graph", "name", "kind", "group", "sequence", "start_us", "end_us"),
    *("element_count", "dtype", "peer"),
)

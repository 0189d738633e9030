"""Frozen values that the parts of the coordinator hand to each other: reports and their answers,
views of jobs and iterations, published offsets. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rankdump._core.events import EventColumns, Finding
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    ClockEstimate,
    EventSource,
    IterationStatus,
    MergeStatus,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts, TimeoutHint


@dataclass(frozen=True, slots=True)
class PublishedOffsets:
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
    timeouts: Mapping[int, RankTimeouts] = field(default_factory=dict[int, RankTimeouts])
    """What each rank read of its limits."""
    sessions: Mapping[int, SessionStatus] = field(default_factory=dict[int, SessionStatus])
    """The newest of each rank."""


@dataclass(frozen=True, slots=True)
class RankCoverage:
    """How far a rank is known."""

    until_us: int
    """What it began before that has come, on the coordinator's clock."""
    agent: str = ""
    """How its agent stands, in words."""


@dataclass(frozen=True, slots=True)
class ReportedRankCoverage:
    """That everything a rank began before a time has been reported."""

    job_id: str
    rank: int
    session_id: str
    until_us: int


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What an agent says at once, checked; its times are already those of the coordinator."""

    agent_id: str
    sequence: int
    """Number of its last item; 0 when it has none."""
    sessions: tuple[SessionStatus, ...] = ()
    iterations: tuple[IterationStatus, ...] = ()
    events: tuple[tuple[EventSource, EventColumns], ...] = ()
    timeouts: tuple[tuple[str, int, RankTimeouts], ...] = ()
    """Job and rank, and what it knows of its limits."""
    roots: Mapping[str, str] = field(default_factory=dict[str, str])
    """Tree of each job named above."""
    heard: tuple[ReportedRankCoverage, ...] = ()
    host: str = ""
    host_id: str = ""
    """Which host of that name."""
    clock: ClockEstimate = field(default_factory=ClockEstimate)
    load: AgentLoad = field(default_factory=AgentLoad)
    held_events: int = 0
    lost_events: int = 0

    @property
    def items(self) -> int:
        """How many numbered items it has."""
        return sum(map(len, (self.sessions, self.timeouts, self.events, self.iterations)))


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """What an agent hears of a report."""

    acknowledged: int
    """Every item up to here survives this process."""
    received: int
    warnings: tuple[tuple[str, str], ...] = ()
    """Jobs of the agent, and what their ranks should say."""


@dataclass(frozen=True, slots=True)
class PublicationResult:
    """What an iteration came to that was handed out to be published."""

    book: PublishedOffsets | None
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
    heard: Mapping[int, RankCoverage] = field(default_factory=dict[int, RankCoverage])
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
class FleetView:
    """Every job as gathered so far, and the agents."""

    jobs: Mapping[str, JobView]
    latest: str
    """The job that reported last; empty before the first report."""
    agents: tuple[AgentStatus, ...]

"""What outlives a coordinator, row by row; a later row of the same key replaces an earlier. Pure.

A row with the number of its report is only then known again after a restart when that report was
acknowledged: the agent says the others once more, and in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from rankdump.contract.findings import Finding
from rankdump.contract.status import IterationStatus, SessionStatus
from rankdump.contract.timeouts import Timeouts
from rankdumpd.coordinator.values import Book


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent, and what it need not say again."""

    agent_id: str
    host: str
    acknowledged: int
    heard_us: int
    """Microseconds since the epoch, as all times here."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job, and the trees that were named for it."""

    job_id: str
    roots: tuple[str, ...]
    first_us: int
    heard_us: int


@dataclass(frozen=True, slots=True)
class SessionRow:
    """How a session stands."""

    status: SessionStatus
    agent_id: str
    sequence: int
    first: int
    """The report in which that agent spoke of it first; `sequence` is the last one."""


@dataclass(frozen=True, slots=True)
class BalanceRow:
    """What became of the tensors of one iteration of one rank."""

    status: IterationStatus
    agent_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class TimeoutsRow:
    """What a rank knows of its limits."""

    job_id: str
    rank: int
    timeouts: Timeouts


@dataclass(frozen=True, slots=True)
class PublishedRow:
    """An iteration whose order is in the tree."""

    job_id: str
    run: int
    """No two lives of a rank are in one: a rank that starts over counts its iterations anew."""
    iteration: int
    events: int
    finished: tuple[int, ...] | None
    """Ranks that had finished it; None when all had."""
    positions: Mapping[int, int]
    """Of the others that had begun it: how far they had come."""
    start: int = 0
    """How often most of these ranks had started over."""
    starts: Mapping[int, int] = field(default_factory=dict[int, int])
    """The same of the others."""

    def start_of(self, rank: int) -> int:
        """Return which life of a rank is in it, if any is."""
        return self.starts.get(rank, self.start)

    def has(self, rank: int) -> bool:
        """Return whether anything of a rank is in it, or was found to be late for it."""
        return self.finished is None or rank in self.finished or rank in self.positions


@dataclass(frozen=True, slots=True)
class LateRow:
    """Events of a rank that came too late for their iteration."""

    job_id: str
    run: int
    iteration: int
    rank: int
    events: int


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One finding of a job."""

    job_id: str
    number: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class SettledRow:
    """What a job has come to with its latest published iteration."""

    job_id: str
    book: Book | None
    hint_state: str
    """JSON text."""
    more_findings: int


Row: TypeAlias = (
    AgentRow
    | JobRow
    | SessionRow
    | BalanceRow
    | TimeoutsRow
    | PublishedRow
    | LateRow
    | FindingRow
    | SettledRow
)

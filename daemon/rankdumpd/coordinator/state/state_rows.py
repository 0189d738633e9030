"""Rows of the coordinator's state, and their form in the tables, both ways; a later row of the same
key replaces an earlier one. Pure.

A row with the number of its report counts after a restart only when that report was
acknowledged: the agent resends the others, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, get_type_hints

from rankdump._core.events import Finding
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.status import IterationStatus, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdumpd.coordinator.fleet_views import PublishedOffsets


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent, with the reports that it need not send again."""

    agent_id: str
    host: str
    acknowledged: int
    heard_us: int
    """Microseconds since the epoch, as all times here."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job, with its trees."""

    job_id: str
    roots: tuple[str, ...]
    first_us: int
    heard_us: int


@dataclass(frozen=True, slots=True)
class SessionStatusRow:
    """Status of a session."""

    status: SessionStatus
    agent_id: str
    sequence: int
    first: int
    """Number of that agent's first report on it; `sequence` is the last one."""


@dataclass(frozen=True, slots=True)
class BalanceRow:
    """Balance of one iteration of one rank."""

    status: IterationStatus
    agent_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class RankTimeoutsRow:
    """Timeouts that a rank reported."""

    job_id: str
    rank: int
    timeouts: RankTimeouts


@dataclass(frozen=True, slots=True)
class PublishedIterationRow:
    """An iteration whose order is in the tree."""

    job_id: str
    run: int
    """A run has one process of each rank at most: a restarted rank counts its iterations anew."""
    iteration: int
    events: int
    finished: tuple[int, ...] | None
    """Ranks that had finished it; None when all had."""
    positions: Mapping[int, int]
    """Positions of the other ranks that had begun it."""
    start: int = 0
    """Number of restarts of most of these ranks."""
    starts: Mapping[int, int] = field(default_factory=dict[int, int])
    """The same of the others."""

    def start_of(self, rank: int) -> int:
        """Return the number of restarts of a rank in it."""
        return self.starts.get(rank, self.start)

    def has_rank(self, rank: int) -> bool:
        """Return whether events of a rank are in it, or came too late for it."""
        return self.finished is None or rank in self.finished or rank in self.positions


@dataclass(frozen=True, slots=True)
class LateEventsRow:
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
class JobResultRow:
    """State of a job after its latest published iteration."""

    job_id: str
    offsets: PublishedOffsets | None
    hint_state: str
    """JSON text."""
    more_findings: int


StateRow: TypeAlias = (
    AgentRow
    | JobRow
    | SessionStatusRow
    | BalanceRow
    | RankTimeoutsRow
    | PublishedIterationRow
    | LateEventsRow
    | FindingRow
    | JobResultRow
)


MAX_LOADED_BALANCES = 200_000
"""The newest of all jobs; older ones stay on disk."""

RowValues: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RowTable:
    """How rows of one kind are written and read: two statements, and two conversions."""

    write: str
    read: str
    to_values: Callable[[Any], RowValues]
    from_values: Callable[[RowValues], StateRow]
    """ValueError when a value is not of its field's type."""


def _make_table(
    kind: type[StateRow],
    table: str,
    key: str,
    *,
    column_names: Mapping[str, str] = MappingProxyType({}),
    copied: tuple[str, ...] = (),
    source: str = "",
) -> RowTable:
    """Return the table of a kind of row: a column for each field, in JSON but for str and int.

    Columns have the names of the fields, or those in `column_names`. Fields of the status that are
    `copied` have columns too. Rows are read from `source`, by default the table.
    """
    hints = get_type_hints(kind)
    columns = [column_names.get(name, name) for name in hints]
    written = [*copied, *columns]
    changes = (f"{name} = excluded.{name}" for name in written if name not in key.split(", "))
    as_json = [name for name, hint in hints.items() if hint not in (str, int)]

    def to_values(row: Any) -> RowValues:
        values = make_plain(row)
        values |= {name: _format_json(values[name]) for name in as_json}
        return (*(getattr(row.status, name) for name in copied), *values.values())

    def from_values(values: RowValues) -> StateRow:
        body = dict(zip(hints, values, strict=True))
        body |= {name: json.loads(body[name]) for name in as_json}
        return read_json(kind, body, defaults=True)

    return RowTable(
        f"INSERT INTO {table} ({', '.join(written)}) VALUES ({', '.join('?' * len(written))})"
        f" ON CONFLICT ({key}) DO UPDATE SET {', '.join(changes)}",
        f"SELECT {', '.join(columns)} FROM {source or table}",
        to_values,
        from_values,
    )


def _format_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), default=make_plain)


_NEWEST_BALANCES = (
    f"(SELECT * FROM balances ORDER BY number DESC LIMIT {MAX_LOADED_BALANCES}) ORDER BY number"
)
ROW_TABLES: Mapping[type[StateRow], RowTable] = {
    AgentRow: _make_table(AgentRow, "agents", "agent_id"),
    JobRow: _make_table(JobRow, "jobs", "job_id", source="jobs ORDER BY first_us"),
    PublishedIterationRow: _make_table(
        PublishedIterationRow, "published", "job_id, run, iteration"
    ),
    LateEventsRow: _make_table(LateEventsRow, "late", "job_id, run, iteration, rank"),
    SessionStatusRow: _make_table(
        SessionStatusRow,
        "sessions",
        "session_id",
        copied=("session_id", "job_id"),
        source="sessions ORDER BY number",
    ),
    BalanceRow: _make_table(
        BalanceRow,
        "balances",
        "session_id, iteration",
        copied=("session_id", "iteration", "job_id"),
        source=_NEWEST_BALANCES,
    ),
    RankTimeoutsRow: _make_table(RankTimeoutsRow, "timeouts", "job_id, rank"),
    FindingRow: _make_table(
        FindingRow, "findings", "job_id, number", source="findings ORDER BY job_id, number"
    ),
    JobResultRow: _make_table(JobResultRow, "settled", "job_id", column_names={"offsets": "book"}),
}
"""By the kind of row; agents first, and what others build upon before them."""

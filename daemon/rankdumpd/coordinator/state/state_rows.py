"""Rows of the coordinator's state, and their form in the tables, both ways; a later row of the same
key replaces an earlier one. Pure.

A row with the number of its report counts after a restart only when that report was
acknowledged: the agent resends the others, in their order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias

from rankdump._core.events import Finding, FindingKind
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.timeouts import GroupTimeout, RankTimeouts
from rankdumpd.coordinator.fleet_views import PublishedOffsets


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
class SessionStatusRow:
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
class RankTimeoutsRow:
    """What a rank knows of its limits."""

    job_id: str
    rank: int
    timeouts: RankTimeouts


@dataclass(frozen=True, slots=True)
class PublishedIterationRow:
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

    def has_rank(self, rank: int) -> bool:
        """Return whether anything of a rank is in it, or was found to be late for it."""
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
    """What a job has come to with its latest published iteration."""

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
_FIELD_TYPES: Mapping[object, type] = {"str": str, "int": int}
"""By how the fields of rows are annotated."""


@dataclass(frozen=True, slots=True)
class RowTable:
    """One kind of row: how to write it, how to read all of them, and both directions."""

    write: str
    read: str
    to_values: Callable[[Any], RowValues]
    from_values: Callable[..., StateRow]


def check_row(row: StateRow) -> StateRow:
    """Return a row that was read; TypeError when a field has the wrong type."""
    for each in fields(row):
        kind, value = _FIELD_TYPES.get(each.type), getattr(row, each.name)
        if kind and type(value) is not kind:
            raise TypeError(
                f"{type(row).__name__}.{each.name} is {value!r:.40}, not {kind.__name__}"
            )
    return row


def _build_upsert(table: str, columns: str, key_columns: str) -> str:
    names, key = columns.split(", "), key_columns.split(", ")
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key)
    return (
        f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
    )


def _parse_job_row(job_id: str, roots: str, first_us: int, heard_us: int) -> JobRow:
    return JobRow(job_id, tuple(json.loads(roots)), first_us, heard_us)


def _parse_balance_row(text: str, agent_id: str, sequence: int) -> BalanceRow:
    return BalanceRow(IterationStatus(**json.loads(text)), agent_id, sequence)


def _parse_session_row(text: str, agent_id: str, sequence: int, first: int) -> SessionStatusRow:
    about = json.loads(text)
    state, notes = SessionState(about.pop("state")), tuple(about.pop("notes"))
    return SessionStatusRow(
        SessionStatus(state=state, notes=notes, **about), agent_id, sequence, first
    )


def _parse_finding_row(job_id: str, number: int, text: str) -> FindingRow:
    about = json.loads(text)
    kind, ranks = FindingKind(about.pop("kind")), tuple(about.pop("ranks"))
    return FindingRow(job_id, number, Finding(kind=kind, ranks=ranks, **about))


def _parse_timeouts_row(job_id: str, rank: int, text: str) -> RankTimeoutsRow:
    about = json.loads(text)
    groups = tuple(GroupTimeout(**group) for group in about.pop("groups"))
    return RankTimeoutsRow(job_id, rank, RankTimeouts(groups=groups, **about))


def _parse_published_row(
    job_id: str,
    run: int,
    iteration: int,
    events: int,
    finished: str,
    positions: str,
    start: int,
    starts: str,
) -> PublishedIterationRow:
    ranks = json.loads(finished)
    all_of_them = None if ranks is None else tuple(ranks)
    reached, others = _parse_rank_map(positions), _parse_rank_map(starts)
    return PublishedIterationRow(
        job_id, run, iteration, events, all_of_them, reached, start, others
    )


def _parse_rank_map(text: str) -> dict[int, int]:
    return {int(rank): number for rank, number in json.loads(text).items()}


def _parse_result_row(
    job_id: str, offsets: str, hint_state: str, more_findings: int
) -> JobResultRow:
    about = json.loads(offsets)
    return JobResultRow(
        job_id, PublishedOffsets(**about) if about else None, hint_state, more_findings
    )


def _format_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _format_offsets(offsets: PublishedOffsets | None) -> str:
    return _format_json(
        offsets
        and {"root": offsets.root, "sizes": dict(offsets.sizes), "position": offsets.position}
    )


ROW_TABLES: Mapping[type[StateRow], RowTable] = {
    AgentRow: RowTable(
        _build_upsert("agents", "agent_id, host, acknowledged, heard_us", "agent_id"),
        "SELECT agent_id, host, acknowledged, heard_us FROM agents",
        lambda row: (row.agent_id, row.host, row.acknowledged, row.heard_us),
        AgentRow,
    ),
    JobRow: RowTable(
        _build_upsert("jobs", "job_id, roots, first_us, heard_us", "job_id"),
        "SELECT job_id, roots, first_us, heard_us FROM jobs ORDER BY first_us",
        lambda row: (row.job_id, _format_json(row.roots), row.first_us, row.heard_us),
        _parse_job_row,
    ),
    PublishedIterationRow: RowTable(
        _build_upsert(
            "published",
            "job_id, run, iteration, events, finished, positions, start, starts",
            "job_id, run, iteration",
        ),
        "SELECT job_id, run, iteration, events, finished, positions, start, starts FROM published",
        lambda row: (
            *(row.job_id, row.run, row.iteration, row.events),
            *(_format_json(row.finished), _format_json(dict(row.positions))),
            *(row.start, _format_json(dict(row.starts))),
        ),
        _parse_published_row,
    ),
    LateEventsRow: RowTable(
        _build_upsert(
            "late", "job_id, run, iteration, rank, events", "job_id, run, iteration, rank"
        ),
        "SELECT job_id, run, iteration, rank, events FROM late",
        lambda row: (row.job_id, row.run, row.iteration, row.rank, row.events),
        LateEventsRow,
    ),
    SessionStatusRow: RowTable(
        _build_upsert(
            "sessions", "session_id, job_id, status, agent_id, sequence, first", "session_id"
        ),
        "SELECT status, agent_id, sequence, first FROM sessions ORDER BY number",
        lambda row: (
            *(row.status.session_id, row.status.job_id, _format_json(asdict(row.status))),
            *(row.agent_id, row.sequence, row.first),
        ),
        _parse_session_row,
    ),
    BalanceRow: RowTable(
        _build_upsert(
            "balances",
            "session_id, iteration, job_id, status, agent_id, sequence",
            "session_id, iteration",
        ),
        "SELECT status, agent_id, sequence FROM (SELECT * FROM balances ORDER BY number DESC"
        f" LIMIT {MAX_LOADED_BALANCES}) ORDER BY number",
        lambda row: (
            *(row.status.session_id, row.status.iteration, row.status.job_id),
            *(_format_json(asdict(row.status)), row.agent_id, row.sequence),
        ),
        _parse_balance_row,
    ),
    RankTimeoutsRow: RowTable(
        _build_upsert("timeouts", "job_id, rank, timeouts", "job_id, rank"),
        "SELECT job_id, rank, timeouts FROM timeouts",
        lambda row: (row.job_id, row.rank, _format_json(asdict(row.timeouts))),
        _parse_timeouts_row,
    ),
    FindingRow: RowTable(
        _build_upsert("findings", "job_id, number, finding", "job_id, number"),
        "SELECT job_id, number, finding FROM findings ORDER BY job_id, number",
        lambda row: (row.job_id, row.number, _format_json(asdict(row.finding))),
        _parse_finding_row,
    ),
    JobResultRow: RowTable(
        _build_upsert("settled", "job_id, book, hint_state, more_findings", "job_id"),
        "SELECT job_id, book, hint_state, more_findings FROM settled",
        lambda row: (row.job_id, _format_offsets(row.offsets), row.hint_state, row.more_findings),
        _parse_result_row,
    ),
}
"""By the kind of row; agents first, and what others build upon before them."""

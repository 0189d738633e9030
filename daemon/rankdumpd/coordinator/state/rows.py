"""How rows stand in the tables, both ways. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

from rankdump.contract.findings import Finding, FindingKind
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.contract.timeouts import GroupTimeout, Timeouts
from rankdumpd.coordinator.kept import (
    AgentRow,
    BalanceRow,
    FindingRow,
    JobRow,
    LateRow,
    PublishedRow,
    Row,
    SessionRow,
    SettledRow,
    TimeoutsRow,
)
from rankdumpd.coordinator.values import Book

LOADED_BALANCES = 200_000
"""The newest of all jobs; older ones stay on disk."""

Values: TypeAlias = tuple[Any, ...]
_KINDS: Mapping[object, type] = {"str": str, "int": int}
"""By how the fields of rows are annotated."""


@dataclass(frozen=True, slots=True)
class Table:
    """One kind of row: how to write it, how to read all of them, and both directions."""

    write: str
    read: str
    values: Callable[[Any], Values]
    row: Callable[..., Row]


def checked(row: Row) -> Row:
    """Return a row that was read; TypeError when a text or a number of it is none."""
    for each in fields(row):
        kind, value = _KINDS.get(each.type), getattr(row, each.name)
        if kind and type(value) is not kind:
            raise TypeError(f"{type(row).__name__}.{each.name} is {value!r:.40}")
    return row


def _place(table: str, columns: str, key_columns: str) -> str:
    names, key = columns.split(", "), key_columns.split(", ")
    changes = ", ".join(f"{name} = excluded.{name}" for name in names if name not in key)
    return (
        f"INSERT INTO {table} ({columns}) VALUES ({', '.join('?' * len(names))})"
        f" ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
    )


def _job(job_id: str, roots: str, first_us: int, heard_us: int) -> JobRow:
    return JobRow(job_id, tuple(json.loads(roots)), first_us, heard_us)


def _balance(text: str, agent_id: str, sequence: int) -> BalanceRow:
    return BalanceRow(IterationStatus(**json.loads(text)), agent_id, sequence)


def _session(text: str, agent_id: str, sequence: int, first: int) -> SessionRow:
    about = json.loads(text)
    state, notes = SessionState(about.pop("state")), tuple(about.pop("notes"))
    return SessionRow(SessionStatus(state=state, notes=notes, **about), agent_id, sequence, first)


def _finding(job_id: str, number: int, text: str) -> FindingRow:
    about = json.loads(text)
    kind, ranks = FindingKind(about.pop("kind")), tuple(about.pop("ranks"))
    return FindingRow(job_id, number, Finding(kind=kind, ranks=ranks, **about))


def _timeouts(job_id: str, rank: int, text: str) -> TimeoutsRow:
    about = json.loads(text)
    groups = tuple(GroupTimeout(**group) for group in about.pop("groups"))
    return TimeoutsRow(job_id, rank, Timeouts(groups=groups, **about))


def _published(
    job_id: str,
    run: int,
    iteration: int,
    events: int,
    finished: str,
    positions: str,
    start: int,
    starts: str,
) -> PublishedRow:
    ranks = json.loads(finished)
    all_of_them = None if ranks is None else tuple(ranks)
    reached, others = _by_rank(positions), _by_rank(starts)
    return PublishedRow(job_id, run, iteration, events, all_of_them, reached, start, others)


def _by_rank(text: str) -> dict[int, int]:
    return {int(rank): number for rank, number in json.loads(text).items()}


def _settled(job_id: str, book: str, hint_state: str, more_findings: int) -> SettledRow:
    about = json.loads(book)
    return SettledRow(job_id, Book(**about) if about else None, hint_state, more_findings)


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _book(book: Book | None) -> str:
    return _text(book and {"root": book.root, "sizes": dict(book.sizes), "position": book.position})


TABLES: Mapping[type[Row], Table] = {
    AgentRow: Table(
        _place("agents", "agent_id, host, acknowledged, heard_us", "agent_id"),
        "SELECT agent_id, host, acknowledged, heard_us FROM agents",
        lambda row: (row.agent_id, row.host, row.acknowledged, row.heard_us),
        AgentRow,
    ),
    JobRow: Table(
        _place("jobs", "job_id, roots, first_us, heard_us", "job_id"),
        "SELECT job_id, roots, first_us, heard_us FROM jobs ORDER BY first_us",
        lambda row: (row.job_id, _text(row.roots), row.first_us, row.heard_us),
        _job,
    ),
    PublishedRow: Table(
        _place(
            "published",
            "job_id, run, iteration, events, finished, positions, start, starts",
            "job_id, run, iteration",
        ),
        "SELECT job_id, run, iteration, events, finished, positions, start, starts FROM published",
        lambda row: (
            *(row.job_id, row.run, row.iteration, row.events),
            *(_text(row.finished), _text(dict(row.positions))),
            *(row.start, _text(dict(row.starts))),
        ),
        _published,
    ),
    LateRow: Table(
        _place("late", "job_id, run, iteration, rank, events", "job_id, run, iteration, rank"),
        "SELECT job_id, run, iteration, rank, events FROM late",
        lambda row: (row.job_id, row.run, row.iteration, row.rank, row.events),
        LateRow,
    ),
    SessionRow: Table(
        _place("sessions", "session_id, job_id, status, agent_id, sequence, first", "session_id"),
        "SELECT status, agent_id, sequence, first FROM sessions ORDER BY number",
        lambda row: (
            *(row.status.session_id, row.status.job_id, _text(asdict(row.status))),
            *(row.agent_id, row.sequence, row.first),
        ),
        _session,
    ),
    BalanceRow: Table(
        _place(
            "balances",
            "session_id, iteration, job_id, status, agent_id, sequence",
            "session_id, iteration",
        ),
        "SELECT status, agent_id, sequence FROM (SELECT * FROM balances ORDER BY number DESC"
        f" LIMIT {LOADED_BALANCES}) ORDER BY number",
        lambda row: (
            *(row.status.session_id, row.status.iteration, row.status.job_id),
            *(_text(asdict(row.status)), row.agent_id, row.sequence),
        ),
        _balance,
    ),
    TimeoutsRow: Table(
        _place("timeouts", "job_id, rank, timeouts", "job_id, rank"),
        "SELECT job_id, rank, timeouts FROM timeouts",
        lambda row: (row.job_id, row.rank, _text(asdict(row.timeouts))),
        _timeouts,
    ),
    FindingRow: Table(
        _place("findings", "job_id, number, finding", "job_id, number"),
        "SELECT job_id, number, finding FROM findings ORDER BY job_id, number",
        lambda row: (row.job_id, row.number, _text(asdict(row.finding))),
        _finding,
    ),
    SettledRow: Table(
        _place("settled", "job_id, book, hint_state, more_findings", "job_id"),
        "SELECT job_id, book, hint_state, more_findings FROM settled",
        lambda row: (row.job_id, _book(row.book), row.hint_state, row.more_findings),
        _settled,
    ),
}
"""By the kind of row; agents first, and what others build upon before them."""

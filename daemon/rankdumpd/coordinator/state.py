"""State of a coordinator, which is kept on disk when the process ends: rows of agents, jobs and
findings, and the SQLite file with its tables and migrations. A later row with the same key replaces
an earlier one.

A row with a report number counts after a restart only if that report was acknowledged, because the
agent resends all others, in their order.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, get_type_hints

from rankdump._core.events import Finding
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.status import IterationStatus, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.coordinator.fleet_views import PublishedOffsets
from rankdumpd.server import state_files


@dataclass(frozen=True, slots=True)
class AgentRow:
    """An agent, with the number up to which it need not send items again."""

    agent_id: str
    host: str
    acknowledged: int
    heard_us: int
    """Time of the last report in microseconds since the epoch; all times of rows are in
    this unit.
    """


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job, with the roots of its trees."""

    job_id: str
    roots: tuple[str, ...]
    first_us: int
    heard_us: int


@dataclass(frozen=True, slots=True)
class SessionStatusRow:
    """Status of a session, with the agent and the reports that it came from."""

    status: SessionStatus
    agent_id: str
    sequence: int
    first: int
    """Number of the agent's first report on the session; `sequence` is the number of
    its last one.
    """


@dataclass(frozen=True, slots=True)
class BalanceRow:
    """Balance of one iteration of one rank."""

    status: IterationStatus
    agent_id: str
    sequence: int


@dataclass(frozen=True, slots=True)
class RankTimeoutsRow:
    """Timeout limits that a rank has reported."""

    job_id: str
    rank: int
    timeouts: RankTimeouts


@dataclass(frozen=True, slots=True)
class PublishedIterationRow:
    """An iteration whose order is in the tree."""

    job_id: str
    run: int
    """Number of the run. A run has at most one process of each rank, because a restarted rank
    counts its iterations from the beginning.
    """
    iteration: int
    events: int
    finished: tuple[int, ...] | None
    """Ranks that had finished the iteration; None if all ranks had."""
    positions: Mapping[int, int]
    """Last positions of the other ranks that had begun the iteration."""
    start: int = 0
    """Number of restarts of most of these ranks."""
    starts: Mapping[int, int] = field(default_factory=dict[int, int])
    """Number of restarts of each rank for which it differs from `start`."""

    def start_of(self, rank: int) -> int:
        """Return how often a rank had been restarted before this iteration."""
        return self.starts.get(rank, self.start)

    def has_rank(self, rank: int) -> bool:
        """Return whether events of a rank are in the iteration, or arrived too late for it."""
        return self.finished is None or rank in self.finished or rank in self.positions


@dataclass(frozen=True, slots=True)
class LateEventsRow:
    """Number of events of a rank that arrived too late for their iteration."""

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
    """State of a job after the latest publication of an iteration."""

    job_id: str
    offsets: PublishedOffsets | None
    hint_state: str
    """Hint state as JSON text."""
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
"""Largest number of balances that are loaded, the newest ones of all jobs; older ones
stay on disk.
"""

RowValues: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class RowTable:
    """How rows of one kind are written and read: two statements, and two conversions."""

    write: str
    read: str
    to_values: Callable[[Any], RowValues]
    from_values: Callable[[RowValues], StateRow]
    """Converts values of the columns; ValueError when a value has not the type of its field."""


def _make_table(
    kind: type[StateRow],
    table: str,
    key: str,
    *,
    column_names: Mapping[str, str] = MappingProxyType({}),
    copied: tuple[str, ...] = (),
    source: str = "",
) -> RowTable:
    """Return the table for a kind of row, with a column for each field; values are JSON unless they
    are str or int.

    Columns have the names of the fields, or those in `column_names`. Fields of the status that are
    `copied` have columns, too. Rows are read from `source`, by default the table.
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
"""Tables by kind of row: agents first, and every table after those that it depends on."""


STATE_TABLES_VERSION = 3
"""Version of the tables below, stored in the file's `user_version`."""
STATE_SCHEMA = """
CREATE TABLE IF NOT EXISTS agents (
    agent_id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    acknowledged INTEGER NOT NULL,   -- the agent may have forgotten all items up to it
    heard_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS jobs (
    job_id TEXT PRIMARY KEY,
    roots TEXT NOT NULL,             -- JSON list
    first_us INTEGER NOT NULL,
    heard_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS published (
    job_id TEXT NOT NULL,
    run INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    events INTEGER NOT NULL,         -- 0: its order could not be written
    finished TEXT NOT NULL,          -- JSON list of ranks, or null for all
    positions TEXT NOT NULL,         -- JSON: last position of each other rank
    start INTEGER NOT NULL,          -- number of restarts of most of these ranks
    starts TEXT NOT NULL,            -- JSON: number of restarts of each other rank
    PRIMARY KEY (job_id, run, iteration)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS late (
    job_id TEXT NOT NULL,
    run INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    rank INTEGER NOT NULL,
    events INTEGER NOT NULL,
    PRIMARY KEY (job_id, run, iteration, rank)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY,      -- sessions in the order of their beginning
    session_id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,            -- JSON
    agent_id TEXT NOT NULL,          -- agent of the last report on the session
    sequence INTEGER NOT NULL,       -- number of that report
    first INTEGER NOT NULL           -- number of that agent's first report on it
);
CREATE TABLE IF NOT EXISTS balances (
    number INTEGER PRIMARY KEY,
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,            -- JSON
    agent_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    UNIQUE (session_id, iteration)
);
CREATE INDEX IF NOT EXISTS balances_of_jobs ON balances (job_id);
CREATE TABLE IF NOT EXISTS timeouts (
    job_id TEXT NOT NULL,
    rank INTEGER NOT NULL,
    timeouts TEXT NOT NULL,          -- JSON
    PRIMARY KEY (job_id, rank)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS findings (
    job_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    finding TEXT NOT NULL,           -- JSON
    PRIMARY KEY (job_id, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS settled (
    job_id TEXT PRIMARY KEY,
    book TEXT NOT NULL,              -- JSON of the offsets, or null before the first order
    hint_state TEXT NOT NULL,        -- JSON of the hints
    more_findings INTEGER NOT NULL
) WITHOUT ROWID;
"""
STATE_MIGRATIONS = {
    # Usually all ranks of a job are restarted together, and then the run equals the number of
    # restarts.
    1: """
ALTER TABLE published ADD COLUMN start INTEGER NOT NULL DEFAULT 0;
ALTER TABLE published ADD COLUMN starts TEXT NOT NULL DEFAULT '{}';
UPDATE published SET start = run;
""",
    2: """
ALTER TABLE sessions ADD COLUMN first INTEGER NOT NULL DEFAULT 0;
UPDATE sessions SET first = sequence;
""",
}
"""Statements that migrate the tables of each earlier version to the next version."""
JOB_TABLES: tuple[str, ...] = (
    "jobs",
    "published",
    "late",
    "sessions",
    "balances",
    "timeouts",
    "findings",
    "settled",
)
"""Tables with rows of jobs; each has a column `job_id`."""


_STATE_DIR_KEY = "coordinator.state_dir"


class CoordinatorState:
    """State file of a coordinator; for one thread at a time."""

    def __init__(self, state_dir: Path) -> None:
        # With this lock, no other coordinator can publish into the same files.
        self._lock_fd = state_files.lock_state_folder(
            state_dir, "coordinator.lock", _STATE_DIR_KEY, "coordinator"
        )
        self.path = state_dir / "coordinator.sqlite"
        try:
            self._connection = state_files.open_database(self.path, _STATE_DIR_KEY, self._prepare)
        except RankdumpError:
            os.close(self._lock_fd)
            raise

    def close(self) -> None:
        """Close the file and release its lock; may be repeated."""
        if self._lock_fd >= 0:
            self._connection.close()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def rows(self) -> Iterator[StateRow]:
        """Yield all rows: agents first, and every row after the rows that it depends on.

        CorruptedError when the file is damaged.
        """
        try:
            for table in ROW_TABLES.values():
                for values in self._connection.execute(table.read):
                    yield table.from_values(values)
        except (sqlite3.Error, ValueError, TypeError, LookupError, AttributeError) as error:
            raise CorruptedError(f"{self.path} cannot be read: {error}") from None

    def write(self, rows: Iterable[StateRow]) -> None:
        """Write the rows in one transaction; UnavailableError when none could be written."""
        by_kind: defaultdict[type[StateRow], list[RowValues]] = defaultdict(list)
        for row in rows:
            by_kind[type(row)].append(ROW_TABLES[type(row)].to_values(row))
        if by_kind:
            self._change([(ROW_TABLES[kind].write, values) for kind, values in by_kind.items()])

    def forget(self, job_id: str) -> None:
        """Remove a job and free its disk space; UnavailableError when that fails."""
        values: list[RowValues] = [(job_id,)]
        self._change([(f"DELETE FROM {table} WHERE job_id = ?", values) for table in JOB_TABLES])
        with _map_sqlite_errors(self.path):
            # `executescript` runs all steps of the pragma, each of which frees one page.
            self._connection.executescript(
                "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);"
            )

    def forget_agents(self, agent_ids: Iterable[str]) -> None:
        """Remove agents; UnavailableError when that fails."""
        values: list[RowValues] = [(agent_id,) for agent_id in agent_ids]
        self._change([("DELETE FROM agents WHERE agent_id = ?", values)])

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows on disk."""
        ((size,),) = self._connection.execute(
            "SELECT (c.page_count - f.freelist_count) * s.page_size"
            " FROM pragma_page_count c, pragma_freelist_count f, pragma_page_size s"
        )
        return size

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Create the tables, or migrate the tables of an earlier version."""
        # Set before the first table is created, so that removing a job frees its pages.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        # Acknowledged items must survive a power loss, because agents delete them.
        connection.execute("PRAGMA synchronous = FULL")
        state_files.migrate_tables(
            connection,
            self.path,
            newest=STATE_TABLES_VERSION,
            migrations=STATE_MIGRATIONS,
            known_by="published",
            whose="coordinator",
        )
        connection.executescript(STATE_SCHEMA)

    def _change(self, statements: list[tuple[str, list[RowValues]]]) -> None:
        connection = self._connection
        with _map_sqlite_errors(self.path):
            connection.execute("BEGIN IMMEDIATE")
            try:
                for statement, values in statements:
                    connection.executemany(statement, values)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise


@contextmanager
def _map_sqlite_errors(path: Path) -> Generator[None]:
    try:
        yield
    except sqlite3.Error as error:
        raise UnavailableError(f"{path} cannot be written: {error}") from None

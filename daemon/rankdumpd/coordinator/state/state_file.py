"""SQLite file of a coordinator, with its tables and migrations; one process owns it. Agents may
delete the items that are committed here.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.coordinator.state.state_rows import ROW_TABLES, RowValues, StateRow
from rankdumpd.server import state_files

STATE_TABLES_VERSION = 3
"""Version of the tables below, stored as `user_version` of the file."""
STATE_SCHEMA = """
CREATE TABLE IF NOT EXISTS agents (
    agent_id TEXT PRIMARY KEY,
    host TEXT NOT NULL,
    acknowledged INTEGER NOT NULL,   -- it may have forgotten every item up to here
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
    positions TEXT NOT NULL,         -- JSON: of other ranks the last position that was there
    start INTEGER NOT NULL,          -- how often most of these ranks had started over
    starts TEXT NOT NULL,            -- JSON: the same of the others
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
    number INTEGER PRIMARY KEY,      -- in the order in which they began
    session_id TEXT NOT NULL UNIQUE,
    job_id TEXT NOT NULL,
    status TEXT NOT NULL,            -- JSON
    agent_id TEXT NOT NULL,          -- who said it last, and in which report
    sequence INTEGER NOT NULL,
    first INTEGER NOT NULL           -- in which report that agent said it first
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
    book TEXT NOT NULL,              -- JSON, or null before anything was written
    hint_state TEXT NOT NULL,        -- JSON of the hints
    more_findings INTEGER NOT NULL
) WITHOUT ROWID;
"""
STATE_MIGRATIONS = {
    # As a rule all ranks of a job start over together; then the run is the number of starts.
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
"""Statements that migrate the tables of each earlier version to the next one."""
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
"""Tables with rows of jobs, each with a column `job_id`."""


_STATE_DIR_KEY = "coordinator.state_dir"


class CoordinatorState:
    """State file of a coordinator; for one thread at a time."""

    def __init__(self, state_dir: Path) -> None:
        # No other coordinator may publish into the same files.
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
        """Yield all rows, agents first, and each row after those that it depends on.

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
            # `executescript` runs all steps of the pragma; each step frees one page.
            self._connection.executescript(
                "PRAGMA incremental_vacuum; PRAGMA wal_checkpoint(TRUNCATE);"
            )

    def forget_agents(self, agent_ids: Iterable[str]) -> None:
        """Remove agents; UnavailableError when that fails."""
        values: list[RowValues] = [(agent_id,) for agent_id in agent_ids]
        self._change([("DELETE FROM agents WHERE agent_id = ?", values)])

    @property
    def size_bytes(self) -> int:
        """Disk space of all rows."""
        ((size,),) = self._connection.execute(
            "SELECT (c.page_count - f.freelist_count) * s.page_size"
            " FROM pragma_page_count c, pragma_freelist_count f, pragma_page_size s"
        )
        return size

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables, or migrate those of an earlier version."""
        # Set before the first table is created, so that removing a job frees its pages.
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        # Acknowledged items must survive a power loss: agents delete them.
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

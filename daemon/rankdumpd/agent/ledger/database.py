"""The SQLite file of the ledger: its lock for one owner at a time, the tables of the present
version, migrations from older versions, and the longer statements.
"""

from __future__ import annotations

import sqlite3
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rankdumpd.server import state_files

SCHEMA_VERSION = 11
"""Version of the tables below, stored in the file's `user_version`; the first version was 0."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    session_id TEXT PRIMARY KEY,
    request TEXT NOT NULL,           -- JSON of the request that opened the session
    plan BLOB NOT NULL,
    state TEXT NOT NULL,
    watermark INTEGER NOT NULL,      -- frames up to it are all entered, later ones maybe
    iterations_seen INTEGER NOT NULL,
    notes TEXT NOT NULL,             -- JSON list
    graphs TEXT NOT NULL,            -- JSON list: graphs whose program order is in the tree
    secret_hash TEXT NOT NULL DEFAULT '',  -- SHA-256 of the rank's secret; '': no secret
    opened_us INTEGER NOT NULL DEFAULT 0   -- since the epoch; 0 when it is not known
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    graph INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    path TEXT NOT NULL,
    op_type TEXT NOT NULL,
    op_name TEXT NOT NULL,
    argument TEXT NOT NULL,
    dtype TEXT NOT NULL,
    shape TEXT NOT NULL,             -- JSON list
    bytes_in INTEGER NOT NULL,
    bytes_stored INTEGER NOT NULL,
    digest TEXT NOT NULL,
    timestamp_us INTEGER NOT NULL DEFAULT 0,
    row_table TEXT NOT NULL DEFAULT '',    -- path of its table of statistics
    row TEXT NOT NULL DEFAULT '',          -- line of that table; empty: no line
    member TEXT NOT NULL DEFAULT '',       -- side and slot, if an operator has one time stamp
    head_bytes INTEGER NOT NULL DEFAULT 0, -- bytes before the elements in its bin file
    whole TEXT NOT NULL DEFAULT '',        -- path of its operator's file; empty: no file
    whole_name TEXT NOT NULL DEFAULT '',   -- full name of `whole`, if that is shortened
    joined INTEGER NOT NULL DEFAULT 0,     -- 1: `whole` holds it, `path` is removed
    microbatch INTEGER,                    -- NULL where the iteration is not divided
    phase TEXT NOT NULL DEFAULT '',        -- phase of its forward pass, if not training
    layout INTEGER NOT NULL DEFAULT 0,     -- number of its layout; 0: a whole tensor
    fingerprint BLOB NOT NULL DEFAULT x'', -- digest and sketch; empty: no fingerprint
    baseline TEXT NOT NULL DEFAULT '',     -- root of the baseline that has its file
    same_as TEXT NOT NULL DEFAULT '',      -- path of that file below `baseline`
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS layouts (
    number INTEGER PRIMARY KEY,      -- a digest of the body
    body TEXT NOT NULL               -- JSON
);
CREATE INDEX IF NOT EXISTS records_by_iteration ON records (session_id, iteration);
CREATE TABLE IF NOT EXISTS figures (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,              -- outcome of the kept rows
    kept INTEGER NOT NULL,           -- number of kept rows
    refused TEXT NOT NULL,           -- JSON: positions of the dropped rows, by reason
    body BLOB NOT NULL,              -- the frame as it arrived
    reason TEXT NOT NULL DEFAULT '', -- why its kept rows are degraded; empty: they are not
    PRIMARY KEY (session_id, sequence)
);
CREATE INDEX IF NOT EXISTS figures_by_iteration ON figures (session_id, iteration);
CREATE TABLE IF NOT EXISTS declarations (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    kind TEXT NOT NULL,
    body BLOB NOT NULL,              -- the frame as it arrived; empty once it is not needed
    applied INTEGER NOT NULL,
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS iterations (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    expected INTEGER NOT NULL,
    dropped TEXT NOT NULL,           -- JSON: tensors that the rank dropped, by reason
    stall_us INTEGER NOT NULL DEFAULT 0,
    first_position INTEGER NOT NULL DEFAULT 0,
    last_position INTEGER NOT NULL DEFAULT 0,
    ended_us INTEGER NOT NULL DEFAULT 0,   -- since the epoch; 0 when it is not known
    PRIMARY KEY (session_id, sequence)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS tallies (
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    records INTEGER NOT NULL,        -- number of records folded into this sum
    bytes_in INTEGER NOT NULL,
    bytes_stored INTEGER NOT NULL,
    PRIMARY KEY (session_id, iteration, fate, reason)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS away (
    session_id TEXT PRIMARY KEY,     -- session that is closed by its rank, or lost
    since_us INTEGER NOT NULL,
    folded INTEGER NOT NULL          -- 1: the session has no rows left to fold into sums
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS log (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- number of an item, used only once
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,       -- row of `declarations` with the body; 0: no row
    kind TEXT NOT NULL,
    events INTEGER NOT NULL,
    bytes INTEGER NOT NULL,          -- size of the item until it is acknowledged
    body BLOB NOT NULL               -- JSON; empty: the declaration has the body
);
CREATE INDEX IF NOT EXISTS log_by_declaration ON log (session_id, sequence);
CREATE INDEX IF NOT EXISTS log_by_kind ON log (kind, number);
CREATE TABLE IF NOT EXISTS reporting (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    agent_id TEXT NOT NULL,
    acknowledged INTEGER NOT NULL,   -- the coordinator has stored all items up to it
    lost_events INTEGER NOT NULL,
    lost_states INTEGER NOT NULL     -- lost items of any other kind
);
CREATE TABLE IF NOT EXISTS unpacked (
    number INTEGER PRIMARY KEY,      -- files in the order in which they were written
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    sequence INTEGER NOT NULL        -- record whose file is still to be packed
);
CREATE UNIQUE INDEX IF NOT EXISTS unpacked_by_iteration
    ON unpacked (session_id, iteration, sequence);
CREATE TABLE IF NOT EXISTS unindexed (
    number INTEGER PRIMARY KEY AUTOINCREMENT,  -- higher for a manifest that was entered again
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    records INTEGER NOT NULL,        -- records of the manifest; 0: only changed or removed
    since_us INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS unindexed_by_iteration ON unindexed (session_id, iteration);
CREATE TABLE IF NOT EXISTS pins (
    job_id TEXT PRIMARY KEY,         -- job whose iterations are not removed
    since_us INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS retired (
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,      -- iteration that is or was removed
    began_us INTEGER NOT NULL,
    done INTEGER NOT NULL,           -- 1: the files are removed
    bytes INTEGER NOT NULL,          -- bytes that the removed files took
    status TEXT NOT NULL,            -- JSON: details for the audit log
    PRIMARY KEY (session_id, iteration)
) WITHOUT ROWID;
"""
MIGRATIONS = {
    0: """
ALTER TABLE records ADD COLUMN timestamp_us INTEGER NOT NULL DEFAULT 0;
ALTER TABLE records ADD COLUMN row_folder TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN row TEXT NOT NULL DEFAULT '';
""",
    # Version 2 added the table of statistics. No statement is needed, because missing tables are
    # created when the file is opened.
    1: "",
    # Version 3 added the report log, which is created in the same way.
    2: """
ALTER TABLE iterations ADD COLUMN stall_us INTEGER NOT NULL DEFAULT 0;
ALTER TABLE iterations ADD COLUMN first_position INTEGER NOT NULL DEFAULT 0;
ALTER TABLE iterations ADD COLUMN last_position INTEGER NOT NULL DEFAULT 0;
""",
    # In version 3 a row contained the folder of its table, whose file name was always the same.
    3: """
ALTER TABLE records RENAME COLUMN row_folder TO row_table;
UPDATE records SET row_table = row_table || '/statistic.csv' WHERE row <> '';
ALTER TABLE records ADD COLUMN member TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN head_bytes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE records ADD COLUMN whole TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN whole_name TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN joined INTEGER NOT NULL DEFAULT 0;
""",
    # Before version 5 sessions had no secret, and iterations were never removed.
    4: """
ALTER TABLE sessions ADD COLUMN secret_hash TEXT NOT NULL DEFAULT '';
ALTER TABLE sessions ADD COLUMN opened_us INTEGER NOT NULL DEFAULT 0;
ALTER TABLE iterations ADD COLUMN ended_us INTEGER NOT NULL DEFAULT 0;
""",
    # Version 6 added the table of layouts, which is created like every missing table.
    5: """
ALTER TABLE records ADD COLUMN microbatch INTEGER;
ALTER TABLE records ADD COLUMN phase TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN layout INTEGER NOT NULL DEFAULT 0;
""",
    # Version 7 added the table of unpacked files, which is created like every missing table.
    6: "",
    # Before version 8 a tensor was degraded for one reason only. Files of the first versions lack
    # these two tables, so the tables are created here in their form before version 8.
    7: """
CREATE TABLE IF NOT EXISTS figures (
    session_id TEXT NOT NULL,
    sequence INTEGER NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,
    kept INTEGER NOT NULL,
    refused TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY (session_id, sequence)
);
CREATE TABLE IF NOT EXISTS tallies (
    session_id TEXT NOT NULL,
    iteration INTEGER NOT NULL,
    fate TEXT NOT NULL,
    reason TEXT NOT NULL,
    records INTEGER NOT NULL,
    bytes_in INTEGER NOT NULL,
    bytes_stored INTEGER NOT NULL,
    PRIMARY KEY (session_id, iteration, fate, reason)
) WITHOUT ROWID;
ALTER TABLE figures ADD COLUMN reason TEXT NOT NULL DEFAULT '';
UPDATE figures SET reason = 'buffer_full' WHERE fate = 'degraded';
UPDATE tallies SET reason = 'buffer_full' WHERE fate = 'degraded';
""",
    # Version 9 added the table of unindexed manifests, which is created like every missing table.
    8: "",
    9: """
ALTER TABLE records ADD COLUMN fingerprint BLOB NOT NULL DEFAULT x'';
""",
    10: """
ALTER TABLE records ADD COLUMN baseline TEXT NOT NULL DEFAULT '';
ALTER TABLE records ADD COLUMN same_as TEXT NOT NULL DEFAULT '';
""",
}
"""Statements that migrate the tables of a version to the next version."""


SETTING_KEY = "agent.state_dir"
_TEXT_FACTORY = partial(str, encoding="utf-8", errors="replace")
"""Decodes text that a disk has corrupted without an error, so that its row can be read."""


def open_ledger_file(path: Path) -> sqlite3.Connection:
    """Return a connection; tables of an earlier version are migrated to the present one."""

    def prepare(base: sqlite3.Connection) -> None:
        base.text_factory = _TEXT_FACTORY
        # Set before the first table is created; with this mode deleted rows free space in the file.
        base.execute("PRAGMA auto_vacuum = INCREMENTAL")
        base.execute("PRAGMA journal_mode = WAL")
        state_files.migrate_tables(
            base,
            path,
            newest=SCHEMA_VERSION,
            migrations=MIGRATIONS,
            known_by="records",
            whose="agent",
        )
        base.executescript(SCHEMA)

    return state_files.open_database(path, SETTING_KEY, prepare)


def open_ledger_for_reading(path: Path) -> sqlite3.Connection:
    """Return a second connection, so that long reads do not delay commits."""
    base = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    base.text_factory = _TEXT_FACTORY
    return base


class LedgerTransaction(Protocol):
    """Begins a transaction of the ledger; a synced transaction survives a power loss."""

    def __call__(self, *, synced: bool = ...) -> AbstractContextManager[sqlite3.Connection]:
        """Return a context with the connection; the end of the block commits, an exception rolls
        back.
        """
        ...


class RowQuery(Protocol):
    """Runs a query on the ledger."""

    def __call__(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        """Return all rows of the result."""
        ...


def lock_ledger_folder(state_dir: Path) -> int:
    """Lock the folder and return the descriptor of the lock, because two agents must not share a
    ledger.
    """
    return state_files.lock_state_folder(state_dir, "lock", SETTING_KEY, "agent")


INSERT_REPORTING = "INSERT OR IGNORE INTO reporting VALUES (1, lower(hex(randomblob(16))), 0, 0, 0)"
# The result is one row, because sqlite3 releases the GIL at every row.
SELECT_NEXT_ITEMS = """
SELECT json_group_array(json_array(number, kind, session_id, job_id, rank, events, length(body))),
    CAST(group_concat(body, '') AS BLOB)
FROM (
    SELECT l.number, l.kind, l.session_id, l.events,
        CASE WHEN json_valid(s.request) THEN json_extract(s.request, '$.job_id') ELSE '' END
            AS job_id,
        CASE WHEN json_valid(s.request) THEN json_extract(s.request, '$.rank') ELSE 0 END AS rank,
        COALESCE(CASE WHEN l.body = x'' THEN d.body ELSE l.body END, x'') AS body
    FROM (
        SELECT *, SUM(bytes) OVER (ORDER BY number) - bytes AS before
        FROM (SELECT * FROM log WHERE number > ? ORDER BY number LIMIT ?)
    ) AS l
    LEFT JOIN sessions AS s ON s.session_id = l.session_id
    LEFT JOIN declarations AS d ON d.session_id = l.session_id AND d.sequence = l.sequence
    WHERE l.before < ?
)
"""
CLEAR_REPORTED_EVENTS = """
UPDATE declarations SET applied = 1, body = x'' WHERE kind = 'EventColumns'
AND (session_id, sequence) IN
    (SELECT session_id, sequence FROM log WHERE number BETWEEN ? AND ? AND kind = 'events')
AND sequence < (SELECT MAX(sequence) FROM iterations AS i
    WHERE i.session_id = declarations.session_id)
"""
"""Events count as applied once an iteration has ended after them, whatever their column `applied`
says.
"""
NOT_APPLIED_CONDITION = """
applied = 0 AND (kind <> 'EventColumns' OR sequence > COALESCE((SELECT MAX(sequence)
    FROM iterations AS i WHERE i.session_id = declarations.session_id), 0))
"""
CLEAR_APPLIED_EVENTS = """
UPDATE declarations SET applied = 1, body = x'' WHERE session_id = ?1 AND applied = 0
AND sequence <= ?2 AND sequence > COALESCE(
    (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1 AND sequence < ?2), 0)
AND (sequence = ?2 OR kind = 'EventColumns' AND NOT EXISTS (SELECT 1 FROM log
    WHERE log.session_id = ?1 AND log.sequence = declarations.sequence))
"""
"""Events that are still to be reported stay until the coordinator has stored them."""
SELECT_NEWEST_TIMEOUTS = """
SELECT MAX(sequence) FROM declarations WHERE session_id = ?1 AND kind = 'Timeouts'
AND NOT EXISTS (SELECT 1 FROM log WHERE session_id = ?1 AND kind = 'timeouts')
HAVING MAX(sequence) IS NOT NULL
"""

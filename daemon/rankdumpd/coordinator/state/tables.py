"""The tables of the state. Pure."""

from __future__ import annotations

VERSION = 3
"""Of the tables below, as the file's `user_version` says it."""
SCHEMA = """
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
MIGRATIONS = {
    # All ranks of a job start over together, as a rule; then a run was what now is a start.
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
"""How tables of each earlier version become those of the next; one that is missing is made."""
OF_A_JOB: tuple[str, ...] = (
    "jobs",
    "published",
    "late",
    "sessions",
    "balances",
    "timeouts",
    "findings",
    "settled",
)
"""Tables that have rows of jobs, each with a column `job_id`."""

"""The file of the state: one owner at a time, and tables of the present version."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from rankdumpd import statefile
from rankdumpd.coordinator.state import tables

_KEY = "coordinator.state_dir"


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection; tables of an earlier version are brought up to the present one."""

    def prepare(base: sqlite3.Connection) -> None:
        # Before the first table: what a forgotten job took is to become free again.
        base.execute("PRAGMA auto_vacuum = INCREMENTAL")
        base.execute("PRAGMA journal_mode = WAL")
        # A power loss must not take back what an agent was told to forget.
        base.execute("PRAGMA synchronous = FULL")
        _migrate(base, path)
        base.executescript(tables.SCHEMA)

    return statefile.connect(path, _KEY, prepare)


def _migrate(base: sqlite3.Connection, path: Path) -> None:
    version = statefile.version_of(base, path, newest=tables.VERSION, whose="coordinator")
    made = base.execute("SELECT 1 FROM sqlite_master WHERE name = 'published'").fetchone()
    steps = range(version, tables.VERSION) if made else ()
    # In one transaction: half a migration would not be recognised as one.
    script = "".join(tables.MIGRATIONS[step] for step in steps)
    base.executescript(f"BEGIN; {script} PRAGMA user_version = {tables.VERSION}; COMMIT;")


def sole_owner(state_dir: Path) -> int:
    """Return a locked descriptor: two coordinators would publish into each other's files."""
    return statefile.sole_owner(state_dir, "coordinator.lock", _KEY, "coordinator")

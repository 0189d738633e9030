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
        statefile.migrate(
            base,
            path,
            newest=tables.VERSION,
            migrations=tables.MIGRATIONS,
            known_by="published",
            whose="coordinator",
        )
        base.executescript(tables.SCHEMA)

    return statefile.connect(path, _KEY, prepare)


def sole_owner(state_dir: Path) -> int:
    """Return a locked descriptor: two coordinators would publish into each other's files."""
    return statefile.sole_owner(state_dir, "coordinator.lock", _KEY, "coordinator")

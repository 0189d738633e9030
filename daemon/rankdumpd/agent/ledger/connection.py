"""The ledger's file: one owner at a time, and tables of the present version."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path

from rankdump.contract.errors import RankdumpError
from rankdumpd import statefile
from rankdumpd.agent import schema

_KEY = "agent.state_dir"
AS_TEXT = partial(str, encoding="utf-8", errors="replace")
"""How a text is read: one that a disk damaged must not keep those beside it from being read."""


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection; tables of an earlier version are brought up to the present one."""

    def prepare(base: sqlite3.Connection) -> None:
        base.text_factory = AS_TEXT
        # Before the first table: what is forgotten is to become free again.
        base.execute("PRAGMA auto_vacuum = INCREMENTAL")
        base.execute("PRAGMA journal_mode = WAL")
        statefile.migrate(
            base,
            path,
            newest=schema.VERSION,
            migrations=schema.MIGRATIONS,
            known_by="records",
            whose="agent",
        )
        base.executescript(schema.SCHEMA)

    return statefile.connect(path, _KEY, prepare)


def no_folder(state_dir: Path, error: Exception) -> RankdumpError:
    """Return what is said of a state folder whose file could not be prepared."""
    return statefile.no_folder(state_dir, _KEY, error)


def sole_owner(state_dir: Path) -> int:
    """Return a locked descriptor: two agents on one ledger would acknowledge for each other."""
    return statefile.sole_owner(state_dir, "lock", _KEY, "agent")

"""The file of the state: one owner at a time, and tables of the present version."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from rankdump.contract.errors import ConfigError
from rankdumpd.coordinator.state import tables


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection to a file that has all tables."""
    try:
        base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(base.close)
            # Before the first table: what a forgotten job took is to become free again.
            base.execute("PRAGMA auto_vacuum = INCREMENTAL")
            base.execute("PRAGMA journal_mode = WAL")
            # A power loss must not take back what an agent was told to forget.
            base.execute("PRAGMA synchronous = FULL")
            _check_version(base, path)
            base.executescript(tables.SCHEMA)
            unless_ready.pop_all()
            return base
    except sqlite3.Error as error:
        raise _no_folder(path.parent, error) from None


def _check_version(base: sqlite3.Connection, path: Path) -> None:
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version > tables.VERSION:
        raise ConfigError(
            str(path),
            "user_version",
            version,
            f"at most {tables.VERSION}, as this coordinator writes it",
        )
    base.execute(f"PRAGMA user_version = {tables.VERSION}")


def sole_owner(state_dir: Path) -> int:
    """Return a locked descriptor: two coordinators would publish into each other's files."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        path = state_dir / "coordinator.lock"
        guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise _no_folder(state_dir, error) from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        allowed = "a folder that no other coordinator uses"
        raise ConfigError("coordinator.state_dir", "", str(state_dir), allowed) from None
    return guard


def _no_folder(state_dir: Path, error: Exception) -> ConfigError:
    return ConfigError("coordinator.state_dir", "", str(state_dir), f"a folder ({error})")

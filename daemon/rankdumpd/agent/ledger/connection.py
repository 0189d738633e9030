"""The ledger's file: one owner at a time, and tables of the present version."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from pathlib import Path

from rankdump.contract.errors import ConfigError
from rankdumpd.agent import rows


def connect(path: Path) -> sqlite3.Connection:
    """Return a connection; tables of an earlier version are brought up to the present one."""
    try:
        base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(base.close)
            base.execute("PRAGMA journal_mode = WAL")
            _migrate(base, path)
            base.executescript(rows.SCHEMA)
            unless_ready.pop_all()
            return base
    except sqlite3.Error as error:
        raise _no_folder(path.parent, error) from None


def _migrate(base: sqlite3.Connection, path: Path) -> None:
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version > rows.VERSION:
        raise ConfigError(
            str(path), "user_version", version, f"at most {rows.VERSION}, as this agent writes it"
        )
    tables = base.execute("SELECT 1 FROM sqlite_master WHERE name = 'records'").fetchone()
    steps = range(version, rows.VERSION) if tables else ()
    # In one transaction: half a migration would not be recognised as one.
    script = "".join(rows.MIGRATIONS[step] for step in steps)
    base.executescript(f"BEGIN; {script} PRAGMA user_version = {rows.VERSION}; COMMIT;")


def sole_owner(state_dir: Path) -> int:
    """Return a locked descriptor: two agents on one ledger would acknowledge for each other."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        guard = os.open(state_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise _no_folder(state_dir, error) from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise ConfigError(
            "agent.state_dir", "", str(state_dir), "a folder that no other agent uses"
        ) from None
    return guard


def _no_folder(state_dir: Path, error: Exception) -> ConfigError:
    return ConfigError("agent.state_dir", "", str(state_dir), f"a folder ({error})")

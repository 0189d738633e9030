"""The SQLite file that a daemon keeps its state in: one owner at a time, one version of tables."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path

from rankdump.contract.errors import ConfigError, DamagedError, ExhaustedError, RankdumpError
from rankdumpd import faults

_LEAST_BYTES = 128 << 10
"""What tables and shared memory of a small database take at least."""


def connect(
    path: Path, key: str, prepare: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """Return a connection that `prepare` has given its tables.

    ConfigError names the setting `key` when the folder cannot hold it, ExhaustedError when there
    is no space now; DamagedError when what is there is no such file.
    """
    try:
        base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(base.close)
            prepare(base)
            unless_ready.pop_all()
            return base
    except sqlite3.Error as error:
        raise no_folder(path.parent, key, error) from None


def version_of(base: sqlite3.Connection, path: Path, *, newest: int, whose: str) -> int:
    """Return the version of a file's tables; ConfigError when a newer program wrote it."""
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version > newest:
        allowed = f"at most {newest}, as this {whose} writes it"
        raise ConfigError(str(path), "user_version", version, allowed)
    return version


def migrate(
    base: sqlite3.Connection,
    path: Path,
    *,
    newest: int,
    migrations: Mapping[int, str],
    known_by: str,
    whose: str,
) -> None:
    """Bring the tables of a file up to the newest version, from each one to the next.

    Where no table is `known_by` that name, there is nothing to bring. ConfigError as above.
    """
    version = version_of(base, path, newest=newest, whose=whose)
    made = base.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (known_by,)).fetchone()
    script = "".join(migrations[step] for step in range(version, newest)) if made else ""
    # In one transaction: half a migration would not be recognised as one.
    base.executescript(f"BEGIN; {script} PRAGMA user_version = {newest}; COMMIT;")


def sole_owner(state_dir: Path, name: str, key: str, whose: str) -> int:
    """Return a locked descriptor of a file in the folder: two owners would undo each other."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        guard = os.open(state_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise no_folder(state_dir, key, error) from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise ConfigError(key, "", str(state_dir), f"a folder that no other {whose} uses") from None
    return guard


def no_folder(state_dir: Path, key: str, error: Exception) -> RankdumpError:
    """Return what is said of a folder in which a daemon cannot keep its state."""
    if faults.damaged(error):
        return DamagedError(f"{key}: {state_dir} has a damaged database: {error}")
    if faults.no_space(error) or _is_full(state_dir):
        return ExhaustedError(f"{key}: {state_dir} has no space: {error}")
    return ConfigError(key, "", str(state_dir), f"a folder ({error})")


def _is_full(folder: Path) -> bool:
    """Return whether there is no room for another page, whatever SQLite calls it."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _LEAST_BYTES or (disk.f_files > 0 and not disk.f_favail)

"""Files that a daemon depends on: the SQLite file of its state, which one process at a time owns,
folders that a group may enter, and files that have to stay in place; and which errors of disks and
databases are transient.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankdump.errors import (
    ConfigError,
    CorruptedError,
    ExhaustedError,
    RankdumpError,
    UnavailableError,
)

_NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT})
_TRANSIENT_ERRNOS = _NO_SPACE_ERRNOS | {
    errno.EAGAIN,
    errno.EBUSY,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    # A disk that was mounted read-only, by the kernel after an error or by an operator, may become
    # writable again.
    errno.EROFS,
    # Errors of network disks, and of disks whose process is being restarted.
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def is_transient(error: BaseException) -> bool:
    """Return whether the same operation may succeed later."""
    if isinstance(error, OSError):
        return error.errno in _TRANSIENT_ERRNOS
    return isinstance(error, (sqlite3.OperationalError, MemoryError))


def is_no_space(error: BaseException) -> bool:
    """Return whether an error means that a disk or a quota on it is full."""
    if isinstance(error, OSError):
        return error.errno in _NO_SPACE_ERRNOS
    # Python 3.10 reports SQLITE_FULL only by its text.
    return isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error)


def is_corrupted_database(error: BaseException) -> bool:
    """Return whether an error means that a database file is corrupted, which is never transient.

    Python has no subclass for this error, but has subclasses for all errors of the caller.
    """
    return type(error) is sqlite3.DatabaseError


def describe_error(error: BaseException) -> str:
    """Return the text of an error without paths, so that the same error has the same text
    everywhere.
    """
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


_MIN_FREE_BYTES = 128 << 10
"""Free bytes that the tables and the shared memory of a small database need."""


def open_database(
    path: Path, key: str, prepare: Callable[[sqlite3.Connection], None]
) -> sqlite3.Connection:
    """Return a connection to a database whose tables `prepare` has created.

    ConfigError names the setting `key` when the folder cannot hold a database, ExhaustedError when
    there is no space now; CorruptedError when the file is not a database.
    """
    try:
        base = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with contextlib.ExitStack() as unless_ready:
            unless_ready.callback(base.close)
            prepare(base)
            unless_ready.pop_all()
            return base
    except sqlite3.Error as error:
        raise explain_state_error(path.parent, key, error) from None


def read_tables_version(base: sqlite3.Connection, path: Path, *, newest: int, whose: str) -> int:
    """Return the version of a database's tables; ConfigError when a newer program wrote them."""
    (version,) = base.execute("PRAGMA user_version").fetchone()
    if version > newest:
        allowed = f"at most {newest}, the version that this {whose} writes"
        raise ConfigError(str(path), "user_version", version, allowed)
    return version


def migrate_tables(
    base: sqlite3.Connection,
    path: Path,
    *,
    newest: int,
    migrations: Mapping[int, str],
    known_by: str,
    whose: str,
) -> None:
    """Migrate the tables of a database to the newest version, one version after the other.

    A database without the table `known_by` is new and needs no migration. ConfigError as in
    `read_tables_version`.
    """
    version = read_tables_version(base, path, newest=newest, whose=whose)
    made = base.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (known_by,)).fetchone()
    script = "".join(migrations[step] for step in range(version, newest)) if made else ""
    # All steps run in one transaction, because a partial migration could not be detected.
    base.executescript(f"BEGIN; {script} PRAGMA user_version = {newest}; COMMIT;")


def lock_state_folder(state_dir: Path, name: str, key: str, whose: str) -> int:
    """Lock a file in the folder, which only one process can own at a time; return its
    descriptor.
    """
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o750)
        guard = os.open(state_dir / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise explain_state_error(state_dir, key, error) from None
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(guard)
        raise UnavailableError(f"{key}: {state_dir} is used by another {whose}") from None
    return guard


def explain_state_error(state_dir: Path, key: str, error: Exception) -> RankdumpError:
    """Return the error for a folder in which a daemon cannot keep its state."""
    if is_corrupted_database(error):
        return CorruptedError(f"{key}: {state_dir} contains a damaged database: {error}")
    if is_no_space(error) or _is_disk_full(state_dir):
        return ExhaustedError(f"{key}: {state_dir} has no space: {error}")
    return ConfigError(key, "", str(state_dir), f"a folder ({error})")


def _is_disk_full(folder: Path) -> bool:
    """Return whether the disk of a folder is full, whatever error SQLite reported."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < _MIN_FREE_BYTES or (
        disk.f_files > 0 and not disk.f_favail
    )


@dataclass(frozen=True, slots=True)
class _RequiredFile:
    """Identity of a required file when it was registered."""

    identity: tuple[int, int] | None
    cost: str
    """What fails without the file, as a clause of a sentence."""


class RequiredFiles:
    """The files that one process needs while it runs; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Path, _RequiredFile] = {}
        self.missing: tuple[str, ...] = ()
        """One sentence for each file that was missing at the last check."""

    def watch_file(self, path: Path, cost: str) -> None:
        """Require a file to stay where it is; `cost` is a clause that says what fails
        without it.
        """
        with self._lock:
            self._kept[path] = _RequiredFile(_read_identity(path), cost)

    def find_missing(self) -> tuple[str, ...]:
        """Check all files; return a sentence for each missing one, and store them in `missing`."""
        with self._lock:
            self.missing = tuple(
                f"{path} {_describe_missing(path)} while this process runs: {kept.cost}; "
                "restart the process"
                for path, kept in self._kept.items()
                if _read_identity(path) != kept.identity
            )
            return self.missing


def _describe_missing(path: Path) -> str:
    return "was replaced" if path.exists() else "was removed"


def _read_identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if the file does not exist."""
    try:
        facts = path.lstat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


GROUP_FOLDER_MODE = 0o750
"""Mode of the folder of a socket: its group may enter it, other users may not."""
_PRIVATE_FOLDER_MODE = 0o700


def make_group_folder(path: Path, group: int, mode: int = GROUP_FOLDER_MODE) -> None:
    """Create a folder that a group may enter; an existing folder stays as it is."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(_PRIVATE_FOLDER_MODE, exist_ok=True)
        os.chown(folder, -1, group if folder == path else -1)
        # Set the mode independently of the umask, because the folder of the socket may be one of
        # the parents.
        folder.chmod(mode if folder == path else GROUP_FOLDER_MODE)

"""Migration of sessions to their workers before any worker runs, and the rule that selects the
worker of a rank by job, rank and number of workers alone.

Unfinished sessions must survive a change of the number of workers. A session moves with all of its
rows, finished or not, because a rank may reconnect to learn that its end was committed. Every step
may be repeated, so a crash between two steps does no harm.

All sessions of a rank share tables and manifests of a tree, so they belong to the same worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
import time
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rankdump.errors import ConfigError, UnavailableError
from rankdumpd.agent.blackbox.raw_freeze import RawFreezeFolder
from rankdumpd.agent.ledger.database import lock_ledger_folder, open_ledger_file
from rankdumpd.agent.shm import slab_folder
from rankdumpd.agent.shm.slab_folder import parse_session_id
from rankdumpd.server import state_files
from rankdumpd.server.state_files import make_group_folder


def select_worker(job_id: str, rank: int, workers: int) -> int:
    """Return the index of the worker for a rank.

    It is computed from the sum of the digits of the rank in base `workers`: the ranks of a host are
    mostly consecutive or a power of two apart, and in both cases neighbours get different workers.
    Jobs with one rank are distributed by their names.
    """
    index = zlib.crc32(job_id.encode(errors="surrogatepass"))
    while rank and workers > 1:
        rank, digit = divmod(rank, workers)
        index += digit
    return index % workers


LEDGER_FILE = "ledger.sqlite"
_WORKER_FOLDER_PREFIX = "worker-"
_POLL_S = 0.05
_SESSION_TABLES_QUERY = (
    "SELECT m.name FROM sqlite_master AS m JOIN pragma_table_info(m.name) AS c"
    " WHERE m.type = 'table' AND c.name = 'session_id'"
)
_NUMBER_COLUMN = "number"
# Numbered rows get new numbers in their new ledger. The session id shows whether an interrupted
# migration has copied them already.
_RENUMBER_CLAUSE = "AND NOT EXISTS (SELECT 1 FROM target.{} WHERE session_id = ?1) ORDER BY number"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StatePaths:
    """Folders with the state of one agent process."""

    state_dir: Path
    runtime_dir: Path | None

    @property
    def ledger(self) -> Path:
        """Path of the ledger."""
        return self.state_dir / LEDGER_FILE

    @property
    def slabs(self) -> Path | None:
        """Folder of the shared memory; None if the agent listens on no Unix socket."""
        return self.runtime_dir and self.runtime_dir / "slabs"

    def worker_paths(self, index: int) -> StatePaths:
        """Return the folders of the worker with this index."""
        return self.subfolder(f"{_WORKER_FOLDER_PREFIX}{index}")

    def subfolder(self, name: str) -> StatePaths:
        """Return the folders with this name below these folders."""
        return StatePaths(self.state_dir / name, self.runtime_dir and self.runtime_dir / name)

    def list_worker_paths(self) -> list[StatePaths]:
        """Return the folders of all present and former workers."""
        return [
            self.subfolder(path.name)
            for path in sorted(self.state_dir.glob(f"{_WORKER_FOLDER_PREFIX}*"))
        ]


def migrate_sessions(agent: StatePaths, workers: int, *, group: int, patience_s: float) -> None:
    """Move all sessions of an agent and of its present and former workers to their workers; with
    one worker, move them to the agent.

    The caller owns the agent's state folder. ConfigError when a session cannot be moved,
    UnavailableError when a worker still runs after `patience_s`; the errors of
    `state_files.open_database` where a ledger is corrupted or its disk is full.
    """
    owners = [agent] if workers == 1 else [agent.worker_paths(index) for index in range(workers)]
    places = [
        *owners,
        *(owner for owner in (agent, *agent.list_worker_paths()) if owner not in owners),
    ]
    with contextlib.ExitStack() as owned:
        for place in places:
            if place != agent:
                owned.enter_context(_own_state_folder(place.state_dir, patience_s))
        try:
            owner_of = {
                session_id: owners[index]
                for place in places
                for session_id, index in _move_sessions(place, owners).items()
            }
            for place in places:
                _move_slabs(place, owner_of, group)
                if place not in owners:
                    # A raw file of a freeze that is not in a tree yet: any process can write the
                    # tree.
                    for path in RawFreezeFolder(place.state_dir).list_files():
                        RawFreezeFolder(owners[0].state_dir).adopt(path)
        except (OSError, sqlite3.Error) as error:
            if state_files.is_corrupted_database(error) or state_files.is_no_space(error):
                raise state_files.explain_state_error(
                    agent.state_dir, "agent.state_dir", error
                ) from None
            allowed = f"a folder whose sessions can be moved to their workers ({error})"
            raise ConfigError("agent.state_dir", "", str(agent.state_dir), allowed) from None


def lock_runtime_folder(folder: Path, group: int) -> int:
    """Lock a runtime folder and return the descriptor; -1 if the lock or the folder cannot exist.

    UnavailableError when another supervisor has locked the folder: its workers use the folder, also
    while one of them is being restarted.
    """
    try:
        make_group_folder(folder, group)
        guard = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return -1
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(guard)
        text = f"agent.runtime_dir: {folder} is used by the workers of another agent"
        raise UnavailableError(text) from None
    except OSError:
        os.close(guard)
        return -1
    return guard


def _move_sessions(source: StatePaths, owners: list[StatePaths]) -> dict[str, int]:
    """Move the sessions that belong elsewhere; return the index of the owner by session id."""
    if not source.ledger.exists():
        return {}
    with contextlib.closing(open_ledger_file(source.ledger)) as base:
        rows = base.execute("SELECT session_id, request FROM sessions").fetchall()
        belongs = {
            session_id: index
            for session_id, request in rows
            if (index := _find_worker_index(session_id, request, len(owners))) is not None
        }
        for index, owner in enumerate(owners):
            moving = [each for each, at in belongs.items() if at == index and owner != source]
            if moving:
                _logger.info("moving %d sessions to %s", len(moving), owner.state_dir)
                open_ledger_file(owner.ledger).close()
                _move_rows(base, owner.ledger, moving)
        _move_pins(base, source, owners)
        return belongs


def _find_worker_index(session_id: str, request: str, workers: int) -> int | None:
    try:
        about = json.loads(request)
        return select_worker(about["job_id"], about["rank"], workers)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        # One unreadable row must not affect the sessions of other ranks.
        extra = {"session": session_id}
        _logger.exception(
            "the row of session %s cannot be read, and the session is not moved",
            session_id,
            extra=extra,
        )
        return None


def _move_slabs(source: StatePaths, owner_of: Mapping[str, StatePaths], group: int) -> None:
    """Move slabs to the folders of their sessions, including slabs that an interrupted migration
    left.
    """
    if source.slabs is None or not source.slabs.is_dir():
        return
    for slab in sorted(source.slabs.iterdir()):
        owner = owner_of.get(parse_session_id(slab.name), source)
        if owner.slabs is not None and owner != source:
            make_group_folder(owner.slabs, group, slab_folder.SLAB_FOLDER_MODE)
            # Renaming does not affect a rank that has mapped the file.
            slab.rename(owner.slabs / slab.name)


def _move_rows(base: sqlite3.Connection, target: Path, session_ids: list[str]) -> None:
    """Copy the rows of sessions and commit them, then delete them from the source."""
    base.execute("ATTACH ? AS target", (str(target),))
    try:
        tables = [name for (name,) in base.execute(_SESSION_TABLES_QUERY)]
        keys = [(session_id,) for session_id in session_ids]
        with _transaction(base):
            for table in tables:
                names = base.execute("SELECT name FROM pragma_table_info(?)", (table,)).fetchall()
                numbered = (_NUMBER_COLUMN,) in names
                columns = ", ".join(name for (name,) in names if name != _NUMBER_COLUMN)
                base.executemany(
                    f"INSERT OR IGNORE INTO target.{table} ({columns})"
                    f" SELECT {columns} FROM main.{table} WHERE session_id = ?1"
                    f"{f' {_RENUMBER_CLAUSE.format(table)}' if numbered else ''}",
                    keys,
                )
        _delete_rows(base, tables, keys)
    finally:
        base.execute("DETACH target")


def _move_pins(base: sqlite3.Connection, source: StatePaths, owners: list[StatePaths]) -> None:
    """Copy the pins of a ledger to all other ledgers; delete them where no sessions remain."""
    pins = base.execute("SELECT job_id, since_us FROM pins").fetchall()
    for owner in owners if pins else ():
        if owner != source:
            with contextlib.closing(open_ledger_file(owner.ledger)) as target:
                target.executemany("INSERT OR IGNORE INTO pins VALUES (?, ?)", pins)
    if pins and source not in owners:
        base.execute("DELETE FROM pins")


def _delete_rows(base: sqlite3.Connection, tables: list[str], keys: list[tuple[str]]) -> None:
    with _transaction(base):
        for table in tables:
            base.executemany(f"DELETE FROM main.{table} WHERE session_id = ?", keys)


@contextmanager
def _transaction(base: sqlite3.Connection) -> Generator[None]:
    base.execute("BEGIN IMMEDIATE")
    try:
        yield
        base.execute("COMMIT")
    except BaseException:
        base.execute("ROLLBACK")
        raise


@contextmanager
def _own_state_folder(state_dir: Path, patience_s: float) -> Generator[None]:
    """Lock the state folder of a worker for the block; wait for a worker whose supervisor was
    killed to exit.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            guard = lock_ledger_folder(state_dir)
            break
        except UnavailableError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)
    try:
        yield
    finally:
        os.close(guard)

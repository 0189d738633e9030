"""State of an ingest in one SQLite file in the tree; after a kill the next process continues from
it.

A path is claimed before its copy is written, so an existing file without a claim belongs to another
program and is never overwritten. A path counts as ingested once its copy is in the tree.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankdump._core.json_values import make_plain, read_json
from rankdump.errors import ExhaustedError
from rankdumpd.agent.records import FileStamp, OriginalFile
from rankdumpd.ingest.dump_file import INGEST_STATE_FOLDER, DumpFileKind, FileTensor, IngestedFile
from rankdumpd.server import state_files

_TREE_OPTION = "--into"
_TABLES_VERSION = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS files (
    path BLOB PRIMARY KEY, kind TEXT, digest TEXT,
    source_inode TEXT, source_size INTEGER, source_ns INTEGER,
    target BLOB, stored_inode TEXT, stored_size INTEGER, stored_ns INTEGER,
    linked INTEGER, members TEXT, removed INTEGER,
    rank INTEGER, iteration INTEGER, indexed INTEGER
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS claims (path BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS session (id TEXT);
CREATE INDEX IF NOT EXISTS by_digest ON files (digest, linked);
CREATE INDEX IF NOT EXISTS by_place ON files (rank, iteration);
CREATE INDEX IF NOT EXISTS by_dirt ON files (rank, iteration) WHERE NOT indexed;
PRAGMA user_version = {_TABLES_VERSION};
"""
_FIELDS = (
    "path, kind, digest, source_inode, source_size, source_ns, target, stored_inode, "
    "stored_size, stored_ns, linked, members, removed"
)

RankIteration = tuple[int, int]
"""Rank and iteration."""


class IngestState:
    """The ingest state of one tree, owned until `close`; safe to use from several threads."""

    def __init__(self, tree: Path, *, durable: bool) -> None:
        """With `durable`, commits survive a power failure."""
        folder = tree / INGEST_STATE_FOLDER
        self._path = folder / "ingest.sqlite"
        self._guard = state_files.lock_state_folder(folder, "ingest.lock", _TREE_OPTION, "ingest")
        try:
            self._base = state_files.open_database(
                self._path,
                _TREE_OPTION,
                lambda base: _prepare_database(base, self._path, durable=durable),
            )
        except BaseException:
            os.close(self._guard)
            raise
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the file and release its lock."""
        self._base.close()
        os.close(self._guard)

    def find_file(self, path: str) -> IngestedFile | None:
        """Return the file that was ingested from a path; None when there is none."""
        query = f"SELECT {_FIELDS} FROM files WHERE path = ?"
        rows = self._select(query, os.fsencode(path))
        return _parse_row(rows[0]) if rows else None

    def list_claimed(self) -> list[str]:
        """Return the claimed paths; the tree may contain uncommitted copies of them."""
        return [os.fsdecode(path) for (path,) in self._select("SELECT path FROM claims")]

    def claim(self, paths: Iterable[str]) -> None:
        """Record that copies of these paths are about to be written."""
        with self._transaction() as base:
            base.executemany(
                "INSERT OR IGNORE INTO claims VALUES (?)", [(os.fsencode(p),) for p in paths]
            )

    def commit(
        self,
        taken: Sequence[IngestedFile],
        places: Sequence[RankIteration | None],
        *,
        released: Iterable[str],
    ) -> None:
        """Record that these files are in the tree, each with its rank and iteration.

        The claims of `released` paths end without a file.
        """
        rows = [
            (*_build_row(file), *(place or (None, None)), False)
            for file, place in zip(taken, places, strict=True)
        ]
        marks = ", ".join("?" * (len(_FIELDS.split(",")) + 3))
        with self._transaction() as base:
            base.executemany(f"INSERT OR REPLACE INTO files VALUES ({marks})", rows)
            released_paths = (*released, *(file.path for file in taken))
            base.executemany(
                "DELETE FROM claims WHERE path = ?", [(os.fsencode(p),) for p in released_paths]
            )

    def removed(self, paths: Iterable[str]) -> None:
        """Record that the source files of these paths were removed."""
        with self._transaction() as base:
            base.executemany(
                "UPDATE files SET removed = 1 WHERE path = ?", [(os.fsencode(p),) for p in paths]
            )

    def find_original(self, digest: str) -> OriginalFile | None:
        """Return a file in the tree with this digest; None when there is none."""
        rows = self._select(
            "SELECT target, stored_inode, stored_size, stored_ns FROM files "
            "WHERE digest = ? AND NOT linked LIMIT 1",
            digest,
        )
        return OriginalFile(os.fsdecode(rows[0][0]), _parse_stamp(rows[0][1:])) if rows else None

    def list_plain_files(self) -> list[IngestedFile]:
        """Return the plain files whose sources may be removed at the end of a run."""
        query = f"SELECT {_FIELDS} FROM files WHERE NOT removed AND kind = 'plain'"
        return list(map(_parse_row, self._select(query)))

    def list_unindexed(self) -> list[RankIteration]:
        """Return the iterations with tensors that are in no manifest."""
        query = "SELECT DISTINCT rank, iteration FROM files WHERE NOT indexed AND rank IS NOT NULL"
        return sorted(self._select(query))

    def list_iteration_files(self, place: RankIteration) -> list[IngestedFile]:
        """Return the tensor files of one rank's iteration."""
        query = f"SELECT {_FIELDS} FROM files WHERE rank = ? AND iteration = ? ORDER BY path"
        return list(map(_parse_row, self._select(query, *place)))

    def mark_indexed(self, place: RankIteration) -> None:
        """Record that the manifest of an iteration contains all of its tensors."""
        query = "UPDATE files SET indexed = 1 WHERE rank = ? AND iteration = ?"
        with self._transaction() as base:
            base.execute(query, place)

    def get_session_id(self) -> str:
        """Return the id of the session under which the manifests of this tree are written."""
        if not self._select("SELECT id FROM session"):
            with self._transaction() as base:
                base.execute("INSERT INTO session VALUES (?)", (uuid.uuid4().hex,))
        return self._select("SELECT id FROM session")[0][0]

    def _select(self, query: str, *values: object) -> list[Any]:
        with self._mapped_errors(), self._lock:
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _transaction(self) -> Generator[sqlite3.Connection, None, None]:
        with self._mapped_errors(), self._lock, self._base:
            self._base.execute("BEGIN")
            yield self._base

    @contextmanager
    def _mapped_errors(self) -> Generator[None, None, None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ExhaustedError(f"{self._path}: {error}") from None


def _prepare_database(base: sqlite3.Connection, path: Path, *, durable: bool) -> None:
    base.execute("PRAGMA journal_mode = WAL")
    base.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    state_files.read_tables_version(base, path, newest=_TABLES_VERSION, whose="ingest")
    base.executescript(_SCHEMA)


def _build_row(file: IngestedFile) -> tuple[object, ...]:
    source, stored = file.source, file.stored
    return (
        os.fsencode(file.path),
        file.kind.value,
        file.digest,
        *(str(source.inode), source.size_bytes, source.modified_ns),
        os.fsencode(file.target),
        *(str(stored.inode), stored.size_bytes, stored.modified_ns),
        file.linked,
        json.dumps(file.members, default=make_plain),
        file.removed,
    )


def _parse_row(row: Sequence[Any]) -> IngestedFile:
    path, kind, digest = row[:3]
    target, linked, members, removed = row[6], *row[10:]
    return IngestedFile(
        path=os.fsdecode(path),
        kind=DumpFileKind(kind),
        source=_parse_stamp(row[3:6]),
        digest=digest,
        target=os.fsdecode(target),
        stored=_parse_stamp(row[7:10]),
        linked=bool(linked),
        members=tuple(read_json(FileTensor, body) for body in json.loads(members)),
        removed=bool(removed),
    )


def _parse_stamp(numbers: Sequence[Any]) -> FileStamp:
    inode, size, modified_ns = numbers
    return FileStamp(int(inode), size, modified_ns)

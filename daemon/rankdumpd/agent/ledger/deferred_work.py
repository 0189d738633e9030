"""Work that the ledger lists until it is done, oldest first: manifests whose rows the table of
statistics does not have yet, and files that were stored unpacked under pressure.

A row is entered in the transaction that enters the change or the record. One of a manifest is
deleted after the table's file has its final name; a crash between the two leaves a row whose
manifest is found to be in the table. One of a file is deleted in the transaction that enters the
size of the packed file; a crash before it leaves a file that is found to be packed. Rows of a
session are not folded while one of its files waits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankdumpd.agent.ledger.database import LedgerTransaction, RowQuery
from rankdumpd.agent.ledger.rows import parse_shape
from rankdumpd.agent.records import RecordOutcome, RecordStatus

# A new number each time: a manifest that changes while it is read stays.
_ENTER = """
INSERT OR REPLACE INTO unindexed (session_id, iteration, records, since_us)
SELECT ?1, ?2, MAX(?3, COALESCE(MAX(records), 0)), MIN(?4, COALESCE(MIN(since_us), ?4))
FROM unindexed WHERE session_id = ?1 AND iteration = ?2
"""
_WAITING = """
SELECT session_id, CAST(TOTAL(records) AS INTEGER), MIN(since_us) FROM unindexed
GROUP BY session_id ORDER BY MIN(number)
"""
_ROWS = """
SELECT number, iteration, records FROM unindexed WHERE session_id = ? ORDER BY number LIMIT ?
"""


class UnindexedSession(NamedTuple):
    """Manifests of one session that are not in the table."""

    session_id: str
    records: int
    since_us: int
    """When its oldest manifest was written, since the epoch."""


class UnindexedManifest(NamedTuple):
    """One row."""

    number: int
    iteration: int
    records: int


class UnindexedManifests:
    """The unindexed manifests of one ledger; safe to use from several threads."""

    def __init__(
        self, select: RowQuery, transaction: LedgerTransaction, now_us: Callable[[], int]
    ) -> None:
        self._select, self._transaction, self._now_us = select, transaction, now_us
        self.is_kept = False
        """Whether manifests are entered: somebody writes the table."""

    def enter(
        self, base: sqlite3.Connection, session_id: str, iteration: int, records: int = 0
    ) -> None:
        """Enter a manifest of that many records, in a transaction that the caller began."""
        if self.is_kept:
            base.execute(_ENTER, (session_id, iteration, records, self._now_us()))

    def list_sessions(self) -> list[UnindexedSession]:
        """Return what waits, the session of the oldest row first."""
        return [UnindexedSession(*row) for row in self._select(_WAITING)]

    def list_manifests(self, session_id: str, limit: int) -> list[UnindexedManifest]:
        """Return the oldest rows of a session."""
        return [UnindexedManifest(*row) for row in self._select(_ROWS, session_id, limit)]

    def delete(self, rows: Iterable[UnindexedManifest]) -> None:
        """Delete rows that are in the table; one that was entered again meanwhile stays."""
        with self._transaction() as base:
            base.executemany(
                "DELETE FROM unindexed WHERE number = ?", [(each.number,) for each in rows]
            )


_INSERT = "INSERT OR IGNORE INTO unpacked (session_id, iteration, sequence) VALUES (?, ?, ?)"
_DELETE = "DELETE FROM unpacked WHERE session_id = ? AND iteration = ? AND sequence = ?"
_FIND = "SELECT 1 FROM unpacked WHERE session_id = ? AND iteration = ? AND sequence = ?"
_COUNT = "SELECT COUNT(*) FROM unpacked WHERE session_id = ? AND iteration = ?"
_NEXT_ITERATION = "SELECT session_id, iteration FROM unpacked ORDER BY number LIMIT 1"
_FILES_OF_ITERATION = """
SELECT u.sequence, r.path, r.dtype, r.shape, r.digest, r.bytes_stored, r.fate FROM unpacked AS u
JOIN records AS r ON r.session_id = u.session_id AND r.sequence = u.sequence
WHERE u.session_id = ? AND u.iteration = ? ORDER BY u.sequence LIMIT ?
"""
_SUMS = """
SELECT COUNT(*), CAST(TOTAL(bytes_stored) AS INTEGER) FROM unpacked AS u
LEFT JOIN records AS r ON r.session_id = u.session_id AND r.sequence = u.sequence
"""
_ITERATION_SUMS = f"{_SUMS} WHERE u.session_id = ? AND u.iteration = ?"


@dataclass(frozen=True, slots=True)
class UnpackedFile:
    """The file of a record that is yet to be packed."""

    session_id: str
    iteration: int
    sequence: int
    path: str
    """Relative to the root of the tree."""
    dtype: str
    shape: tuple[int, ...]
    digest: str
    bytes_stored: int
    """Bytes of its file; 0 for a link."""
    is_link: bool


class UnpackedFiles:
    """The unpacked files of one ledger; safe to use from several threads."""

    def __init__(
        self, select: RowQuery, transaction: LedgerTransaction, unindexed: UnindexedManifests
    ) -> None:
        self._select, self._transaction, self._unindexed = select, transaction, unindexed
        ((files, byte_count),) = select(_SUMS)
        self.sums: tuple[int, int] = (files, byte_count)
        """How many files wait, and their bytes."""
        self._pending = [0, 0]
        """Changes of the sums by the present transaction."""

    def end_transaction(self, *, is_committed: bool) -> None:
        """Add the changes of a transaction to the sums, if it was committed."""
        files, byte_count = self._pending
        self._pending = [0, 0]
        if is_committed:
            self.sums = self.sums[0] + files, self.sums[1] + byte_count

    def enter(self, base: sqlite3.Connection, outcomes: Iterable[RecordOutcome]) -> None:
        """Enter those of some records whose files are unpacked."""
        for each in outcomes:
            if each.unpacked:
                key = each.frame_id.session_id, each.head.iteration, each.frame_id.sequence
                is_new = base.execute(_INSERT, key).rowcount
                self._count(is_new, is_new * each.bytes_stored)

    def list_next(self, limit: int) -> list[UnpackedFile]:
        """Return files of the iteration that has the oldest one, at most `limit`."""
        while found := self._select(_NEXT_ITERATION):
            ((session_id, iteration),) = found
            rows = self._select(_FILES_OF_ITERATION, session_id, iteration, limit)
            if rows:
                return [_read_file(session_id, iteration, row) for row in rows]
            # A damaged ledger may have lost their records.
            with self._transaction() as base:
                self.drop_iteration(base, session_id, iteration)
        return []

    def count(self, session_id: str, iteration: int) -> int:
        """Return how many files of an iteration wait."""
        ((count,),) = self._select(_COUNT, session_id, iteration)
        return count

    def has(self, file: UnpackedFile) -> bool:
        """Return whether a file still waits: its iteration may have been retired."""
        return bool(self._select(_FIND, *_make_key(file)))

    def enter_packed(self, packed: Sequence[tuple[UnpackedFile, int]], *, synced: bool) -> None:
        """Enter files as packed, with the bytes that each takes now."""
        with self._transaction(synced=synced) as base:
            base.executemany(
                "UPDATE records SET bytes_stored = ? WHERE session_id = ? AND sequence = ?",
                [(size, file.session_id, file.sequence) for file, size in packed],
            )
            for file, _ in packed:
                waited = base.execute(_DELETE, _make_key(file)).rowcount
                self._count(-waited, -waited * file.bytes_stored)
            for place in {(file.session_id, file.iteration) for file, _ in packed}:
                ((left,),) = base.execute(_COUNT, place).fetchall()
                if not left:  # its manifest was changed
                    self._unindexed.enter(base, *place)

    def drop_iteration(self, base: sqlite3.Connection, session_id: str, iteration: int) -> None:
        """Delete the rows of an iteration whose files are removed."""
        ((files, byte_count),) = base.execute(_ITERATION_SUMS, (session_id, iteration)).fetchall()
        base.execute(
            "DELETE FROM unpacked WHERE session_id = ? AND iteration = ?", (session_id, iteration)
        )
        self._count(-files, -byte_count)

    def _count(self, files: int, byte_count: int) -> None:
        self._pending[0] += files
        self._pending[1] += byte_count


def _make_key(file: UnpackedFile) -> tuple[str, int, int]:
    return file.session_id, file.iteration, file.sequence


def _read_file(session_id: str, iteration: int, row: tuple[Any, ...]) -> UnpackedFile:
    sequence, path, dtype, shape, digest, byte_count, fate = row
    is_link = fate == RecordStatus.LINKED.value
    about = dtype, parse_shape(shape), digest, byte_count, is_link
    return UnpackedFile(session_id, iteration, sequence, path, *about)

"""Work that the ledger lists until it is done, oldest first: manifests whose rows are not in the
table of statistics yet, and files that were stored unpacked under pressure.

The row of a manifest is entered in the same transaction as the change of the manifest, and deleted
after the file of the table has its final name. A crash between the two leaves a row whose manifest
is found to be in the table already.

The row of an unpacked file is entered together with its record, and deleted in the transaction that
enters the size of the packed file. A crash before that leaves a row whose file is found to be
packed. Rows of a session are not folded while one of its files waits.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rankdumpd.agent.ledger.database import LedgerTransaction, RowQuery
from rankdumpd.agent.ledger.rows import parse_shape
from rankdumpd.agent.records import RecordOutcome, RecordStatus

# The row gets a new number each time, so that a manifest that changes while it is read stays
# entered.
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
    """Manifests of one session that are not in the table of statistics."""

    session_id: str
    records: int
    since_us: int
    """Time at which the oldest manifest was written, in microseconds since the epoch."""


class UnindexedManifest(NamedTuple):
    """One row: a manifest that is not in the table of statistics."""

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
        """Whether manifests are entered at all; only if a table writer is running."""

    def enter(
        self, base: sqlite3.Connection, session_id: str, iteration: int, records: int = 0
    ) -> None:
        """Enter a manifest with `records` records, in a transaction that the caller has begun."""
        if self.is_kept:
            base.execute(_ENTER, (session_id, iteration, records, self._now_us()))

    def list_sessions(self) -> list[UnindexedSession]:
        """Return the sessions with unindexed manifests, the session of the oldest row first."""
        return [UnindexedSession(*row) for row in self._select(_WAITING)]

    def list_manifests(self, session_id: str, limit: int) -> list[UnindexedManifest]:
        """Return the oldest rows of a session."""
        return [UnindexedManifest(*row) for row in self._select(_ROWS, session_id, limit)]

    def delete(self, rows: Iterable[UnindexedManifest]) -> None:
        """Delete rows that are in the table; a row that was entered again in the meantime stays."""
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
    """The file of a record that is still to be packed."""

    session_id: str
    iteration: int
    sequence: int
    path: str
    """Path relative to the root of the tree."""
    dtype: str
    shape: tuple[int, ...]
    digest: str
    bytes_stored: int
    """Bytes of the file; 0 for a link."""
    is_link: bool


class UnpackedFiles:
    """The unpacked files of one ledger; safe to use from several threads."""

    def __init__(
        self, select: RowQuery, transaction: LedgerTransaction, unindexed: UnindexedManifests
    ) -> None:
        self._select, self._transaction, self._unindexed = select, transaction, unindexed
        ((files, byte_count),) = select(_SUMS)
        self.sums: tuple[int, int] = (files, byte_count)
        """Number of waiting files, and their bytes."""
        self._pending = [0, 0]
        """Changes of `sums` by the present transaction."""

    def end_transaction(self, *, is_committed: bool) -> None:
        """Add the changes of a transaction to `sums`, if it was committed."""
        files, byte_count = self._pending
        self._pending = [0, 0]
        if is_committed:
            self.sums = self.sums[0] + files, self.sums[1] + byte_count

    def enter(self, base: sqlite3.Connection, outcomes: Iterable[RecordOutcome]) -> None:
        """Enter the files of those records that were stored unpacked."""
        for each in outcomes:
            if each.unpacked:
                key = each.frame_id.session_id, each.head.iteration, each.frame_id.sequence
                is_new = base.execute(_INSERT, key).rowcount
                self._count(is_new, is_new * each.bytes_stored)

    def list_next(self, limit: int) -> list[UnpackedFile]:
        """Return at most `limit` files of the iteration that has the oldest file."""
        while found := self._select(_NEXT_ITERATION):
            ((session_id, iteration),) = found
            rows = self._select(_FILES_OF_ITERATION, session_id, iteration, limit)
            if rows:
                return [_read_file(session_id, iteration, row) for row in rows]
            # The ledger has no records for these rows, which damage to the ledger may cause.
            with self._transaction() as base:
                self.drop_iteration(base, session_id, iteration)
        return []

    def count(self, session_id: str, iteration: int) -> int:
        """Return the number of waiting files of an iteration."""
        ((count,),) = self._select(_COUNT, session_id, iteration)
        return count

    def has(self, file: UnpackedFile) -> bool:
        """Return whether a file still waits; it does not if its iteration was retired."""
        return bool(self._select(_FIND, *_make_key(file)))

    def enter_packed(self, packed: Sequence[tuple[UnpackedFile, int]], *, synced: bool) -> None:
        """Record that files are packed, with the bytes that each file takes now."""
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
                if not left:  # the manifest was changed with its last file
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

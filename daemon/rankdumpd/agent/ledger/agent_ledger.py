"""Write access to the ledger of an agent: a frame that is entered in the ledger is counted exactly
once.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from rankdump._core.session_protocol import IterationEnd, SessionEnd, SessionRequest
from rankdump._core.status import IterationStatus, SessionState
from rankdump.errors import CorruptedError, RankdumpError, UnavailableError
from rankdumpd.agent.ledger import database, retention, rows
from rankdumpd.agent.ledger.database import SETTING_KEY, lock_ledger_folder, open_ledger_file
from rankdumpd.agent.ledger.deferred_work import UnindexedManifests, UnpackedFiles
from rankdumpd.agent.ledger.reader import DAMAGE_REMEDY, LedgerReader
from rankdumpd.agent.ledger.report_log import ReportLog
from rankdumpd.agent.ledger.retention import RetiredIterations
from rankdumpd.agent.records import (
    FrameId,
    JoinedMember,
    MetadataFrame,
    RecordOutcome,
    StatisticRowsResult,
    read_wall_clock_us,
)
from rankdumpd.server.state_files import explain_state_error

_INSERT_BATCH_ROWS = 64
_BATCH_PLACES = ", ".join([rows.RECORD_PLACES] * _INSERT_BATCH_ROWS)


def _insert_records(base: sqlite3.Connection, outcomes: Collection[RecordOutcome]) -> None:
    """Insert rows of records; if there is a row with the same number, it stays unchanged."""
    layouts = {layout for each in outcomes if (layout := each.head.kind.layout) is not None}
    base.executemany(
        "INSERT OR IGNORE INTO layouts VALUES (?, ?)", map(rows.make_layout_row, layouts)
    )
    records = [*map(rows.make_record_row, outcomes)]
    # In batches, because every step of SQLite releases the GIL, and while other threads are busy,
    # acquiring it again costs more than inserting a row.
    whole = len(records) // _INSERT_BATCH_ROWS * _INSERT_BATCH_ROWS
    query = "INSERT OR IGNORE INTO records VALUES "
    for first in range(0, whole, _INSERT_BATCH_ROWS):
        some = records[first : first + _INSERT_BATCH_ROWS]
        base.execute(query + _BATCH_PLACES, list(chain.from_iterable(some)))
    base.executemany(query + rows.RECORD_PLACES, records[whole:])


# Runs only at a start: there are few layouts, and finding the unused ones reads all records.
_DELETE_UNUSED_LAYOUTS = (
    "DELETE FROM layouts WHERE number NOT IN (SELECT DISTINCT layout FROM records)"
)
_INSERT_AWAY = "INSERT OR IGNORE INTO away VALUES (?, ?, 0)"
_MARK_APPLIED = "UPDATE declarations SET applied = 1 WHERE session_id = ? AND sequence = ?"


class AgentLedger(LedgerReader):
    """Rows of all sessions; safe to use from several threads, one at a time."""

    def __init__(
        self,
        state_dir: Path,
        *,
        report_bytes: int = 0,
        now_us: Callable[[], int] = read_wall_clock_us,
    ) -> None:
        """The ledger has a report log of at most `report_bytes`; 0 without a coordinator.

        ConfigError when the folder cannot hold a ledger, ExhaustedError when it has no space,
        CorruptedError when its file is not a ledger.
        """
        self._synced: bool | None = None
        self._departed: set[str] = set()
        self.problem = ""
        """Why the last transaction failed; empty when it succeeded."""
        self._on_end: Callable[[bool], None] = lambda _: None
        """Called at the end of a transaction; the argument says whether it was committed."""
        self._guard = lock_ledger_folder(state_dir)
        self.path = path = state_dir / "ledger.sqlite"
        """Path of the SQLite file."""
        try:
            super().__init__(open_ledger_file(path), str(path), now_us)
            self.log = ReportLog(path, self._transaction, max_bytes=report_bytes)
            self.unindexed = UnindexedManifests(self._select, self._transaction, now_us)
            self.unpacked = UnpackedFiles(self._select, self._transaction, self.unindexed)
            self._on_end = self._end_counts
            self.retention = RetiredIterations(
                path, self._select, self._transaction, now_us, self.unpacked, self.unindexed
            )
            with self._transaction() as base:
                base.execute(retention.INSERT_CLOSED_SESSIONS, (now_us(),))
                base.execute(_DELETE_UNUSED_LAYOUTS)
        except RankdumpError as error:
            os.close(self._guard)
            if isinstance(error, UnavailableError):
                raise CorruptedError(str(error)) from None
            if isinstance(error, CorruptedError):
                raise CorruptedError(f"{error}; {DAMAGE_REMEDY}") from None
            raise
        except sqlite3.Error as error:
            os.close(self._guard)
            raise explain_state_error(state_dir, SETTING_KEY, error) from None

    def close(self) -> None:
        """Close the file, so that another process can open it; may be repeated."""
        with self._lock:
            if self._guard >= 0:
                self.log.close()
                self.retention.close()
                self._base.close()
                os.close(self._guard)
                self._guard = -1

    def open_session(self, request: SessionRequest) -> None:
        """Enter a session, or the new request of a known session; the secret in the request is
        already hashed.

        UnavailableError when the session cannot be entered.
        """
        about = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
        key = (request.session_id, json.dumps(about), request.plan_json)
        row = (*key, SessionState.OPEN.value, request.secret.hex(), self._now_us())
        try:
            with self._transaction() as base:
                base.execute(
                    "INSERT INTO sessions VALUES (?, ?, ?, ?, 0, 0, '[]', '[]', ?, ?)"
                    " ON CONFLICT (session_id) DO UPDATE"
                    " SET request = excluded.request, plan = excluded.plan,"
                    " secret_hash = excluded.secret_hash",
                    row,
                )
                base.execute("DELETE FROM away WHERE session_id = ?", (request.session_id,))
        except sqlite3.Error as error:
            raise UnavailableError(f"the ledger cannot be written at present: {error}") from None
        self._departed.discard(request.session_id)

    def withdraw(self, session_id: str) -> None:
        """Remove a session that never sent a frame."""
        with self._transaction() as base:
            base.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def commit(
        self,
        outcomes: Collection[RecordOutcome],
        row_results: Iterable[StatisticRowsResult],
        declared: Collection[MetadataFrame],
        watermarks: Mapping[str, int],
        *,
        synced: bool,
    ) -> None:
        """Enter frames in one transaction; if there is a row with the same number, it stays
        unchanged.
        """
        with self._transaction(synced=synced) as base:
            _insert_records(base, outcomes)
            self.unpacked.enter(base, outcomes)
            base.executemany(
                "INSERT OR IGNORE INTO figures VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                map(rows.make_statistics_row, row_results),
            )
            self.log.enter_declared(base, declared)
            base.executemany(
                "INSERT OR IGNORE INTO declarations VALUES (?, ?, ?, ?, 0)",
                map(rows.make_metadata_row, declared),
            )
            base.executemany(
                "UPDATE sessions SET watermark = ? WHERE session_id = ?",
                [(watermark, session_id) for session_id, watermark in watermarks.items()],
            )

    def mark_joined(self, session_id: str, shares: Iterable[JoinedMember], *, synced: bool) -> None:
        """Record that tensors are in their operators' files, so that their own files can be
        removed.
        """
        with self._transaction(synced=synced) as base:
            base.executemany(
                "UPDATE records SET joined = 1, bytes_stored = ?"
                " WHERE session_id = ? AND sequence = ?",
                [(share.bytes_stored, session_id, share.sequence) for share in shares],
            )

    def enter_iteration_end(
        self, frame_id: FrameId, end: IterationEnd, graphs: Iterable[int], status: IterationStatus
    ) -> None:
        """Record that an iteration's manifest is written, and enter its balance in the report log.

        Events of the iteration are kept only if they have not been reported to the coordinator yet.
        """
        with self._transaction() as base:
            base.execute(database.CLEAR_APPLIED_EVENTS, (frame_id.session_id, frame_id.sequence))
            base.execute(
                "INSERT OR IGNORE INTO iterations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*rows.make_end_row(frame_id, end), self._now_us()),
            )
            self.log.enter_balance(base, frame_id, status)
            _enter_ordered_graphs(base, frame_id, graphs)
            session_id, records = frame_id.session_id, status.kept_tensors
            self.unindexed.enter(base, session_id, end.iteration, records)

    def enter_waiting_iteration(self, frame_id: FrameId, status: IterationStatus) -> None:
        """Enter the balance of an iteration in the report log, although its manifest is not written
        yet.
        """
        with self._transaction() as base:
            self.log.enter_balance(base, frame_id, status)

    def mark_applied_and_keep(self, frame_id: FrameId) -> None:
        """Record that timeouts or a changed plan are applied; the bodies of these frames are needed
        later.
        """
        with self._transaction() as base:
            base.execute(_MARK_APPLIED, (frame_id.session_id, frame_id.sequence))

    def mark_applied(self, frame_ids: Iterable[FrameId], ordered: Iterable[int]) -> None:
        """Record that metadata frames of a session are applied, and clear their bodies."""
        with self._transaction() as base:
            for frame_id in frame_ids:
                base.execute(
                    "UPDATE declarations SET applied = 1, body = x''"
                    " WHERE session_id = ? AND sequence = ?",
                    (frame_id.session_id, frame_id.sequence),
                )
                _enter_ordered_graphs(base, frame_id, ordered)

    def enter_session_end(self, frame_id: FrameId, end: SessionEnd) -> None:
        """Record that the rank has ended its session."""
        session_id, notes = frame_id.session_id, json.dumps(end.notes)
        with self._transaction() as base:
            base.execute(_MARK_APPLIED, (session_id, frame_id.sequence))
            base.execute(
                "UPDATE sessions SET state = ?, iterations_seen = ?, notes = ?"
                " WHERE session_id = ?",
                (SessionState.CLOSED.value, end.iterations_seen, notes, session_id),
            )
            base.execute(_INSERT_AWAY, (session_id, self._now_us()))

    def probe(self) -> None:
        """Write without changing anything; raises an error while the ledger cannot be written."""
        with self._transaction() as base:
            base.execute("UPDATE reporting SET acknowledged = acknowledged")

    def note_departed_sessions(self, session_ids: Iterable[str]) -> None:
        """Record since when sessions have been closed, or their ranks gone."""
        new = set(session_ids) - self._departed
        if new:
            with self._transaction() as base:
                base.executemany(_INSERT_AWAY, [(each, self._now_us()) for each in new])
            self._departed |= new

    def fold_some(self) -> bool:
        """Fold some rows of sessions that ended a day ago; return whether there may be more to
        fold.
        """
        found = self._select(
            retention.SELECT_NEXT_FOLD, self._now_us() - int(retention.ROW_RETENTION_S * 1e6)
        )
        for (session_id,) in found:
            with self._transaction() as base:
                retention.fold_session(base, session_id)
            self._select(retention.VACUUM_PAGES)
        return bool(found)

    def forget(self, session_id: str, iteration: int) -> None:
        """Fold the rows of a removed iteration into its sums.

        Rows after the last applied end of the iteration stay. Sequence numbers of frames stay
        known.
        """
        folds = True
        while folds:
            with self._transaction() as base:
                folds = retention.fold_rows(base, session_id, iteration)

    def _end_counts(self, is_committed: bool) -> None:
        if not is_committed:
            self.log.forget_counts()
        self.unpacked.end_transaction(is_committed=is_committed)

    @contextmanager
    def _transaction(self, *, synced: bool = False) -> Generator[sqlite3.Connection]:
        with self._lock:
            if synced is not self._synced:
                # In mode NORMAL a power loss may revert the last commits; in mode FULL it never
                # does.
                self._base.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._synced = synced
            with self._detect_damage():
                try:
                    self._base.execute("BEGIN IMMEDIATE")
                    yield self._base
                    self._base.execute("COMMIT")
                    self.problem = ""
                    self._on_end(True)
                except BaseException as error:
                    if isinstance(error, sqlite3.OperationalError):
                        self.problem = str(error)
                    self._on_end(False)
                    if self._base.in_transaction:
                        self._base.execute("ROLLBACK")
                    raise


def _enter_ordered_graphs(
    base: sqlite3.Connection, frame_id: FrameId, graphs: Iterable[int]
) -> None:
    base.execute(
        "UPDATE sessions SET graphs = ? WHERE session_id = ?",
        (json.dumps(sorted(graphs)), frame_id.session_id),
    )

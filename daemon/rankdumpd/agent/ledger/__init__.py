"""One SQLite file per agent: a frame that stands here is accounted for, and never twice."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from rankdump.contract.errors import ConfigError
from rankdump.contract.exchange import IterationEnd, SessionEnd, SessionRequest
from rankdump.contract.status import IterationStatus, SessionState
from rankdumpd.agent import rows
from rankdumpd.agent.ledger import queries
from rankdumpd.agent.ledger.connection import connect, sole_owner
from rankdumpd.agent.ledger.log import ReportLog
from rankdumpd.agent.ledger.reading import LedgerReader
from rankdumpd.agent.members import Joined
from rankdumpd.agent.values import Declared, Judged, Outcome, Ticket

_INSERTED_AT_ONCE = 64
_PLACES_AT_ONCE = ", ".join([rows.RECORD_PLACES] * _INSERTED_AT_ONCE)


class Ledger(LedgerReader):
    """Rows of all sessions; safe to use from several threads, one at a time."""

    def __init__(self, state_dir: Path, *, report_bytes: int = 0) -> None:
        """Log what a coordinator is to be told, up to that much; 0 when there is none."""
        self._synced: bool | None = None
        self._guard = sole_owner(state_dir)
        path = state_dir / "ledger.sqlite"
        try:
            super().__init__(connect(path))
            self.log = ReportLog(path, self._transaction, most_bytes=report_bytes)
        except ConfigError:
            os.close(self._guard)
            raise

    def close(self) -> None:
        """Let another process have the file; may be repeated."""
        with self._lock:
            if self._guard >= 0:
                self.log.close()
                self._base.close()
                os.close(self._guard)
                self._guard = -1

    def open_session(self, request: SessionRequest) -> None:
        """Enter a session, or note where a known one runs now; its secret is a hash by now."""
        about = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
        who = (request.session_id, json.dumps(about), request.plan_json)
        row = (*who, SessionState.OPEN.value, request.secret.hex())
        with self._transaction() as base:
            base.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, 0, 0, '[]', '[]', ?, 0)"
                " ON CONFLICT (session_id) DO UPDATE"
                " SET request = excluded.request, plan = excluded.plan,"
                " secret_hash = excluded.secret_hash",
                row,
            )

    def withdraw(self, session_id: str) -> None:
        """Forget a session of which nothing ever came."""
        with self._transaction() as base:
            base.execute("DELETE FROM sessions WHERE session_id = ?", (session_id,))

    def commit(
        self,
        outcomes: Iterable[Outcome],
        judged: Iterable[Judged],
        declared: Collection[Declared],
        watermarks: Mapping[str, int],
        *,
        synced: bool,
    ) -> None:
        """Enter frames in one transaction; a number that stands there already stays as it is."""
        with self._transaction(synced=synced) as base:
            _insert_records(base, [rows.record_row(outcome) for outcome in outcomes])
            base.executemany(
                "INSERT OR IGNORE INTO figures VALUES (?, ?, ?, ?, ?, ?, ?)",
                map(rows.figures_row, judged),
            )
            self.log.enter_declared(base, declared)
            base.executemany(
                "INSERT OR IGNORE INTO declarations VALUES (?, ?, ?, ?, 0)",
                map(rows.declaration_row, declared),
            )
            base.executemany(
                "UPDATE sessions SET watermark = ? WHERE session_id = ?",
                [(watermark, session_id) for session_id, watermark in watermarks.items()],
            )

    def joined(self, session_id: str, shares: Iterable[Joined], *, synced: bool) -> None:
        """Remember that the files of operators hold tensors, whose own files may go now."""
        with self._transaction(synced=synced) as base:
            base.executemany(
                "UPDATE records SET joined = 1, bytes_stored = ?"
                " WHERE session_id = ? AND sequence = ?",
                [(share.bytes_stored, session_id, share.sequence) for share in shares],
            )

    def iteration_ended(
        self, ticket: Ticket, end: IterationEnd, graphs: Iterable[int], status: IterationStatus
    ) -> None:
        """Remember that an iteration's manifest is in the tree, and log its balance.

        Its events are not needed again but for the coordinator.
        """
        with self._transaction() as base:
            base.execute(queries.FORGET_EVENTS, (ticket.session_id, ticket.sequence))
            base.execute(
                "INSERT OR IGNORE INTO iterations VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0)",
                rows.end_row(ticket, end),
            )
            self.log.enter_balance(base, ticket, status)
            _note_ordered(base, ticket, graphs)

    def iteration_waits(self, ticket: Ticket, status: IterationStatus) -> None:
        """Log the balance of an iteration whose manifest could not be written yet."""
        with self._transaction() as base:
            self.log.enter_balance(base, ticket, status)

    def timeouts_kept(self, ticket: Ticket) -> None:
        """Remember that timeouts took effect; they stay until others come."""
        with self._transaction() as base:
            base.execute(
                "UPDATE declarations SET applied = 1 WHERE session_id = ? AND sequence = ?",
                (ticket.session_id, ticket.sequence),
            )

    def carried_out(self, tickets: Iterable[Ticket], ordered: Iterable[int]) -> None:
        """Remember that declarations of a session have taken effect and are not needed again."""
        with self._transaction() as base:
            for ticket in tickets:
                base.execute(
                    "UPDATE declarations SET applied = 1, body = x''"
                    " WHERE session_id = ? AND sequence = ?",
                    (ticket.session_id, ticket.sequence),
                )
                _note_ordered(base, ticket, ordered)

    def session_ended(self, ticket: Ticket, end: SessionEnd) -> None:
        """Remember that a session said goodbye."""
        with self._transaction() as base:
            base.execute(
                "UPDATE declarations SET applied = 1 WHERE session_id = ? AND sequence = ?",
                (ticket.session_id, ticket.sequence),
            )
            base.execute(
                "UPDATE sessions SET state = ?, iterations_seen = ?, notes = ?"
                " WHERE session_id = ?",
                (
                    SessionState.CLOSED.value,
                    end.iterations_seen,
                    json.dumps(end.notes),
                    ticket.session_id,
                ),
            )

    @contextmanager
    def _transaction(self, *, synced: bool = False) -> Generator[sqlite3.Connection]:
        with self._lock:
            if synced is not self._synced:
                # A power loss may take the last commits of NORMAL with it, never of FULL.
                self._base.execute(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
                self._synced = synced
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                self.log.forget_counts()
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise


def _insert_records(base: sqlite3.Connection, records: list[tuple[str | int, ...]]) -> None:
    # Some at a time: every step of SQLite lets go of the interpreter, and taking it back from
    # threads that are busy costs more than the row.
    whole = len(records) // _INSERTED_AT_ONCE * _INSERTED_AT_ONCE
    query = "INSERT OR IGNORE INTO records VALUES "
    for first in range(0, whole, _INSERTED_AT_ONCE):
        some = records[first : first + _INSERTED_AT_ONCE]
        base.execute(query + _PLACES_AT_ONCE, list(chain.from_iterable(some)))
    base.executemany(query + rows.RECORD_PLACES, records[whole:])


def _note_ordered(base: sqlite3.Connection, ticket: Ticket, graphs: Iterable[int]) -> None:
    base.execute(
        "UPDATE sessions SET graphs = ? WHERE session_id = ?",
        (json.dumps(sorted(graphs)), ticket.session_id),
    )

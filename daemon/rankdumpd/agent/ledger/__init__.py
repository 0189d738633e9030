"""One SQLite file per agent: a frame that stands here is accounted for, and never twice."""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankdump.contract.errors import ConfigError
from rankdump.contract.exchange import IterationEnd, SessionEnd, SessionRequest
from rankdump.contract.manifest import ManifestRecord
from rankdump.contract.status import SessionState
from rankdumpd.agent import rows
from rankdumpd.agent.ledger.connection import connect, sole_owner
from rankdumpd.agent.values import (
    CountRow,
    Declared,
    EndRow,
    Fate,
    Outcome,
    SessionRow,
    TableRow,
    Ticket,
)

ROWS_AT_ONCE = 4096


class Ledger:
    """Rows of all sessions; safe to use from several threads, one at a time."""

    def __init__(self, state_dir: Path) -> None:
        self._lock = threading.Lock()
        self._synced: bool | None = None
        self._guard = sole_owner(state_dir)
        try:
            self._base = connect(state_dir / "ledger.sqlite")
        except ConfigError:
            os.close(self._guard)
            raise

    def close(self) -> None:
        """Let another process have the file; may be repeated."""
        with self._lock:
            if self._guard >= 0:
                self._base.close()
                os.close(self._guard)
                self._guard = -1

    def open_session(self, request: SessionRequest) -> None:
        """Enter a session, or note where a known one runs now."""
        about = {k: v for k, v in asdict(request).items() if not isinstance(v, bytes)}
        row = (request.session_id, json.dumps(about), request.plan_json, SessionState.OPEN.value)
        with self._transaction() as base:
            base.execute(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, 0, 0, '[]', '[]')"
                " ON CONFLICT (session_id) DO UPDATE"
                " SET request = excluded.request, plan = excluded.plan",
                row,
            )

    def find(self, session_id: str) -> SessionRow | None:
        """Return what is known of a session."""
        found = self._select(
            f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE session_id = ?", session_id
        )
        return rows.session_row(found[0]) if found else None

    def unfinished(self) -> list[SessionRow]:
        """Return the sessions that never said goodbye, or whose last words had no effect yet."""
        closed = SessionState.CLOSED.value
        found = self._select(
            f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE state <> ? OR session_id IN"
            " (SELECT session_id FROM declarations WHERE applied = 0)",
            closed,
        )
        return [rows.session_row(row) for row in found]

    def committed_beyond(self, session_id: str, watermark: int) -> list[int]:
        """Return the committed numbers above the watermark."""
        found = self._select(
            "SELECT sequence FROM records WHERE session_id = ?1 AND sequence > ?2"
            " UNION SELECT sequence FROM declarations WHERE session_id = ?1 AND sequence > ?2",
            session_id,
            watermark,
        )
        return [sequence for (sequence,) in found]

    def unapplied(self, session_id: str) -> list[bytes]:
        """Return the declarations that have not taken effect for good, in order."""
        found = self._select(
            "SELECT body FROM declarations WHERE session_id = ? AND applied = 0 ORDER BY sequence",
            session_id,
        )
        return [body for (body,) in found]

    def counts(self, session_id: str) -> list[CountRow]:
        """Return what became of a session's records."""
        found = self._select(
            "SELECT iteration, fate, reason, COUNT(*), SUM(bytes_in), SUM(bytes_stored)"
            " FROM records WHERE session_id = ? GROUP BY iteration, fate, reason",
            session_id,
        )
        return [CountRow(row[0], Fate(row[1]), *row[2:]) for row in found]

    def ends(self, session_id: str) -> list[EndRow]:
        """Return the ends of iterations that have taken effect."""
        found = self._select(
            "SELECT iteration, expected, dropped FROM iterations WHERE session_id = ?", session_id
        )
        return [
            EndRow(iteration, expected, json.loads(text)) for iteration, expected, text in found
        ]

    def kept(self, session_id: str, iteration: int) -> list[tuple[int, ManifestRecord]]:
        """Return graph and record of every tensor of an iteration that is in the tree."""
        found = self._select(
            f"SELECT {rows.KEPT_COLUMNS} FROM records WHERE session_id = ? AND iteration = ?"
            " AND fate <> ? ORDER BY sequence",
            session_id,
            iteration,
            Fate.DROPPED.value,
        )
        return list(map(rows.kept_row, found))

    def table_rows(self, session_id: str, *, after: int, up_to: int) -> list[tuple[int, TableRow]]:
        """Return the next rows of `statistic.csv` by number, at most ROWS_AT_ONCE of them."""
        found = self._select(
            "SELECT sequence, row_folder, row FROM records WHERE session_id = ? AND sequence > ?"
            " AND sequence <= ? AND row <> '' ORDER BY sequence LIMIT ?",
            session_id,
            after,
            up_to,
            ROWS_AT_ONCE,
        )
        return [(sequence, TableRow(folder, text)) for sequence, folder, text in found]

    def last_end(self, session_id: str) -> int:
        """Return the number of the last end of an iteration that has taken effect, or 0."""
        query = "SELECT MAX(sequence) FROM iterations WHERE session_id = ?"
        ((sequence,),) = self._select(query, session_id)
        return sequence or 0

    def commit(
        self,
        outcomes: Iterable[Outcome],
        declared: Iterable[Declared],
        watermarks: Mapping[str, int],
        *,
        synced: bool,
    ) -> None:
        """Enter frames in one transaction; a number that stands there already stays as it is."""
        with self._transaction(synced=synced) as base:
            base.executemany(
                f"INSERT OR IGNORE INTO records VALUES ({rows.RECORD_PLACES})",
                map(rows.record_row, outcomes),
            )
            base.executemany(
                "INSERT OR IGNORE INTO declarations VALUES (?, ?, ?, ?, 0)",
                map(rows.declaration_row, declared),
            )
            base.executemany(
                "UPDATE sessions SET watermark = ? WHERE session_id = ?",
                [(watermark, session_id) for session_id, watermark in watermarks.items()],
            )

    def iteration_ended(self, ticket: Ticket, end: IterationEnd, graphs: Iterable[int]) -> None:
        """Remember that an iteration's manifest is in the tree; its events are not needed again."""
        where = (ticket.session_id, ticket.sequence)
        row = (*where, end.iteration, end.expected, json.dumps(dict(end.dropped)))
        with self._transaction() as base:
            base.execute("INSERT OR IGNORE INTO iterations VALUES (?, ?, ?, ?, ?)", row)
            base.execute(
                "UPDATE declarations SET applied = 1, body = x'' WHERE session_id = ?1"
                " AND applied = 0 AND (sequence = ?2 OR sequence < ?2 AND kind = 'EventColumns')",
                where,
            )
            _note_ordered(base, ticket, graphs)

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

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._base.execute(query, values).fetchall()

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
                if self._base.in_transaction:
                    self._base.execute("ROLLBACK")
                raise


def _note_ordered(base: sqlite3.Connection, ticket: Ticket, graphs: Iterable[int]) -> None:
    base.execute(
        "UPDATE sessions SET graphs = ? WHERE session_id = ?",
        (json.dumps(sorted(graphs)), ticket.session_id),
    )

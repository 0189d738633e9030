"""The ledger of an agent, for reading: sessions, counts, and what is stored of an iteration. A file
that is damaged is noticed here.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from rankdump._core.status import SessionState
from rankdump.errors import CorruptedError, UnavailableError
from rankdumpd.agent.ledger import database, rows
from rankdumpd.agent.ledger.rows import (
    IterationEndRow,
    LedgerSessionRow,
    OutcomeCountRow,
    StoredRecord,
    StoredStatisticRows,
    StoredTableRow,
)
from rankdumpd.agent.records import OperatorMember, RecordStatus, StatisticTableRow
from rankdumpd.server import state_files

MAX_READ_ROWS = 4096
LOST_AFTER_S = 86_400.0
"""A rank that is gone for a day is not expected; should it come, its session is found."""
_MAX_SEQUENCE = (1 << 63) - 1


class LedgerReader:
    """Rows of all sessions, for reading; safe to use from several threads, one at a time."""

    def __init__(self, base: sqlite3.Connection, name: str, now_us: Callable[[], int]) -> None:
        self._base, self._name, self._now_us = base, name, now_us
        self._lock = threading.Lock()
        self.damage = ""
        """Why the file is damaged; empty when it is not."""
        self.on_damage: Callable[[], None] = lambda: None
        """Called when that is found, in any thread."""

    def check(self) -> None:
        """Raise CorruptedError when the file was found to be damaged."""
        if self.damage:
            raise CorruptedError(self.damage)

    def find(self, session_id: str) -> LedgerSessionRow | None:
        """Return what is known of a session; CorruptedError when that cannot be read."""
        found = self._select(
            f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE session_id = ?", session_id
        )
        return rows.read_session_row(found[0]) if found else None

    def unfinished(self) -> list[str]:
        """Return the sessions that never said goodbye, or whose last words had no effect yet.

        In the order in which they came. Not those whose rank is lost for good: they are found when
        it comes back nevertheless.
        """
        closed, lost_us = SessionState.CLOSED.value, self._now_us() - int(LOST_AFTER_S * 1e6)
        found = self._select(
            "SELECT session_id FROM sessions AS s WHERE (state <> ?1 AND NOT EXISTS"
            " (SELECT 1 FROM away WHERE away.session_id = s.session_id AND since_us <= ?2))"
            " OR EXISTS (SELECT 1 FROM declarations WHERE declarations.session_id = s.session_id"
            f" AND {database.NOT_APPLIED_CONDITION}"
            " AND (s.state = ?1 OR kind NOT IN ('EventColumns', 'GraphPart')))"
            " ORDER BY opened_us, session_id",
            closed,
            lost_us,
        )
        return [str(session_id) for (session_id,) in found]

    def committed_beyond(self, session_id: str, watermark: int) -> list[int]:
        """Return the committed numbers above the watermark."""
        found = self._select(
            "SELECT sequence FROM records WHERE session_id = ?1 AND sequence > ?2"
            " UNION SELECT sequence FROM figures WHERE session_id = ?1 AND sequence > ?2"
            " UNION SELECT sequence FROM declarations WHERE session_id = ?1 AND sequence > ?2",
            session_id,
            watermark,
        )
        return [rows.read_number(sequence) for (sequence,) in found]

    def unapplied(
        self, session_id: str, after: int = 0, *, up_to: int = _MAX_SEQUENCE, limit: int = -1
    ) -> list[bytes]:
        """Return the declarations that have not taken effect for good, in order."""
        found = self._select(
            "SELECT body FROM declarations WHERE session_id = ? AND "
            f"{database.NOT_APPLIED_CONDITION}"
            " AND sequence > ? AND sequence <= ? ORDER BY sequence LIMIT ?",
            session_id,
            after,
            up_to,
            limit,
        )
        return [body for (body,) in found]

    def counts(self, session_id: str) -> list[OutcomeCountRow]:
        """Return what became of a session's tensors."""
        # Tensors that never came may be declared to be of any size: SUM fails over 63 bits.
        found = self._select(
            "SELECT iteration, fate, reason, COUNT(*), CAST(TOTAL(bytes_in) AS INTEGER),"
            " CAST(TOTAL(bytes_stored) AS INTEGER)"
            " FROM records WHERE session_id = ?1 GROUP BY iteration, fate, reason"
            " UNION ALL SELECT iteration, fate, '', CAST(TOTAL(kept) AS INTEGER), 0, 0"
            " FROM figures WHERE session_id = ?1 GROUP BY iteration, fate HAVING TOTAL(kept) > 0"
            " UNION ALL SELECT iteration, fate, reason, records, bytes_in, bytes_stored"
            " FROM tallies WHERE session_id = ?1",
            session_id,
        )
        counts = [OutcomeCountRow(row[0], RecordStatus(row[1]), *row[2:]) for row in found]
        return [*counts, *self._rejected(session_id)]

    def _rejected(self, session_id: str) -> list[OutcomeCountRow]:
        refused: Counter[tuple[int, str]] = Counter()
        for iteration, text in self._select(
            "SELECT iteration, refused FROM figures WHERE session_id = ? AND refused <> '{}'",
            session_id,
        ):
            for reason, places in json.loads(text).items():
                refused[iteration, reason] += len(places)
        return [
            OutcomeCountRow(iteration, RecordStatus.DROPPED, reason, count, 0, 0)
            for (iteration, reason), count in refused.items()
        ]

    def ends(self, session_id: str) -> list[IterationEndRow]:
        """Return the ends of iterations that have taken effect."""
        found = self._select(
            "SELECT iteration, expected, dropped, stall_us, first_position, last_position"
            " FROM iterations WHERE session_id = ?",
            session_id,
        )
        return [
            IterationEndRow(iteration, expected, json.loads(text), *rest)
            for iteration, expected, text, *rest in found
        ]

    def kept(self, session_id: str, iteration: int) -> list[StoredRecord | StoredStatisticRows]:
        """Return every tensor of an iteration that is in the tree, in the order of the frames."""
        # As one row: sqlite gives up the interpreter's lock at every row, and thousands of times
        # to wait for it again cost more than all the reading.
        ((records,),) = self._select(
            f"SELECT json_group_array(json_array({rows.KEPT_COLUMNS})) FROM records"
            " WHERE session_id = ? AND iteration = ? AND fate <> ?",
            session_id,
            iteration,
            RecordStatus.DROPPED.value,
        )
        frames = self._select(
            f"SELECT {rows.FRAME_COLUMNS} FROM figures WHERE session_id = ? AND iteration = ?"
            " AND kept > 0",
            session_id,
            iteration,
        )
        found = [
            *map(rows.read_stored_record, json.loads(records)),
            *map(rows.read_stored_rows, frames),
        ]
        return sorted(found, key=lambda each: each.sequence)

    def members(self, session_id: str, iteration: int, *, before: int) -> list[OperatorMember]:
        """Return the tensors of an iteration that have a `bin` file of their own, or had one.

        Only those with a number before that one: of others not all are here yet.
        """
        ((found,),) = self._select(
            f"SELECT json_group_array(json_array({rows.MEMBER_COLUMNS})) FROM records"
            " WHERE session_id = ? AND iteration = ? AND whole <> '' AND sequence < ?",
            session_id,
            iteration,
            before,
        )
        return [*map(rows.read_operator_member, json.loads(found))]

    def table_rows(
        self, session_id: str, *, after: int, up_to: int
    ) -> tuple[list[StoredTableRow | StoredStatisticRows], int]:
        """Return what comes next in tables of figures, and up to which number that is all of it."""
        query = (
            "SELECT sequence, row_table, row, 1, NULL, '' FROM records"
            " WHERE session_id = ?1 AND sequence > ?2 AND sequence <= ?3 AND row <> ''"
            " UNION ALL SELECT sequence, '', '', kept, body, refused FROM figures"
            " WHERE session_id = ?1 AND sequence > ?2 AND sequence <= ?3 AND kept > 0"
            " ORDER BY sequence"
        )
        found: list[StoredTableRow | StoredStatisticRows] = []
        count = 0
        with self._lock, self._noticing_damage():
            # Not all at once: rows that had to wait for their disk may be more than memory holds.
            for sequence, table, text, kept, body, refused in self._base.execute(
                query, (session_id, after, up_to)
            ):
                row = StoredTableRow(sequence, StatisticTableRow(rows.parse_row_place(table), text))
                found.append(rows.read_stored_rows((sequence, body, refused)) if body else row)
                count += kept
                if count >= MAX_READ_ROWS:
                    return found, sequence
        return found, up_to

    def last_end(self, session_id: str) -> int:
        """Return the number of the last end of an iteration that has taken effect, or 0."""
        query = "SELECT MAX(sequence) FROM iterations WHERE session_id = ?"
        ((sequence,),) = self._select(query, session_id)
        return rows.read_number(sequence or 0)

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._lock, self._noticing_damage():
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _noticing_damage(self) -> Generator[None]:
        """Notice that the file is not what SQLite wrote; UnavailableError then."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if not state_files.is_corrupted_database(error):
                raise
            if not self.damage:
                self.damage = f"{self._name} is damaged: {error}"
                self.on_damage()
            raise UnavailableError(self.damage) from None

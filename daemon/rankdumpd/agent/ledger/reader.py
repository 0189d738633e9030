"""Read access to the ledger of an agent: sessions, counts and stored records of an iteration.
Damage to the file is detected here.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

from rankdump._core.session_protocol import IterationEnd
from rankdump._core.status import SessionState
from rankdump.errors import CorruptedError, UnavailableError
from rankdumpd.agent.ledger import database, rows
from rankdumpd.agent.ledger.rows import (
    LedgerSessionRow,
    OutcomeCountRow,
    StoredRecord,
    StoredStatisticRows,
)
from rankdumpd.agent.records import OperatorMember, RecordStatus, StatisticTableRow
from rankdumpd.server import state_files

MAX_READ_ROWS = 4096
LOST_AFTER_S = 86_400.0
"""Seconds after which a lost rank is not expected any more; if it returns, its session is still
found.
"""
DAMAGE_REMEDY = "`rankdumpd rebuild` makes a new one from a tree"
_MAX_SEQUENCE = (1 << 63) - 1


class LedgerReader:
    """Reads the rows of all sessions; safe to use from several threads, one at a time."""

    def __init__(self, base: sqlite3.Connection, name: str, now_us: Callable[[], int]) -> None:
        self._base, self._name, self._now_us = base, name, now_us
        self._lock = threading.Lock()
        self.damage = ""
        """Why the file counts as damaged; empty when it is not damaged."""
        self.on_damage: Callable[[], None] = lambda: None
        """Called when damage is detected; may be called in any thread."""

    def check(self) -> None:
        """Raise a CorruptedError when damage to the file was detected."""
        if self.damage:
            raise CorruptedError(self.damage)

    def find(self, session_id: str) -> LedgerSessionRow | None:
        """Return the row of a session; CorruptedError when it cannot be read."""
        found = self._select(
            f"SELECT {rows.SESSION_COLUMNS} FROM sessions WHERE session_id = ?", session_id
        )
        return rows.read_session_row(found[0]) if found else None

    def unfinished(self) -> list[str]:
        """Return the sessions that have not ended or have pending metadata, in the order of their
        opening.

        Sessions whose rank was lost a day ago or earlier are left out; `find` returns them when the
        rank returns.
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
        """Return the committed sequence numbers above the watermark."""
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
        """Return the metadata frames that are not applied yet, in order."""
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

    def changed_plans(self, session_id: str) -> list[bytes]:
        """Return the frames that changed the plan of a session, in order."""
        found = self._select(
            "SELECT body FROM declarations WHERE session_id = ? AND kind = ? ORDER BY sequence",
            session_id,
            rows.CHANGED_PLAN_KIND,
        )
        return [body for (body,) in found]

    def counts(self, session_id: str) -> list[OutcomeCountRow]:
        """Return the outcomes of a session's tensors, counted by iteration and reason."""
        # TOTAL and not SUM, which fails over 63 bits, because tensors that never arrived may
        # declare any size.
        found = self._select(
            "SELECT iteration, fate, reason, COUNT(*), CAST(TOTAL(bytes_in) AS INTEGER),"
            " CAST(TOTAL(bytes_stored) AS INTEGER)"
            " FROM records WHERE session_id = ?1 GROUP BY iteration, fate, reason"
            " UNION ALL SELECT iteration, fate, reason, CAST(TOTAL(kept) AS INTEGER), 0, 0"
            " FROM figures WHERE session_id = ?1 GROUP BY iteration, fate, reason"
            " HAVING TOTAL(kept) > 0"
            " UNION ALL SELECT iteration, fate, reason, records, bytes_in, bytes_stored"
            " FROM tallies WHERE session_id = ?1",
            session_id,
        )
        counts = [OutcomeCountRow(row[0], RecordStatus(row[1]), *row[2:]) for row in found]
        return [*counts, *self._count_rejected(session_id)]

    def _count_rejected(self, session_id: str) -> list[OutcomeCountRow]:
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

    def ends(self, session_id: str) -> list[IterationEnd]:
        """Return the ends of iterations that are applied."""
        found = self._select(
            "SELECT iteration, expected, dropped, stall_us, first_position, last_position"
            " FROM iterations WHERE session_id = ?",
            session_id,
        )
        return [
            IterationEnd(iteration, expected, json.loads(text), *rest)
            for iteration, expected, text, *rest in found
        ]

    def kept(self, session_id: str, iteration: int) -> list[StoredRecord | StoredStatisticRows]:
        """Return the tensors of an iteration that are in the tree, in the order of their frames."""
        # The result is one row, because sqlite3 releases the GIL at every row, and acquiring it
        # thousands of times costs more than reading.
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
        return sorted(found, key=attrgetter("sequence"))

    def members(self, session_id: str, iteration: int, *, before: int) -> list[OperatorMember]:
        """Return the tensors of an iteration that have or had a `bin` file of their own.

        Only frames with a number below `before`, because later frames may not all have arrived.
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
    ) -> tuple[list[StatisticTableRow | StoredStatisticRows], int]:
        """Return the next rows for tables of statistics, and the sequence number up to which they
        go.
        """
        query = (
            "SELECT sequence, row_table, row, 1, NULL, '' FROM records"
            " WHERE session_id = ?1 AND sequence > ?2 AND sequence <= ?3 AND row <> ''"
            " UNION ALL SELECT sequence, '', '', kept, body, refused FROM figures"
            " WHERE session_id = ?1 AND sequence > ?2 AND sequence <= ?3 AND kept > 0"
            " ORDER BY sequence"
        )
        found: list[StatisticTableRow | StoredStatisticRows] = []
        count = 0
        with self._lock, self._detect_damage():
            # In batches, because the rows that accumulated while a disk was full may exceed the
            # memory.
            for sequence, table, text, kept, body, refused in self._base.execute(
                query, (session_id, after, up_to)
            ):
                row = StatisticTableRow(rows.parse_row_place(table), text)
                found.append(rows.read_stored_rows((sequence, body, refused)) if body else row)
                count += kept
                if count >= MAX_READ_ROWS:
                    return found, sequence
        return found, up_to

    def last_end(self, session_id: str) -> int:
        """Return the sequence number of the last iteration end that is applied; 0 if
        there is none.
        """
        query = "SELECT MAX(sequence) FROM iterations WHERE session_id = ?"
        ((sequence,),) = self._select(query, session_id)
        return rows.read_number(sequence or 0)

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._lock, self._detect_damage():
            return self._base.execute(query, values).fetchall()

    @contextmanager
    def _detect_damage(self) -> Generator[None]:
        """Raise an UnavailableError and remember the damage when the block finds the
        file damaged.
        """
        try:
            yield
        except sqlite3.DatabaseError as error:
            if not state_files.is_corrupted_database(error):
                raise
            if not self.damage:
                self.damage = f"{self._name} is damaged: {error}; {DAMAGE_REMEDY}"
                self.on_damage()
            raise UnavailableError(self.damage) from None

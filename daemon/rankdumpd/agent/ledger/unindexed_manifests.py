"""Manifests that were written, changed or removed since the tensor table had their rows, oldest
first.

A row is entered in the transaction that enters the change, and deleted after the table's file has
its final name. A crash between the two leaves a row whose manifest is found to be in the table.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rankdumpd.agent.ledger.database import LedgerTransaction, RowQuery

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

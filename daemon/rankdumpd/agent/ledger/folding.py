"""Rows of iterations that are over, folded into their sums: status and balances stay as they are.

Nothing is folded that a restart would need: only rows up to the end of an iteration whose manifest
is in the tree, and the session's watermark then says that their numbers are known.
"""

from __future__ import annotations

import sqlite3

from rankdump.contract.status import SessionState
from rankdumpd.agent.ledger import queries

KEEP_S = 86_400.0
"""Rows of a session stay for a day after its goodbye, or after its rank was lost."""
AT_ONCE = 4096
"""Rows that one transaction folds: commits of others wait as long."""

_OVER = """
session_id = ?1 AND sequence <= (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1)
AND iteration IN (SELECT iteration FROM iterations WHERE session_id = ?1)
"""
_FIRST = f"""
SELECT MAX(sequence) FROM (SELECT sequence FROM {{table}} WHERE {_OVER} AND (?2 < 0
OR iteration = ?2) ORDER BY sequence LIMIT ?3)
"""
_ADD = """
ON CONFLICT (session_id, iteration, fate, reason) DO UPDATE SET
records = records + excluded.records, bytes_in = bytes_in + excluded.bytes_in,
bytes_stored = bytes_stored + excluded.bytes_stored
"""
_THOSE = f"{_OVER} AND (?2 < 0 OR iteration = ?2) AND sequence <= ?3"
# A row that is damaged is counted for what can be read of it: it must not keep others here.
_SUMS = {
    "records": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, reason, COUNT(*),"
        " CAST(TOTAL(bytes_in) AS INTEGER), CAST(TOTAL(bytes_stored) AS INTEGER)"
        f" FROM records WHERE {_THOSE}"
        f" GROUP BY session_id, iteration, fate, reason {_ADD}",
    ),
    "figures": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, '',"
        " CAST(TOTAL(kept) AS INTEGER), 0, 0"
        f" FROM figures WHERE {_THOSE} AND kept > 0 GROUP BY session_id, iteration, fate {_ADD}",
        "INSERT INTO tallies SELECT session_id, iteration, 'dropped', key,"
        " SUM(CASE type WHEN 'array' THEN json_array_length(value) ELSE 0 END), 0, 0"
        " FROM figures, json_each(CASE WHEN json_valid(refused) THEN refused ELSE '{}' END)"
        f" WHERE {_THOSE} GROUP BY session_id, iteration, key {_ADD}",
    ),
}
_RAISE = """
UPDATE sessions SET watermark = MAX(watermark, COALESCE(
    (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1), 0)) WHERE session_id = ?1
"""
_DECLARATIONS = f"""
DELETE FROM declarations WHERE session_id = ?1 AND sequence IN (
    SELECT sequence FROM declarations WHERE session_id = ?1 AND NOT ({queries.NOT_APPLIED})
    AND sequence <= (SELECT watermark FROM sessions WHERE session_id = ?1)
    AND NOT EXISTS (SELECT 1 FROM log WHERE log.session_id = ?1
        AND log.sequence = declarations.sequence)
    ORDER BY sequence LIMIT ?2)
"""
NEXT = "SELECT session_id FROM away WHERE NOT folded AND since_us <= ? LIMIT 1"
"""A session of which no more is to be expected since then, and that has rows left."""
_CLOSED_BEFORE = f"""
INSERT OR IGNORE INTO away SELECT session_id, ?, 0 FROM sessions
WHERE state = '{SessionState.CLOSED.value}'
"""

GIVE_BACK = "PRAGMA incremental_vacuum(1024)"
"""Pages that are free go back to the disk, those of so many rows and some more."""


def note_closed(base: sqlite3.Connection, now_us: int) -> None:
    """Note since when sessions are closed of which nobody knows it."""
    base.execute(_CLOSED_BEFORE, (now_us,))


def fold(base: sqlite3.Connection, session_id: str, iteration: int = -1) -> bool:
    """Fold some rows of an iteration, or of all that are over; return whether there were any."""
    base.execute(_RAISE, (session_id,))
    for table, sums in _SUMS.items():
        query = _FIRST.format(table=table)
        ((last,),) = base.execute(query, (session_id, iteration, AT_ONCE)).fetchall()
        if last is not None:
            those = (session_id, iteration, last)
            for query in sums:
                base.execute(query, those)
            base.execute(f"DELETE FROM {table} WHERE {_THOSE}", those)
            return True
    return False


def fold_session(base: sqlite3.Connection, session_id: str) -> None:
    """Fold some rows of a session, and note when none are left."""
    if fold(base, session_id):
        return
    if base.execute(_DECLARATIONS, (session_id, AT_ONCE)).rowcount < AT_ONCE:
        base.execute("UPDATE away SET folded = 1 WHERE session_id = ?", (session_id,))

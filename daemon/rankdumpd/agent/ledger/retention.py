"""Rows that the ledger gives up: those of iterations that are over, folded into their sums, and
iterations that are retired from their trees, with the pins that keep others.

Nothing is folded that a restart would need: only rows up to the end of an iteration whose
manifest is in the tree; status and balances stay as they are. A row of `retired` is entered
before the first file goes, and marked as done after the last one went: what a crash leaves is
finished by the next process.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

from rankdump._core.status import SessionState
from rankdumpd.agent.ledger import database
from rankdumpd.agent.ledger.database import LedgerTransaction, open_ledger_for_reading
from rankdumpd.agent.ledger.rows import EndedIteration, IterationRemoval
from rankdumpd.agent.records import UsageChange

MAX_RETIRED_ITERATIONS = 256
"""Iterations that are looked at in one pass, oldest first."""

_JOB_ID = """
CASE WHEN json_valid(request) THEN CASE json_type(request, '$.job_id')
    WHEN 'text' THEN json_extract(request, '$.job_id') END END
"""
_ROOT = """
CASE WHEN json_valid(CAST(plan AS TEXT)) THEN
    CASE json_type(CAST(plan AS TEXT), '$.output.root')
    WHEN 'text' THEN json_extract(CAST(plan AS TEXT), '$.output.root') END END
"""
_JOBS = f"""
WITH jobs AS MATERIALIZED (
    SELECT s.session_id, {_JOB_ID} AS job_id,
        NOT EXISTS (SELECT 1 FROM away AS a WHERE a.session_id = s.session_id) AS live
    FROM sessions AS s
)
"""
_OLDEST = f"""{_JOBS}, begun AS MATERIALIZED (
    SELECT job_id, MIN(COALESCE(
        (SELECT MAX(iteration) FROM iterations AS i WHERE i.session_id = jobs.session_id), -1))
        AS newest
    FROM jobs WHERE live AND (
        EXISTS (SELECT 1 FROM records AS r WHERE r.session_id = jobs.session_id)
        OR EXISTS (SELECT 1 FROM figures AS f WHERE f.session_id = jobs.session_id)
        OR EXISTS (SELECT 1 FROM tallies AS t WHERE t.session_id = jobs.session_id))
    GROUP BY job_id
)
SELECT jobs.job_id, i.iteration, MAX(i.ended_us) AS ended FROM iterations AS i
JOIN jobs USING (session_id) LEFT JOIN begun USING (job_id)
WHERE jobs.job_id IS NOT NULL AND i.iteration < COALESCE(begun.newest, i.iteration + 1)
    AND jobs.job_id NOT IN (SELECT job_id FROM pins)
    AND NOT EXISTS (SELECT 1 FROM retired AS r
        WHERE r.session_id = i.session_id AND r.iteration = i.iteration)
GROUP BY jobs.job_id, i.iteration ORDER BY ended, i.iteration LIMIT ?
"""
"""Of a job whose ranks are here only what all of them have left behind them."""
_PARTS = f"""{_JOBS}
SELECT DISTINCT session_id FROM iterations JOIN jobs USING (session_id)
WHERE job_id = ?1 AND iteration = ?2 AND NOT EXISTS (SELECT 1 FROM retired AS r
    WHERE r.session_id = iterations.session_id AND r.iteration = ?2)
"""
_NEWER = """
session_id = jobs.session_id AND iteration = ?2 AND sequence > COALESCE((SELECT MAX(sequence)
    FROM iterations AS i WHERE i.session_id = jobs.session_id AND i.iteration = ?2), 0)
"""
_OPEN = f"""{_JOBS}
SELECT 1 FROM jobs WHERE job_id = ?1 AND live AND (
    EXISTS (SELECT 1 FROM records WHERE {_NEWER})
    OR EXISTS (SELECT 1 FROM figures WHERE {_NEWER})) LIMIT 1
"""
_STORED_BYTES = f"""
SELECT {_JOB_ID} AS job_id, {_ROOT} AS root, CAST(
    (SELECT TOTAL(bytes_stored) FROM records AS r WHERE r.session_id = s.session_id)
    + (SELECT TOTAL(bytes_stored) FROM tallies AS t WHERE t.session_id = s.session_id)
    - (SELECT TOTAL(bytes) FROM retired AS g WHERE g.session_id = s.session_id) AS INTEGER)
FROM sessions AS s WHERE job_id IS NOT NULL AND root IS NOT NULL
"""
"""With TOTAL, for SUM fails over 63 bits, as one damaged number is."""
_RETIRED = f"""{_JOBS}
SELECT job_id, COUNT(*) FROM retired JOIN jobs USING (session_id)
WHERE done AND job_id IS NOT NULL GROUP BY job_id
"""
_COLUMNS = "session_id, iteration, bytes, began_us, status"
_UNFINISHED = f"SELECT {_COLUMNS} FROM retired WHERE NOT done"


class _RowQuery(Protocol):
    def __call__(self, query: str, *values: str | int) -> list[tuple[Any, ...]]: ...


class RetiredIterations:
    """Pins and retired iterations of one ledger; safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        select: _RowQuery,
        transaction: LedgerTransaction,
        now_us: Callable[[], int],
    ) -> None:
        self._ledger_select, self._transaction, self._now_us = select, transaction, now_us
        # Of its own: looking for what is old must not keep frames from being committed.
        self._reading = threading.Lock()
        self._base = open_ledger_for_reading(path)
        with transaction() as base:
            # Of those that ended before anybody noted when, nobody knows it better.
            base.execute("UPDATE iterations SET ended_us = ? WHERE ended_us = 0", (now_us(),))
        self._pins = frozenset(job_id for (job_id,) in select("SELECT job_id FROM pins"))

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._base.close()

    def pin(self, job_id: str, pinned: bool) -> None:
        """Keep the iterations of a job, or no longer; repeating it changes nothing."""
        with self._transaction(synced=True) as base:
            if pinned:
                base.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (job_id, self._now_us()))
            else:
                base.execute("DELETE FROM pins WHERE job_id = ?", (job_id,))
            found = base.execute("SELECT job_id FROM pins").fetchall()
        self._pins = frozenset(each for (each,) in found)

    @property
    def pins(self) -> frozenset[str]:
        """The jobs that are pinned."""
        return self._pins

    def list_usage(self) -> list[UsageChange]:
        """Return what the tensors of each session take in their tree."""
        found = self._ledger_select(_STORED_BYTES)
        return [UsageChange(job_id, str(Path(root)), size) for job_id, root, size in found]

    def counts(self) -> dict[str, int]:
        """Return how many iterations of ranks were removed, by job."""
        return dict(cast("list[tuple[str, int]]", self._ledger_select(_RETIRED)))

    def oldest(self) -> list[EndedIteration]:
        """Return iterations that may be removed, those that ended first in front."""
        return [EndedIteration(*row) for row in self._select(_OLDEST, MAX_RETIRED_ITERATIONS)]

    def parts(self, ended: EndedIteration) -> list[str]:
        """Return the sessions whose part of an iteration may be removed; none while any is open."""
        about = (ended.job_id, ended.iteration)
        if self._select(_OPEN, *about):
            return []
        return [session_id for (session_id,) in self._select(_PARTS, *about)]

    def unfinished(self) -> list[IterationRemoval]:
        """Return the parts whose removal began and is not done."""
        return [
            IterationRemoval(session_id, iteration, size, began_us, _parse_particulars(about))
            for session_id, iteration, size, began_us, about in self._select(_UNFINISHED)
        ]

    def begin_removals(self, parts: Iterable[IterationRemoval]) -> bool:
        """Enter parts before their files go; return whether that is done: not of a pinned job."""
        with self._transaction(synced=True) as base:
            for part in parts:
                pinned = base.execute(
                    "SELECT 1 FROM pins WHERE job_id = ?", (str(part.about["job"]),)
                ).fetchone()
                if pinned:
                    return False
                base.execute(
                    "INSERT OR IGNORE INTO retired VALUES (?, ?, ?, 0, ?, ?)",
                    (
                        part.session_id,
                        part.iteration,
                        part.began_us,
                        part.byte_count,
                        json.dumps(dict(part.about)),
                    ),
                )
        return True

    def finish_removal(self, part: IterationRemoval) -> None:
        """Note that the files of a part are gone."""
        with self._transaction() as base:
            base.execute(
                "UPDATE retired SET done = 1 WHERE session_id = ? AND iteration = ?",
                (part.session_id, part.iteration),
            )

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._base.execute(query, values).fetchall()


def _parse_particulars(text: str) -> dict[str, Any]:
    """Return the particulars of a removal; of a row that is damaged there are none."""
    try:
        found: object = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


ROW_RETENTION_S = 86_400.0
"""Rows of a session stay for a day after its goodbye, or after its rank was lost."""
MAX_FOLDED_ROWS = 4096
"""Rows that one transaction folds: commits of others wait as long."""

_OVER_CONDITION = """
session_id = ?1 AND sequence <= (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1)
AND iteration IN (SELECT iteration FROM iterations WHERE session_id = ?1)
"""
_LAST_OF_FIRST = f"""
SELECT MAX(sequence) FROM (SELECT sequence FROM {{table}} WHERE {_OVER_CONDITION} AND (?2 < 0
OR iteration = ?2) ORDER BY sequence LIMIT ?3)
"""
_ADD_TO_SUMS = """
ON CONFLICT (session_id, iteration, fate, reason) DO UPDATE SET
records = records + excluded.records, bytes_in = bytes_in + excluded.bytes_in,
bytes_stored = bytes_stored + excluded.bytes_stored
"""
_FOLDED_ROWS = f"{_OVER_CONDITION} AND (?2 < 0 OR iteration = ?2) AND sequence <= ?3"
# A row that is damaged is counted for what can be read of it: it must not keep others here.
_SUMS = {
    "records": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, reason, COUNT(*),"
        " CAST(TOTAL(bytes_in) AS INTEGER), CAST(TOTAL(bytes_stored) AS INTEGER)"
        f" FROM records WHERE {_FOLDED_ROWS}"
        f" GROUP BY session_id, iteration, fate, reason {_ADD_TO_SUMS}",
    ),
    "figures": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, '',"
        " CAST(TOTAL(kept) AS INTEGER), 0, 0"
        f" FROM figures WHERE {_FOLDED_ROWS} AND kept > 0 GROUP BY session_id, iteration, "
        f"fate {_ADD_TO_SUMS}",
        "INSERT INTO tallies SELECT session_id, iteration, 'dropped', key,"
        " SUM(CASE type WHEN 'array' THEN json_array_length(value) ELSE 0 END), 0, 0"
        " FROM figures, json_each(CASE WHEN json_valid(refused) THEN refused ELSE '{}' END)"
        f" WHERE {_FOLDED_ROWS} GROUP BY session_id, iteration, key {_ADD_TO_SUMS}",
    ),
}
_RAISE_WATERMARK = """
UPDATE sessions SET watermark = MAX(watermark, COALESCE(
    (SELECT MAX(sequence) FROM iterations WHERE session_id = ?1), 0)) WHERE session_id = ?1
"""
_DELETE_DECLARATIONS = f"""
DELETE FROM declarations WHERE session_id = ?1 AND sequence IN (
    SELECT sequence FROM declarations WHERE session_id = ?1
    AND NOT ({database.NOT_APPLIED_CONDITION})
    AND sequence <= (SELECT watermark FROM sessions WHERE session_id = ?1)
    AND NOT EXISTS (SELECT 1 FROM log WHERE log.session_id = ?1
        AND log.sequence = declarations.sequence)
    ORDER BY sequence LIMIT ?2)
"""
SELECT_NEXT_FOLD = "SELECT session_id FROM away WHERE NOT folded AND since_us <= ? LIMIT 1"
"""A session of which no more is to be expected since then, and that has rows left."""
_INSERT_CLOSED = f"""
INSERT OR IGNORE INTO away SELECT session_id, ?, 0 FROM sessions
WHERE state = '{SessionState.CLOSED.value}'
"""

VACUUM_PAGES = "PRAGMA incremental_vacuum(1024)"
"""Pages that are free go back to the disk, those of so many rows and some more."""


def note_closed_sessions(base: sqlite3.Connection, now_us: int) -> None:
    """Note since when sessions are closed of which nobody knows it."""
    base.execute(_INSERT_CLOSED, (now_us,))


def fold_rows(base: sqlite3.Connection, session_id: str, iteration: int = -1) -> bool:
    """Fold some rows of an iteration, or of all that are over; return whether there were any."""
    base.execute(_RAISE_WATERMARK, (session_id,))
    for table, sums in _SUMS.items():
        query = _LAST_OF_FIRST.format(table=table)
        ((last,),) = base.execute(query, (session_id, iteration, MAX_FOLDED_ROWS)).fetchall()
        if last is not None:
            those = (session_id, iteration, last)
            for query in sums:
                base.execute(query, those)
            base.execute(f"DELETE FROM {table} WHERE {_FOLDED_ROWS}", those)
            return True
    return False


def fold_session(base: sqlite3.Connection, session_id: str) -> None:
    """Fold some rows of a session, and note when none are left."""
    if fold_rows(base, session_id):
        return
    if base.execute(_DELETE_DECLARATIONS, (session_id, MAX_FOLDED_ROWS)).rowcount < MAX_FOLDED_ROWS:
        base.execute("UPDATE away SET folded = 1 WHERE session_id = ?", (session_id,))

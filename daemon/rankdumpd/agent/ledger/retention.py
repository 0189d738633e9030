"""Removal of rows from the ledger: rows of ended iterations are folded into sums, and iterations
are retired from their trees unless their job is pinned.

Rows that a restart would need are not folded: only rows up to the end of an iteration whose
manifest is in the tree are; status and balances stay as they are. A row of `retired` is entered
before the first file is removed, and marked as done after the last one, so that the next process
can finish a removal that a crash interrupted.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

from rankdump._core.status import SessionState
from rankdumpd.agent.ledger import database
from rankdumpd.agent.ledger.database import LedgerTransaction, RowQuery, open_ledger_for_reading
from rankdumpd.agent.ledger.deferred_work import UnindexedManifests, UnpackedFiles
from rankdumpd.agent.ledger.rows import CHANGED_PLAN_KIND, EndedIteration, IterationRemoval

MAX_RETIRED_ITERATIONS = 256
"""Largest number of iterations that one pass considers, oldest first."""

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
"""If a job has live ranks, only iterations that all of them have passed are selected."""
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
"""TOTAL and not SUM, which fails over 63 bits, because one damaged number can exceed them."""
_RETIRED = f"""{_JOBS}
SELECT job_id, COUNT(*) FROM retired JOIN jobs USING (session_id)
WHERE done AND job_id IS NOT NULL GROUP BY job_id
"""
_COLUMNS = "session_id, iteration, bytes, began_us, status"
_UNFINISHED = f"SELECT {_COLUMNS} FROM retired WHERE NOT done"


class RetiredIterations:
    """Pins and retired iterations of one ledger; safe to use from several threads."""

    def __init__(
        self,
        path: Path,
        select: RowQuery,
        transaction: LedgerTransaction,
        now_us: Callable[[], int],
        unpacked: UnpackedFiles,
        unindexed: UnindexedManifests,
    ) -> None:
        self._ledger_select, self._transaction, self._now_us = select, transaction, now_us
        self._unpacked, self._unindexed = unpacked, unindexed
        # A separate connection, because searching old iterations must not delay commits of frames.
        self._reading = threading.Lock()
        self._base = open_ledger_for_reading(path)
        with transaction() as base:
            # Older versions did not store when an iteration ended; for their iterations the present
            # time is used.
            base.execute("UPDATE iterations SET ended_us = ? WHERE ended_us = 0", (now_us(),))
        self.pins = frozenset(job_id for (job_id,) in select("SELECT job_id FROM pins"))
        """Ids of the pinned jobs."""

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._base.close()

    def pin(self, job_id: str, pinned: bool) -> None:
        """Pin a job, so that its iterations are kept, or unpin it; repeating the call changes
        nothing.
        """
        with self._transaction(synced=True) as base:
            if pinned:
                base.execute("INSERT OR IGNORE INTO pins VALUES (?, ?)", (job_id, self._now_us()))
            else:
                base.execute("DELETE FROM pins WHERE job_id = ?", (job_id,))
            found = base.execute("SELECT job_id FROM pins").fetchall()
        self.pins = frozenset(each for (each,) in found)

    def list_usage(self) -> list[tuple[str, str, int]]:
        """Return the job of each session, the root of its tree and the bytes of its tensors."""
        found = self._ledger_select(_STORED_BYTES)
        return [(job_id, str(Path(root)), size) for job_id, root, size in found]

    def counts(self) -> dict[str, int]:
        """Return the number of removed iterations of ranks, by job."""
        return dict(cast("list[tuple[str, int]]", self._ledger_select(_RETIRED)))

    def oldest(self) -> list[EndedIteration]:
        """Return iterations that may be removed, in the order in which they ended."""
        return [EndedIteration(*row) for row in self._select(_OLDEST, MAX_RETIRED_ITERATIONS)]

    def parts(self, ended: EndedIteration) -> list[str]:
        """Return the sessions whose part of an iteration may be removed; none while a
        part is open.
        """
        about = (ended.job_id, ended.iteration)
        if self._select(_OPEN, *about):
            return []
        return [session_id for (session_id,) in self._select(_PARTS, *about)]

    def unfinished(self) -> list[IterationRemoval]:
        """Return the parts whose removal has begun and is not finished."""
        return [
            IterationRemoval(session_id, iteration, size, began_us, _parse_particulars(about))
            for session_id, iteration, size, began_us, about in self._select(_UNFINISHED)
        ]

    def begin_removals(self, parts: Iterable[IterationRemoval]) -> bool:
        """Enter parts before their files are removed; return False for a pinned job."""
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
                self._unpacked.drop_iteration(base, part.session_id, part.iteration)
        return True

    def finish_removal(self, part: IterationRemoval) -> None:
        """Record that the files of a part are removed."""
        with self._transaction() as base:
            base.execute(
                "UPDATE retired SET done = 1 WHERE session_id = ? AND iteration = ?",
                (part.session_id, part.iteration),
            )
            self._unindexed.enter(base, part.session_id, part.iteration)

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._base.execute(query, values).fetchall()


def _parse_particulars(text: str) -> dict[str, Any]:
    """Return the details of a removal; none for a damaged row."""
    try:
        found: object = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


ROW_RETENTION_S = 86_400.0
"""Seconds for which rows of a session are kept after its end, or after its rank was lost."""
MAX_FOLDED_ROWS = 4096
"""Largest number of rows that one transaction folds, because commits of frames wait for it."""

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
# TOTAL and the JSON checks count only the readable columns of a damaged row, so that the row does
# not prevent folding others.
_SUMS = {
    "records": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, reason, COUNT(*),"
        " CAST(TOTAL(bytes_in) AS INTEGER), CAST(TOTAL(bytes_stored) AS INTEGER)"
        f" FROM records WHERE {_FOLDED_ROWS}"
        f" GROUP BY session_id, iteration, fate, reason {_ADD_TO_SUMS}",
    ),
    "figures": (
        "INSERT INTO tallies SELECT session_id, iteration, fate, reason,"
        " CAST(TOTAL(kept) AS INTEGER), 0, 0"
        f" FROM figures WHERE {_FOLDED_ROWS} AND kept > 0 GROUP BY session_id, iteration, "
        f"fate, reason {_ADD_TO_SUMS}",
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
    AND NOT ({database.NOT_APPLIED_CONDITION}) AND kind <> '{CHANGED_PLAN_KIND}'
    AND sequence <= (SELECT watermark FROM sessions WHERE session_id = ?1)
    AND NOT EXISTS (SELECT 1 FROM log WHERE log.session_id = ?1
        AND log.sequence = declarations.sequence)
    ORDER BY sequence LIMIT ?2)
"""
SELECT_NEXT_FOLD = """
SELECT session_id FROM away WHERE NOT folded AND since_us <= ? AND NOT EXISTS
    (SELECT 1 FROM unpacked WHERE unpacked.session_id = away.session_id) LIMIT 1
"""
"""Selects a session that ended before the given time and has rows left, but no file that is still
to be packed.
"""
INSERT_CLOSED_SESSIONS = f"""
INSERT OR IGNORE INTO away SELECT session_id, ?, 0 FROM sessions
WHERE state = '{SessionState.CLOSED.value}'
"""
"""Stores the present time for closed sessions without a time."""

VACUUM_PAGES = "PRAGMA incremental_vacuum(1024)"
"""Returns free pages to the disk: a few more than the folded rows occupied."""


def fold_rows(base: sqlite3.Connection, session_id: str, iteration: int = -1) -> bool:
    """Fold some rows of an iteration, or of all ended iterations; return whether there were any."""
    base.execute(_RAISE_WATERMARK, (session_id,))
    for table, sums in _SUMS.items():
        query = _LAST_OF_FIRST.format(table=table)
        ((last,),) = base.execute(query, (session_id, iteration, MAX_FOLDED_ROWS)).fetchall()
        if last is not None:
            folded = (session_id, iteration, last)
            for query in sums:
                base.execute(query, folded)
            base.execute(f"DELETE FROM {table} WHERE {_FOLDED_ROWS}", folded)
            return True
    return False


def fold_session(base: sqlite3.Connection, session_id: str) -> None:
    """Fold some rows of a session, and mark it as folded when none are left."""
    if fold_rows(base, session_id):
        return
    if base.execute(_DELETE_DECLARATIONS, (session_id, MAX_FOLDED_ROWS)).rowcount < MAX_FOLDED_ROWS:
        base.execute("UPDATE away SET folded = 1 WHERE session_id = ?", (session_id,))

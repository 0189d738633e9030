"""Which iterations are removed from their trees, and whose stay: pins, and rows of what is retired.

A row of `retired` stands before the first file goes, and is done after the last one went: what a
crash leaves is finished by the next process.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from rankdumpd.agent.ledger.connection import AS_TEXT
from rankdumpd.agent.usage import Taken
from rankdumpd.agent.values import Ended, Retiring

AT_ONCE = 256
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
_TAKEN = f"""
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


class _Transaction(Protocol):
    def __call__(self, *, synced: bool = ...) -> AbstractContextManager[sqlite3.Connection]: ...


class _Select(Protocol):
    def __call__(self, query: str, *values: str | int) -> list[tuple[Any, ...]]: ...


class Retention:
    """Pins and retired iterations of one ledger; safe to use from several threads."""

    def __init__(
        self, path: Path, select: _Select, transaction: _Transaction, now_us: Callable[[], int]
    ) -> None:
        self._whole_select, self._transaction, self._now_us = select, transaction, now_us
        # Of its own: looking for what is old must not keep frames from being committed.
        self._reading = threading.Lock()
        self._base = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        self._base.text_factory = AS_TEXT
        with transaction() as base:
            # Of those that ended before anybody noted when, nobody knows it better.
            base.execute("UPDATE iterations SET ended_us = ? WHERE ended_us = 0", (now_us(),))
        self._pins = frozenset(job_id for (job_id,) in select("SELECT job_id FROM pins"))

    def close(self) -> None:
        """Let go of the file."""
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

    def taken(self) -> list[Taken]:
        """Return what the tensors of each session take in their tree."""
        found = self._whole_select(_TAKEN)
        return [Taken(job_id, str(Path(root)), size) for job_id, root, size in found]

    def counts(self) -> dict[str, int]:
        """Return how many iterations of ranks were removed, by job."""
        return dict(cast("list[tuple[str, int]]", self._whole_select(_RETIRED)))

    def oldest(self) -> list[Ended]:
        """Return iterations that may be removed, those that ended first in front."""
        return [Ended(*row) for row in self._select(_OLDEST, AT_ONCE)]

    def parts(self, ended: Ended) -> list[str]:
        """Return the sessions whose part of an iteration may be removed; none while any is open."""
        about = (ended.job_id, ended.iteration)
        if self._select(_OPEN, *about):
            return []
        return [session_id for (session_id,) in self._select(_PARTS, *about)]

    def unfinished(self) -> list[Retiring]:
        """Return the parts whose removal began and is not done."""
        return [
            Retiring(session_id, iteration, size, began_us, _about(about))
            for session_id, iteration, size, began_us, about in self._select(_UNFINISHED)
        ]

    def begin(self, parts: Iterable[Retiring]) -> bool:
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

    def done(self, part: Retiring) -> None:
        """Note that the files of a part are gone."""
        with self._transaction() as base:
            base.execute(
                "UPDATE retired SET done = 1 WHERE session_id = ? AND iteration = ?",
                (part.session_id, part.iteration),
            )

    def _select(self, query: str, *values: str | int) -> list[tuple[Any, ...]]:
        with self._reading:
            return self._base.execute(query, values).fetchall()


def _about(text: str) -> dict[str, Any]:
    """Return the particulars of a removal; of a row that is damaged there are none."""
    try:
        found: object = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}

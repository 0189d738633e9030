"""The report log: numbered items for the coordinator, kept in the ledger until the coordinator has
stored them. No number is ever used for two items, even after a power loss.

Events are not stored a second time: their item refers to the metadata frame, whose body is kept.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rankdump._core.events import EventColumns
from rankdump._core.status import IterationStatus, SessionStatus
from rankdump._core.timeouts import RankTimeouts
from rankdumpd.agent.ledger import database
from rankdumpd.agent.ledger.database import LedgerTransaction, open_ledger_for_reading
from rankdumpd.agent.ledger.rows import ReportItem, ReportItemKind
from rankdumpd.agent.records import FrameId, MetadataFrame

NUMBER_GAP = 1 << 32
"""Numbers that are skipped where some may have been lost; no process loses more. 63 bits have room
for two billion such gaps.
"""

_SET_NUMBER = "UPDATE sqlite_sequence SET seq = ? WHERE name = 'log'"


def _read_newest(base: sqlite3.Connection) -> int:
    found = base.execute("SELECT seq FROM sqlite_sequence WHERE name = 'log'").fetchone()
    return found[0] if found else 0


MAX_READ_ITEMS = 64
MAX_READ_BYTES = 4 << 20
_ITEM_BYTES = 128
"""Bytes that an item occupies besides its body."""


class ReportLog:
    """The report log of one ledger; safe to use from several threads.

    Items about frames are entered in the same transaction as the frames, so each is entered exactly
    once.
    """

    def __init__(self, path: Path, transaction: LedgerTransaction, *, max_bytes: int) -> None:
        """The log keeps at most `max_bytes`; 0 without a coordinator."""
        self._transaction = transaction
        self._max_bytes = max_bytes
        self._held_bytes: int | None = None
        # A separate connection, because reading megabytes must not delay commits of frames.
        self._reading = threading.Lock()
        self._base = open_ledger_for_reading(path)
        self.newest = 0
        """Number of the last item that this process entered or tried to enter."""
        with transaction(synced=True) as base:
            base.execute(database.INSERT_REPORTING)
            newest = _read_newest(base)
            if max_bytes and newest:
                # Continue above every number that an earlier process may have used.
                base.execute(_SET_NUMBER, (newest + NUMBER_GAP,))

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._base.close()

    def forget_counts(self) -> None:
        """Compute the size of the log again at the next use, because a transaction was
        rolled back.
        """
        self._held_bytes = None

    def enter_declared(self, base: sqlite3.Connection, declared: Iterable[MetadataFrame]) -> None:
        """Enter items for the events and timeouts in frames, before the frames themselves."""
        for each in declared:
            if isinstance(each.declaration, EventColumns):
                self._enter_frame(base, ReportItemKind.EVENTS, each, events=len(each.declaration))
            elif isinstance(each.declaration, RankTimeouts):
                _forget_timeouts(base, each.frame_id.session_id)
                self._held_bytes = None
                self._enter_frame(base, ReportItemKind.TIMEOUTS, each)

    def enter_balance(
        self, base: sqlite3.Connection, frame_id: FrameId, status: IterationStatus
    ) -> None:
        """Enter the balance of an iteration, after all events of the iteration."""
        body = asdict(status) | {"dropped": dict(status.dropped)}
        self._enter(base, ReportItemKind.BALANCE, frame_id, json.dumps(body).encode())

    def enter_session(self, status: SessionStatus, root: str) -> None:
        """Enter the status of a session and the root of its tree.

        Of several statuses that are not reported yet, only the first, which must precede the
        events, and the last are kept.
        """
        frame_id = FrameId(status.session_id, 0)
        body = json.dumps({"root": root, "status": asdict(status)}).encode()
        with self._transaction() as base:
            base.execute(
                "DELETE FROM log WHERE session_id = ?1 AND sequence = 0 AND number >"
                " (SELECT MIN(number) FROM log WHERE session_id = ?1 AND sequence = 0)",
                (status.session_id,),
            )
            self._held_bytes = None
            self._enter(base, ReportItemKind.SESSION, frame_id, body)

    def reenter_timeouts(self, session_id: str) -> None:
        """Enter a session's newest timeouts again, for a coordinator that lost them."""
        with self._transaction() as base:
            found = base.execute(database.SELECT_NEWEST_TIMEOUTS, (session_id,)).fetchall()
            for (sequence,) in found:
                self._enter(base, ReportItemKind.TIMEOUTS, FrameId(session_id, sequence), b"")

    def acknowledged(self, number: int) -> None:
        """Remove the items up to a number, because the coordinator has stored them."""
        with self._transaction() as base:
            base.execute("UPDATE reporting SET acknowledged = MAX(acknowledged, ?)", (number,))
            self._remove(base, 0, number)

    def begin_after(self, number: int) -> int:
        """Renumber all items to numbers above `number`, unless the newest has reached it; return
        how many.

        All items are reported again, because it is not known which of them the coordinator has.
        """
        with self._transaction() as base:
            newest = _read_newest(base)
            if newest >= number:
                return 0
            if not newest:
                base.execute("INSERT INTO sqlite_sequence VALUES ('log', 0)")
            # One statement renumbers all items, so that no new number equals an old one.
            moved = base.execute("UPDATE log SET number = number + ?", (number,)).rowcount
            base.execute(_SET_NUMBER, (number + newest,))
            return moved

    def give_up(self, first: int, last: int) -> None:
        """Drop items that the coordinator rejects, and count them as lost."""
        with self._transaction() as base:
            self._give_up(base, first, last)

    def items(self, after: int) -> list[ReportItem]:
        """Return the next batch of items after a number; empty when there are none."""
        with self._reading:
            found = self._base.execute(
                database.SELECT_NEXT_ITEMS, (after, MAX_READ_ITEMS, MAX_READ_BYTES)
            )
            ((heads, bodies),) = found.fetchall()
        items: list[ReportItem] = []
        start = 0
        for number, kind, session_id, job_id, rank, events, size in json.loads(heads):
            body = bodies[start : start + size]
            items.append(
                ReportItem(number, ReportItemKind(kind), session_id, job_id, rank, events, body)
            )
            start += size
        return sorted(items, key=lambda item: item.number)

    def waiting(self, after: int) -> tuple[int, int]:
        """Return how many items follow a number, and how many events they contain."""
        count, events = self._select_row(
            "SELECT COUNT(*), COALESCE(SUM(events), 0) FROM log WHERE number > ?", after
        )
        return count, events

    def last(self) -> int:
        """Return the number of the last item; 0 when the log is empty."""
        return self._select_row("SELECT COALESCE(MAX(number), 0) FROM log")[0]

    def lost(self) -> tuple[int, int]:
        """Return how many events and how many other items have been dropped in total."""
        events, states = self._select_row("SELECT lost_events, lost_states FROM reporting")
        return events, states

    def agent_id(self) -> str:
        """Return the id of this ledger; item numbers are unique for each id."""
        return self._select_row("SELECT agent_id FROM reporting")[0]

    def acknowledged_to(self) -> int:
        """Return the highest number up to which the coordinator has acknowledged everything."""
        return self._select_row("SELECT acknowledged FROM reporting")[0]

    def _select_row(self, query: str, *values: int) -> tuple[Any, ...]:
        with self._reading:
            return self._base.execute(query, values).fetchone()

    def _enter_frame(
        self,
        base: sqlite3.Connection,
        kind: ReportItemKind,
        declared: MetadataFrame,
        *,
        events: int = 0,
    ) -> None:
        if not self._max_bytes:
            return
        frame_id = declared.frame_id
        where = (frame_id.session_id, frame_id.sequence)
        query = "SELECT 1 FROM declarations WHERE session_id = ? AND sequence = ?"
        if not base.execute(query, where).fetchone():
            self._enter(base, kind, frame_id, b"", events=events, kept_bytes=len(declared.raw))

    def _enter(
        self,
        base: sqlite3.Connection,
        kind: ReportItemKind,
        frame_id: FrameId,
        body: bytes,
        *,
        events: int = 0,
        kept_bytes: int = 0,
    ) -> None:
        if not self._max_bytes:
            return
        size = _ITEM_BYTES + len(body) + kept_bytes
        held = self._free_space(base, size)
        done = base.execute(
            "INSERT INTO log (session_id, sequence, kind, events, bytes, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (frame_id.session_id, frame_id.sequence, kind.value, events, size, body),
        )
        self._held_bytes = held + size
        self.newest = done.lastrowid or 0

    def _free_space(self, base: sqlite3.Connection, size: int) -> int:
        """Drop the oldest events, then the oldest balances; return the remaining bytes."""
        while (held := self._get_held_bytes(base)) + size > self._max_bytes:
            oldest = (
                number
                for kind in (ReportItemKind.EVENTS, ReportItemKind.BALANCE)
                for (number,) in base.execute(
                    "SELECT MIN(number) FROM log WHERE kind = ?", (kind.value,)
                )
                if number
            )
            number = next(oldest, 0)
            if not number:
                break
            self._give_up(base, number, number)
        return held

    def _get_held_bytes(self, base: sqlite3.Connection) -> int:
        if self._held_bytes is None:
            ((held,),) = base.execute("SELECT COALESCE(SUM(bytes), 0) FROM log").fetchall()
            self._held_bytes = int(held)
        return self._held_bytes

    def _give_up(self, base: sqlite3.Connection, first: int, last: int) -> None:
        base.execute(
            "UPDATE reporting SET (lost_events, lost_states) ="
            " (SELECT lost_events + COALESCE(SUM(events), 0),"
            " lost_states + COALESCE(SUM(kind <> 'events'), 0)"
            " FROM log WHERE number BETWEEN ? AND ?)",
            (first, last),
        )
        self._remove(base, first, last)

    def _remove(self, base: sqlite3.Connection, first: int, last: int) -> None:
        between = (first, last)
        ((size,),) = base.execute(
            "SELECT COALESCE(SUM(bytes), 0) FROM log WHERE number BETWEEN ? AND ?", between
        ).fetchall()
        base.execute(database.CLEAR_REPORTED_EVENTS, between)
        base.execute("DELETE FROM log WHERE number BETWEEN ? AND ?", between)
        self._held_bytes = self._get_held_bytes(base) - size


def _forget_timeouts(base: sqlite3.Connection, session_id: str) -> None:
    """Remove earlier timeouts of a session, because the new ones are complete."""
    base.execute("DELETE FROM log WHERE session_id = ? AND kind = 'timeouts'", (session_id,))
    base.execute(
        "UPDATE declarations SET body = x'' WHERE session_id = ? AND kind = 'Timeouts'"
        " AND applied = 1",
        (session_id,),
    )

"""The report log: numbered items for the coordinator, which stay in the ledger until it has them
for good. A number is never given to two items, whatever a power loss took.

Events are not written a second time: their item points at the metadata frame, whose body stays.
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
"""More items than can be lost with one process; there is room for two billion gaps."""

_SET_NUMBER = "UPDATE sqlite_sequence SET seq = ? WHERE name = 'log'"


def leave_number_gap(base: sqlite3.Connection) -> None:
    """Go on behind any number that an earlier process can have given; to be synced."""
    newest = _read_newest(base)
    if newest:
        base.execute(_SET_NUMBER, (newest + NUMBER_GAP,))


def move_items_after(base: sqlite3.Connection, number: int) -> int:
    """Move all items behind a number that is higher than any; return how many that were."""
    newest = _read_newest(base)
    if newest >= number:
        return 0
    if not newest:
        base.execute("INSERT INTO sqlite_sequence VALUES ('log', 0)")
    # In their order, and all at once: no other item has the number that one gets.
    moved = base.execute("UPDATE log SET number = number + ?", (number,)).rowcount
    base.execute(_SET_NUMBER, (number + newest,))
    return moved


def _read_newest(base: sqlite3.Connection) -> int:
    found = base.execute("SELECT seq FROM sqlite_sequence WHERE name = 'log'").fetchone()
    return found[0] if found else 0


MAX_READ_ITEMS = 64
MAX_READ_BYTES = 4 << 20
_ITEM_BYTES = 128
"""What an item occupies besides its body."""


class ReportLog:
    """The items of one ledger; safe to use from several threads.

    What is entered together with frames takes the ledger's transaction, so it is entered once.
    """

    def __init__(self, path: Path, transaction: LedgerTransaction, *, max_bytes: int) -> None:
        """Keep at most that much; 0 when nobody is to be told anything."""
        self._transaction = transaction
        self._max_bytes = max_bytes
        self._held_bytes: int | None = None
        # Of its own: reading megabytes must not keep frames from being committed.
        self._reading = threading.Lock()
        self._base = open_ledger_for_reading(path)
        self.newest = 0
        """Number of the last item that this process entered, or tried to."""
        with transaction(synced=True) as base:
            base.execute(database.INSERT_REPORTING)
            if max_bytes:
                leave_number_gap(base)

    def close(self) -> None:
        """Close the file."""
        with self._reading:
            self._base.close()

    def forget_counts(self) -> None:
        """Count again what is held: a transaction was taken back."""
        self._held_bytes = None

    def enter_declared(self, base: sqlite3.Connection, declared: Iterable[MetadataFrame]) -> None:
        """Enter what of some frames concerns the coordinator, before the frames themselves."""
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
        """Enter the balance of an iteration, behind all of its events."""
        body = asdict(status) | {"dropped": dict(status.dropped)}
        self._enter(base, ReportItemKind.BALANCE, frame_id, json.dumps(body).encode())

    def enter_session(self, status: SessionStatus, root: str) -> None:
        """Enter how a session stands and where its tree is.

        Of several that wait the first remains, for it must come before the events, and the last.
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
        """Enter a session's newest timeouts anew, for a coordinator that forgot them."""
        with self._transaction() as base:
            found = base.execute(database.SELECT_NEWEST_TIMEOUTS, (session_id,)).fetchall()
            for (sequence,) in found:
                self._enter(base, ReportItemKind.TIMEOUTS, FrameId(session_id, sequence), b"")

    def acknowledged(self, number: int) -> None:
        """Forget the items up to a number: the coordinator has them for good."""
        with self._transaction() as base:
            base.execute("UPDATE reporting SET acknowledged = MAX(acknowledged, ?)", (number,))
            self._remove(base, 0, number)

    def begin_after(self, number: int) -> int:
        """Number what is here behind a number that is higher than any; return how many that were.

        Which of these items the coordinator has heard is not known then, so all are told again.
        """
        with self._transaction() as base:
            return move_items_after(base, number)

    def give_up(self, first: int, last: int) -> None:
        """Drop items that the coordinator rejects, and count them."""
        with self._transaction() as base:
            self._give_up(base, first, last)

    def items(self, after: int) -> list[ReportItem]:
        """Return the next items behind a number, some at a time; empty when there are none."""
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
        """Return how many items follow a number, and how many events they hold."""
        count, events = self._row(
            "SELECT COUNT(*), COALESCE(SUM(events), 0) FROM log WHERE number > ?", after
        )
        return count, events

    def last(self) -> int:
        """Return the number of the last item; 0 when the log is empty."""
        return self._row("SELECT COALESCE(MAX(number), 0) FROM log")[0]

    def lost(self) -> tuple[int, int]:
        """Return how many events and how many other items were ever given up."""
        events, states = self._row("SELECT lost_events, lost_states FROM reporting")
        return events, states

    def agent_id(self) -> str:
        """Return the name under which the items of this ledger are numbered."""
        return self._row("SELECT agent_id FROM reporting")[0]

    def acknowledged_to(self) -> int:
        """Return up to which number the coordinator ever had everything for good."""
        return self._row("SELECT acknowledged FROM reporting")[0]

    def _row(self, query: str, *values: int) -> tuple[Any, ...]:
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
        held = self._make_room(base, size)
        done = base.execute(
            "INSERT INTO log (session_id, sequence, kind, events, bytes, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (frame_id.session_id, frame_id.sequence, kind.value, events, size, body),
        )
        self._held_bytes = held + size
        self.newest = done.lastrowid or 0

    def _make_room(self, base: sqlite3.Connection, size: int) -> int:
        """Drop the oldest events, then the oldest balances; return what is held then."""
        while (held := self._held(base)) + size > self._max_bytes:
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

    def _held(self, base: sqlite3.Connection) -> int:
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
        self._held_bytes = self._held(base) - size


def _forget_timeouts(base: sqlite3.Connection, session_id: str) -> None:
    """Forget those of before: what comes now is all that the rank knows."""
    base.execute("DELETE FROM log WHERE session_id = ? AND kind = 'timeouts'", (session_id,))
    base.execute(
        "UPDATE declarations SET body = x'' WHERE session_id = ? AND kind = 'Timeouts'"
        " AND applied = 1",
        (session_id,),
    )

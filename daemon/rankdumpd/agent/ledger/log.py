"""What the coordinator is told, in the ledger: numbered items that stay until it has them for good.

Events are not written a second time: their item points at the declaration, whose body stays.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from rankdump.contract.events import EventColumns
from rankdump.contract.status import IterationStatus, SessionStatus
from rankdump.contract.timeouts import Timeouts
from rankdumpd.agent.ledger import numbers, queries
from rankdumpd.agent.ledger.connection import AS_TEXT
from rankdumpd.agent.values import Declared, ItemKind, LogItem, Ticket

ITEMS_AT_ONCE = 64
BYTES_AT_ONCE = 4 << 20
_ITEM_BYTES = 128
"""What an item occupies besides its body."""


class _Transaction(Protocol):
    def __call__(self, *, synced: bool = ...) -> AbstractContextManager[sqlite3.Connection]: ...


class ReportLog:
    """The items of one ledger; safe to use from several threads.

    What is entered together with frames takes the ledger's transaction, so it is entered once.
    """

    def __init__(self, path: Path, transaction: _Transaction, *, most_bytes: int) -> None:
        """Keep at most that much; 0 when nobody is to be told anything."""
        self._transaction = transaction
        self._most_bytes = most_bytes
        self._held_bytes: int | None = None
        # Of its own: reading megabytes must not keep frames from being committed.
        self._reading = threading.Lock()
        self._base = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        self._base.text_factory = AS_TEXT
        self.newest = 0
        """Number of the last item that this process entered, or tried to."""
        with transaction(synced=True) as base:
            base.execute(queries.REPORTING)
            if most_bytes:
                numbers.leave_a_gap(base)

    def close(self) -> None:
        """Let go of the file."""
        with self._reading:
            self._base.close()

    def forget_counts(self) -> None:
        """Count again what is held: a transaction was taken back."""
        self._held_bytes = None

    def enter_declared(self, base: sqlite3.Connection, declared: Iterable[Declared]) -> None:
        """Enter what of some frames concerns the coordinator, before the frames themselves."""
        for each in declared:
            if isinstance(each.declaration, EventColumns):
                self._enter_frame(base, ItemKind.EVENTS, each, events=len(each.declaration))
            elif isinstance(each.declaration, Timeouts):
                _forget_timeouts(base, each.ticket.session_id)
                self._held_bytes = None
                self._enter_frame(base, ItemKind.TIMEOUTS, each)

    def enter_balance(
        self, base: sqlite3.Connection, ticket: Ticket, status: IterationStatus
    ) -> None:
        """Enter the balance of an iteration, behind all of its events."""
        body = asdict(status) | {"dropped": dict(status.dropped)}
        self._enter(base, ItemKind.BALANCE, ticket, json.dumps(body).encode())

    def enter_session(self, status: SessionStatus, root: str) -> None:
        """Enter how a session stands and where its tree is.

        Of several that wait the first remains, for it must come before the events, and the last.
        """
        ticket = Ticket(status.session_id, 0)
        body = json.dumps({"root": root, "status": asdict(status)}).encode()
        with self._transaction() as base:
            base.execute(
                "DELETE FROM log WHERE session_id = ?1 AND sequence = 0 AND number >"
                " (SELECT MIN(number) FROM log WHERE session_id = ?1 AND sequence = 0)",
                (status.session_id,),
            )
            self._held_bytes = None
            self._enter(base, ItemKind.SESSION, ticket, body)

    def tell_again(self, session_id: str) -> None:
        """Enter a session's newest timeouts anew, for a coordinator that forgot them."""
        with self._transaction() as base:
            found = base.execute(queries.NEWEST_TIMEOUTS, (session_id,)).fetchall()
            for (sequence,) in found:
                self._enter(base, ItemKind.TIMEOUTS, Ticket(session_id, sequence), b"")

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
            return numbers.begin_after(base, number)

    def give_up(self, first: int, last: int) -> None:
        """Forget items that cannot be told, and count them."""
        with self._transaction() as base:
            self._lose(base, first, last)

    def items(self, after: int) -> list[LogItem]:
        """Return the next items behind a number, some at a time; empty when there are none."""
        with self._reading:
            found = self._base.execute(queries.NEXT_ITEMS, (after, ITEMS_AT_ONCE, BYTES_AT_ONCE))
            ((heads, bodies),) = found.fetchall()
        items: list[LogItem] = []
        start = 0
        for number, kind, session_id, job_id, rank, events, size in json.loads(heads):
            body = bodies[start : start + size]
            items.append(LogItem(number, ItemKind(kind), session_id, job_id, rank, events, body))
            start += size
        return sorted(items, key=lambda item: item.number)

    def waiting(self, after: int) -> tuple[int, int]:
        """Return how many items stand behind a number, and how many events they hold."""
        count, events = self._row(
            "SELECT COUNT(*), COALESCE(SUM(events), 0) FROM log WHERE number > ?", after
        )
        return count, events

    def last(self) -> int:
        """Return the number of the last item; 0 when none stands there."""
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
        self, base: sqlite3.Connection, kind: ItemKind, declared: Declared, *, events: int = 0
    ) -> None:
        if not self._most_bytes:
            return
        ticket = declared.ticket
        where = (ticket.session_id, ticket.sequence)
        query = "SELECT 1 FROM declarations WHERE session_id = ? AND sequence = ?"
        if not base.execute(query, where).fetchone():
            self._enter(base, kind, ticket, b"", events=events, kept_bytes=len(declared.raw))

    def _enter(
        self,
        base: sqlite3.Connection,
        kind: ItemKind,
        ticket: Ticket,
        body: bytes,
        *,
        events: int = 0,
        kept_bytes: int = 0,
    ) -> None:
        if not self._most_bytes:
            return
        size = _ITEM_BYTES + len(body) + kept_bytes
        held = self._make_room(base, size)
        done = base.execute(
            "INSERT INTO log (session_id, sequence, kind, events, bytes, body)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            (ticket.session_id, ticket.sequence, kind.value, events, size, body),
        )
        self._held_bytes = held + size
        self.newest = done.lastrowid or 0

    def _make_room(self, base: sqlite3.Connection, size: int) -> int:
        """Drop the oldest events, then the oldest balances; return what is held then."""
        while (held := self._held(base)) + size > self._most_bytes:
            oldest = (
                number
                for kind in (ItemKind.EVENTS, ItemKind.BALANCE)
                for (number,) in base.execute(
                    "SELECT MIN(number) FROM log WHERE kind = ?", (kind.value,)
                )
                if number
            )
            number = next(oldest, 0)
            if not number:
                break
            self._lose(base, number, number)
        return held

    def _held(self, base: sqlite3.Connection) -> int:
        if self._held_bytes is None:
            ((held,),) = base.execute("SELECT COALESCE(SUM(bytes), 0) FROM log").fetchall()
            self._held_bytes = int(held)
        return self._held_bytes

    def _lose(self, base: sqlite3.Connection, first: int, last: int) -> None:
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
        base.execute(queries.EMPTY_TOLD, between)
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

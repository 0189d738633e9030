"""What committed frames bring about: rows of tables at once, declarations in their order.

What fails for a passing reason makes its session wait, and is tried again from the ledger.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable

from rankdump.contract.errors import ExhaustedError
from rankdump.contract.events import EventColumns
from rankdump.contract.exchange import IterationEnd, SessionEnd
from rankdump.contract.status import IterationStatus
from rankdumpd.agent.draw.parts import GraphParts
from rankdumpd.agent.effects.again import Again
from rankdumpd.agent.effects.carried import carry_out
from rankdumpd.agent.effects.failing import failed
from rankdumpd.agent.effects.joined import Joining
from rankdumpd.agent.effects.kept import rows_of_tables
from rankdumpd.agent.effects.manifest import describe
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.metered import of_end
from rankdumpd.agent.program import ProgramOrder
from rankdumpd.agent.receive import declaration_again
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.sessions.introduced import introduce
from rankdumpd.agent.tabulate import Tables
from rankdumpd.agent.usage import Usage
from rankdumpd.agent.values import Declared, Ticket
from rankdumpd.logs import about
from rankdumpd.meters import Meters

READ_AT_ONCE = 64
"""Declarations that are read again at once: of a session that waited long there are many."""

_log = logging.getLogger(__name__)


class Effects:
    """Applies due declarations, in order; called from one thread at a time."""

    def __init__(
        self,
        ledger: Ledger,
        reporter: Reporter,
        *,
        meters: Meters,
        usage: Usage | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ledger, self._reporter = ledger, reporter
        self._meters, self._clock = meters, clock
        self._usage = usage or Usage()
        self._again = Again()
        self._joining: dict[str, Joining] = {}
        """By session: the iteration whose operators are being joined."""

    def apply_due(self, session: Session) -> bool:
        """Apply what the watermark has passed, then acknowledge it; return whether that was all.

        Joining operators may take long: a little of it is done at a time, and others go on.
        """
        done = session.due.waits or self._go_on(session)
        if session.due.waits:
            self._tell_ends(session)
        self._reporter.wake()
        session.acknowledge()
        return done

    def to_try_again(self, sessions: Iterable[Session]) -> list[Session]:
        """Return those of all sessions for which `apply_due` is due although nothing came."""
        due = set(self._again.due(now_s=self._clock()))
        found: list[Session] = []
        for session in sessions:
            if session.due.waits and session.request.session_id in due:
                session.due.resume()
                found.append(session)
            elif not session.introduced and not session.due.waits:
                found.append(session)
        return found

    def _go_on(self, session: Session) -> bool:
        try:
            self._introduce(session)
            self._tabulate(session)
            done = self._apply_some(session)
        except ExhaustedError as error:
            self._wait(session, str(error))
            return True
        if done and session.due.all_here:
            session.due.complaint = ""
            if self._again.over(session.request.session_id):
                request = session.request
                _log.warning(
                    "rank %d: what waited is in the tree", request.rank, extra=about(request)
                )
        return done

    def _wait(self, session: Session, why: str) -> None:
        session_id = session.request.session_id
        self._again.later(session_id, now_s=self._clock())
        self._joining.pop(session_id, None)
        session.program = ProgramOrder(session.program.written)
        session.graphs = GraphParts()
        if session.outlet.tables is not None:
            session.outlet.tables.look_back()
        if why != session.due.complaint:
            _log.error(why, extra=about(session.request))
        session.due.complaint = why

    def _tell_ends(self, session: Session) -> None:
        """Count and report iterations whose manifests have to wait, and take a goodbye."""
        while (declared := session.due.next(session.watermark)) is not None:
            declaration = declared.declaration
            if isinstance(declaration, IterationEnd):
                status = self._ended(session, declared, declaration)
                self._report_end(session, declared.ticket, status)
            elif isinstance(declaration, SessionEnd):
                session.say_goodbye(declaration)
                self._reporter.session(session.status(), str(session.outlet.tree.root))

    def _introduce(self, session: Session) -> None:
        if session.introduced:
            return
        try:
            introduce(session, session.request)
        except OSError as error:
            failed(session, "its metadata is not written", error)
        session.introduced = True

    def _apply_some(self, session: Session) -> bool:
        while self._join_some(session):
            declared = self._next_due(session)
            if declared is None:
                return True
            self._apply(session, declared)
        return False

    def _next_due(self, session: Session) -> Declared | None:
        while True:
            declared, after = session.due.next(session.watermark), session.due.read_to
            if declared is not None or after is None:
                return declared
            try:
                self._read_on(session, after)
            except sqlite3.Error as error:
                failed(session, "what is due is not read", error)
                return None

    def _read_on(self, session: Session, after: int) -> None:
        session_id, watermark = session.request.session_id, session.watermark
        found = self._ledger.unapplied(session_id, after, up_to=watermark, most=READ_AT_ONCE)
        all_there = len(found) < READ_AT_ONCE
        if all_there:
            found += self._ledger.unapplied(session_id, watermark)
        again = [declaration_again(raw, session_id) for raw in found]
        session.due.refill(again, all_there=all_there)

    def _join_some(self, session: Session) -> bool:
        """Return whether no operators are left to be joined; their iteration ends then."""
        joining = self._joining.pop(session.request.session_id, None)
        if joining is None:
            return True
        try:
            joined = joining.go_on()
        except (OSError, sqlite3.Error) as error:
            what = f"iteration {joining.end.iteration}: operators not joined"
            failed(session, what, error, joining.declared)
            self._end_iteration(session, joining.declared, joining.end, joined=False)
            return True
        if joined:
            self._end_iteration(session, joining.declared, joining.end)
        else:
            self._joining[session.request.session_id] = joining
        return joined

    def _apply(self, session: Session, declared: Declared) -> None:
        declaration = declared.declaration
        if isinstance(declaration, EventColumns):
            session.program.take(declaration)
        elif isinstance(declaration, IterationEnd):
            joining = Joining(self._ledger, session, declared, declaration, self._usage)
            self._joining[session.request.session_id] = joining
        elif isinstance(declaration, SessionEnd):
            self._end_session(session, declared, declaration)
        else:
            carry_out(self._ledger, session, declared)

    def _tabulate(self, session: Session) -> None:
        """Write the rows of all that is committed without a gap."""
        tables = session.outlet.tables
        if tables is None:
            return
        try:
            while session.tabulated_to < session.watermark:
                self._tabulate_some(session, tables, session.watermark)
        except (OSError, sqlite3.Error) as error:
            failed(session, "tables of figures: rows have to wait", error)

    def _tabulate_some(self, session: Session, tables: Tables, up_to: int) -> None:
        session_id = session.request.session_id
        found, reached = self._ledger.table_rows(
            session_id, after=session.tabulated_to, up_to=up_to
        )
        for sentence in tables.add(rows_of_tables(found, session)):
            session.trouble(sentence)
        session.tabulated_to = reached

    def _end_iteration(
        self, session: Session, declared: Declared, end: IterationEnd, *, joined: bool = True
    ) -> None:
        ticket = declared.ticket
        status = self._ended(session, declared, end)
        try:
            # A manifest says that everything is there: without its rows it has to wait as they do.
            if joined and _tabulated(session, ticket):
                repeated = session.due.begun(declared)
                describe(self._ledger, session, status, ticket, repeated=repeated)
                session.program.ended(end.iteration)
                self._ledger.iteration_ended(ticket, end, session.program.written, status)
                return
        except (OSError, sqlite3.Error) as error:
            what = f"iteration {end.iteration}: no manifest written"
            failed(session, what, error, declared)
        self._report_end(session, ticket, status)

    def _ended(self, session: Session, declared: Declared, end: IterationEnd) -> IterationStatus:
        if session.ends_first(declared, end):
            self._meters.add_all(of_end(end))
        return session.end_iteration(declared, end)

    def _report_end(self, session: Session, ticket: Ticket, status: IterationStatus) -> None:
        try:
            self._ledger.iteration_waits(ticket, status)
        except sqlite3.Error as error:
            # It is reported when its manifest is there.
            _log.error(
                "rank %d, iteration %d: not reported: %s",
                status.rank,
                status.iteration,
                error,
                extra=about(status, iteration=status.iteration),
            )

    def _end_session(self, session: Session, declared: Declared, end: SessionEnd) -> None:
        session.say_goodbye(end)
        try:
            if _tabulated(session, declared.ticket):
                self._ledger.session_ended(declared.ticket, end)
        except sqlite3.Error as error:
            failed(session, "its goodbye is not entered", error, declared)
        self._reporter.session(session.status(), str(session.outlet.tree.root))


def _tabulated(session: Session, ticket: Ticket) -> bool:
    """Return whether every row before a declaration stands in its table."""
    return session.outlet.tables is None or session.tabulated_to >= ticket.sequence

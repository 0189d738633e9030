"""Sessions as the ledger has them, made whole again."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from rankdump.contract.errors import DamagedError, RankdumpError, UnavailableError
from rankdump.contract.status import StatusView
from rankdump.wire.convert import session_request_to_wire
from rankdump.wire.views import view_to_wire
from rankdumpd import faults
from rankdumpd.agent import vet
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.values import Declared, SessionRow


class Remembered:
    """Finds sessions of an earlier process."""

    def __init__(self, ledger: Ledger, read_declared: Callable[[bytes, str], Declared]) -> None:
        self._ledger, self._read_declared = ledger, read_declared

    def find(self, session_id: str) -> Session | None:
        """Return a session as the ledger has it; DamagedError when that is none, UnavailableError
        while a disk fails.
        """
        try:
            row = self._ledger.find(session_id)
            session = self._restored(row) if row else None
            if session:
                _check_telling(session)
            return session
        except (sqlite3.Error, RankdumpError):
            raise
        except Exception as error:
            if faults.passes(error):
                raise UnavailableError(f"session {session_id!r}: {error}") from error
            raise DamagedError(f"the ledger is damaged: {error!r}") from error

    def _restored(self, row: SessionRow) -> Session:
        session_id = row.request.session_id
        session = Session(row.request, vet.plan_of(row.request))
        session.restore(
            row,
            beyond=self._ledger.committed_beyond(session_id, row.watermark),
            counts=self._ledger.counts(session_id),
            ends=self._ledger.ends(session_id),
            due=[
                self._read_declared(raw, session_id) for raw in self._ledger.unapplied(session_id)
            ],
            # The end of an iteration takes effect after all rows before it.
            tabulated_to=self._ledger.last_end(session_id),
        )
        return session


def _check_telling(session: Session) -> None:
    """Raise what is wrong with a session of which nobody could be told: that one is refused, for
    else nobody would be told of any.
    """
    session_request_to_wire(session.request)
    view_to_wire(StatusView((session.status(),), tuple(session.iterations())))

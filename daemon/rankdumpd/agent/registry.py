"""All sessions of an agent: opening, resuming and finding them; one live session per rank."""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rankdump.contract import roots as trees
from rankdump.contract.errors import (
    DamagedError,
    ExhaustedError,
    ForbiddenError,
    RankdumpError,
    RefusedError,
    RetryableError,
    UnavailableError,
)
from rankdump.contract.exchange import SessionGrant, SessionRequest
from rankdump.contract.plan import DumpPlan
from rankdumpd import faults
from rankdumpd.agent import vet
from rankdumpd.agent.givenup import GivenUp
from rankdumpd.agent.ledger import Ledger
from rankdumpd.agent.lobby import Lobby
from rankdumpd.agent.remembered import Remembered
from rankdumpd.agent.sessions import Listener, Session
from rankdumpd.agent.sessions.introduced import introduce
from rankdumpd.agent.values import Declared
from rankdumpd.logs import about
from rankdumpd.meters import Meters

MAX_CLOSED_SESSIONS = 1024
MAX_ABSENT = 64
"""Ranks that never came, of which people hear."""

_log = logging.getLogger(__name__)


class Registry:
    """Knows every session that is open or was lately; safe to use from several threads."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        max_record_bytes: int,
        room: Callable[[int], str],
        read_declared: Callable[[bytes, str], Declared],
        meters: Meters,
        max_sessions: int = 4096,
        roots: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Ask `room` with the sessions that are here why there is none for another.

        `roots` are the folders that trees may be in, any when there are none.
        """
        self._ledger = ledger
        self._remembered = Remembered(ledger, read_declared)
        self._room = room
        self._max_record_bytes = max_record_bytes
        self._max_sessions, self._roots = max_sessions, roots
        self._lobby = Lobby(clock)
        self._meters = meters
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._given_up = GivenUp()
        self._absent: deque[str] = deque(maxlen=MAX_ABSENT)
        self._draining = False

    def recover(self) -> list[Session]:
        """Take up what an earlier process left unfinished; return those sessions.

        One of which the ledger is damaged keeps no other out.
        """
        for session_id in self._ledger.unfinished():
            try:
                session = self._remembered.find(session_id)
                if session is None:
                    raise DamagedError("the ledger does not find it by its name")
                # What is due waits, too, while somebody mends the tree.
                session.introduced = session.outlet.hold.take_again()
                self._sessions[session_id] = session
            except (sqlite3.Error, RetryableError) as error:
                # It is looked for again when its rank comes back.
                _log.error("session %s is not taken up at present: %s", session_id, error)
            except RankdumpError as error:
                self.give_up(session_id, error)
        return self.all()

    def give_up(self, session_id: str, error: Exception) -> None:
        """Refuse a session's rank from now on: what the ledger has of it is not to be used."""
        with self._lock:
            self._sessions.pop(session_id, None)
            self._given_up.add(session_id, error)

    def findings(self) -> list[str]:
        """Return which sessions were given up, and which ranks never came; a sentence each."""
        with self._lock:
            self._expire()
            return [*self._given_up.findings(), *self._absent]

    def open(self, request: SessionRequest) -> SessionGrant:
        """Let a rank in or back in; RefusedError and UnavailableError say why not."""
        plan, request = vet.plan_of(request), vet.sealed(request)
        with self._lock:
            session = self._let_in(request, plan)
        try:
            # Without the lock: a disk that is busy holds up nobody else.
            # Before anything is made: what turns records into files looks at the tree at once.
            trees.check(plan.output.root, self._roots, resolve=os.path.realpath)
            session = session or Session(request, plan)
            _introduce(session, request)
            with self._lock:
                self._check_open()
                self._ledger.open_session(request)
                session.reopen(request)
                self._sessions[request.session_id] = session
                self._lobby.enter(request.session_id)
                self._forget_closed()
        except BaseException:
            with self._lock:
                self._lobby.leave(request.session_id)
            raise
        self._meters.add("rankdump_agent_opened_sessions_total")
        return SessionGrant(
            token=session.token,
            acknowledged=session.acknowledged,
            max_record_bytes=self._max_record_bytes,
            excluded=session.excluded,
        )

    def connect(self, session_id: str, token: bytes, listener: Listener) -> Session:
        """Give a session its stream; ForbiddenError when the caller is not its rank."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                raise UnavailableError(f"session {session_id!r} is not open here: open it again")
            if not secrets.compare_digest(session.token, token):
                raise ForbiddenError(
                    f"session {session_id!r}: the token is not the one it was given"
                )
            self._check_alone(session.request)
            _hold(session)
            self._lobby.leave(session_id)
            session.connect(listener)
            return session

    def live(self) -> int:
        """Return how many sessions are connected."""
        with self._lock:
            return sum(session.live for session in self._sessions.values())

    def get(self, session_id: str) -> Session:
        """Return a session that is known to be there."""
        return self._sessions[session_id]

    def all(self) -> list[Session]:
        """Return all sessions, in the order in which they came."""
        with self._lock:
            self._expire()
            return list(self._sessions.values())

    def let_go(self) -> None:
        """Hold no longer the trees of sessions that have said goodbye and are done with."""
        with self._lock:
            for session in self._sessions.values():
                if session.closed and session.over:
                    session.outlet.hold.let_go()

    def close(self) -> None:
        """Hold no tree any more."""
        for session in self.all():
            session.outlet.hold.let_go()

    def refuse(self) -> None:
        """Let nobody in from now on."""
        with self._lock:
            self._draining = True

    def _let_in(self, request: SessionRequest, plan: DumpPlan) -> Session | None:
        """Return the session of a rank that may come, where it is known; raise why it may not."""
        self._check_open()
        session = self._find(request.session_id)
        if session:
            vet.check_holder(session.request, request)
            vet.check_same(session.request, request)
        self._check_tree(request, plan.output.root)
        self._check_alone(request)
        self._check_room(request)
        self._lobby.enter(request.session_id)
        return session

    def _check_open(self) -> None:
        if self._draining:
            raise UnavailableError("the agent is stopping and takes no new sessions")

    def _find(self, session_id: str) -> Session | None:
        self._given_up.check(session_id)
        return self._sessions.get(session_id) or self._remembered.find(session_id)

    def _check_tree(self, request: SessionRequest, root: str) -> None:
        """Raise RefusedError where another rank of the job dumps into another tree."""
        for other in self._sessions.values():
            theirs = other.plan.output.root
            if other.live and other.request.job_id == request.job_id and theirs != root:
                raise RefusedError(
                    f"job {request.job_id!r} dumps into {theirs}, and this rank's plan names "
                    f"{root}: two jobs have one id; RANKDUMP_JOB_ID gives each an id of its own"
                )

    def _check_alone(self, request: SessionRequest) -> None:
        for other in self._sessions.values():
            theirs = other.request
            same = (theirs.job_id, theirs.rank) == (request.job_id, request.rank)
            if same and theirs.session_id != request.session_id and other.live:
                raise RefusedError(
                    f"rank {request.rank} of job {request.job_id!r} is process {theirs.pid} "
                    f"on host {theirs.host!r} already, and connected"
                )

    def _check_room(self, request: SessionRequest) -> None:
        self._expire()
        live = {session_id for session_id, session in self._sessions.items() if session.live}
        others = len(live.union(self._lobby) - {request.session_id})
        fault = self._room(others)
        if others >= self._max_sessions:
            fault = f"{others} sessions are open, and agent.max_sessions is {self._max_sessions}"
        if fault:
            raise ExhaustedError(f"rank {request.rank} of job {request.job_id!r}: {fault}")

    def _expire(self) -> None:
        """Expect those no more that opened a session and never came; of most nothing is left."""
        for session_id in self._lobby.take_overdue():
            session = self._sessions.get(session_id)
            if session is None or session.live:
                continue
            session.lose()
            if not session.over or session.watermark or session.iterations():
                continue
            del self._sessions[session_id]
            self._note_absent(session.request)
            try:
                self._ledger.withdraw(session_id)
            except sqlite3.Error as error:
                # Its row is one too many, and nobody else's trouble.
                _log.warning("session %s stays in the ledger: %s", session_id, error)

    def _note_absent(self, request: SessionRequest) -> None:
        who = f"rank {request.rank} (process {request.pid} on host {request.host})"
        said = f"{who} opened its session and never came: nothing of it is in the tree"
        _log.warning(said, extra=about(request))
        self._absent.append(said)

    def _forget_closed(self) -> None:
        closed = [session_id for session_id, session in self._sessions.items() if session.over]
        for session_id in closed[: max(0, len(closed) - MAX_CLOSED_SESSIONS)]:
            del self._sessions[session_id]


def _hold(session: Session) -> None:
    """Hold the tree of a session that may have let go of it since it was opened."""
    try:
        session.outlet.hold.take()
    except BlockingIOError as error:
        raise UnavailableError(f"session {session.request.session_id!r}: {error}") from None
    except OSError:
        return  # without room its records are counted as dropped


def _introduce(session: Session, request: SessionRequest) -> None:
    try:
        introduce(session, request)
    except OSError as error:
        said = f"output root {session.plan.output.root!r} cannot be written"
        if not faults.passes(error):
            raise RefusedError(f"{said}: {error}") from None
        if not faults.no_space(error):
            _log.warning(
                "rank %d: %s at present: %s", request.rank, said, error, extra=about(request)
            )
            raise UnavailableError(f"{said} at present: {error}") from None
        # Room may come back while the job runs; until then its records are counted as dropped.
        session.introduced = False
        session.due.complaint = f"rank {request.rank}: no room for its metadata: {error}"

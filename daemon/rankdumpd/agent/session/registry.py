"""All sessions of an agent: opening, checking, resuming and finding them; each rank has at most one
live session. Sessions of an earlier process are restored from the ledger; sessions whose rows are
damaged are rejected.

The checks of a request and its plan are pure: no clock, no disk, no network.
"""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
import logging
import os
import re
import secrets
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from rankdump._codec.file_codec import CODECS
from rankdump._core import tree_root as trees
from rankdump._core.plan import DumpPlan, plan_from_json
from rankdump._core.session_protocol import SessionGrant, SessionRequest
from rankdump._core.status import StatusView
from rankdump._core.tree_session import DaemonAddresses
from rankdump._layout.profile import PROFILES
from rankdump._layout.tree_layouts import LAYOUTS, find_contradiction
from rankdump._wire.message_fields import make_printable
from rankdump._wire.session_messages import session_request_to_wire
from rankdump._wire.status_messages import view_to_wire
from rankdump.errors import (
    CorruptedError,
    ExhaustedError,
    ForbiddenError,
    ProtocolError,
    RankdumpError,
    RejectedError,
    RetryableError,
    UnavailableError,
)
from rankdumpd.agent.ledger.agent_ledger import AgentLedger
from rankdumpd.agent.records import read_wall_clock_us
from rankdumpd.agent.session.rank_process import is_process_here
from rankdumpd.agent.session.rank_session import (
    RankSession,
    StreamMailbox,
    number_request,
    prepare_tree,
)
from rankdumpd.server import state_files
from rankdumpd.server.logs import RecentTexts, log_about
from rankdumpd.server.metrics import MetricCounters

# The first characters of the session id become part of a file name.
_SESSION_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_OWNER_MAY_ENTER = 0o300


def read_checked_plan(request: SessionRequest) -> DumpPlan:
    """Return the plan of a session; ProtocolError or RejectedError when this agent
    cannot serve it.
    """
    if not _SESSION_ID.fullmatch(request.session_id):
        raise ProtocolError(
            f"session id {request.session_id!r} is invalid: expected letters, digits, _ and -"
        )
    plan = plan_from_json(request.plan_json)
    fault = _find_fault(plan)
    if fault:
        raise RejectedError(f"plan of rank {request.rank}: {fault}")
    return plan


UNUSABLE_ROW_ERRORS = (CorruptedError, ProtocolError, RejectedError)
"""Errors that mean that a session cannot be restored from its row in the ledger."""


def read_stored_session(ledger: AgentLedger, session_id: str) -> tuple[SessionRequest, DumpPlan]:
    """Return request and plan of a session in the ledger; the session may have ended long ago."""
    row = ledger.find(session_id)
    if row is None:
        raise CorruptedError(f"session {session_id!r} is not in the ledger")
    return row.request, read_checked_plan(row.request)


def seal_request(request: SessionRequest) -> SessionRequest:
    """Return the request with the SHA-256 of its secret in place of the secret.

    The agent does not store the secret itself. A request without a secret is returned unchanged.
    """
    secret = hashlib.sha256(request.secret).digest() if request.secret else b""
    return dataclasses.replace(request, secret=secret)


def check_holder(known: SessionRequest, request: SessionRequest) -> None:
    """Raise a ForbiddenError when another process resumes a session; both requests are sealed.

    A session that was opened without a secret, by an older client or on an older agent, belongs to
    the first process that resumes it.
    """
    if known.secret and not hmac.compare_digest(known.secret, request.secret):
        raise ForbiddenError(
            f"session {request.session_id!r} was opened by another process: "
            "its secret does not match"
        )


def check_same_rank(known: SessionRequest, request: SessionRequest) -> None:
    """Raise a RejectedError when a session is resumed for another rank than the one it was opened
    for.
    """
    for name in ("job_id", "rank", "world_size", "device", "plan_json"):
        if getattr(known, name) != getattr(request, name):
            raise RejectedError(f"session {request.session_id!r} was opened with another {name}")


def _find_fault(plan: DumpPlan) -> str:
    output = plan.output
    if output.codec not in CODECS:
        return f"codec {output.codec!r} is not one of {', '.join(CODECS)}"
    if output.layout not in LAYOUTS:
        return f"layout {output.layout!r} is not one of {', '.join(LAYOUTS)}"
    if LAYOUTS[output.layout].has_time_folder and not output.started:
        return f"layout {output.layout!r} needs the start time of the session"
    if output.profile not in PROFILES:
        return f"profile {output.profile!r} is not one of {', '.join(PROFILES)}"
    if output.folder_mode & _OWNER_MAY_ENTER != _OWNER_MAY_ENTER:
        return f"folder_mode {output.folder_mode:#o} keeps the agent itself from writing"
    return find_contradiction(plan)


def restore_session(
    ledger: AgentLedger, session_id: str, daemons: DaemonAddresses
) -> RankSession | None:
    """Restore a session of an earlier process from the ledger; None if the ledger does not know it.

    CorruptedError when the rows of the session are damaged, UnavailableError while a disk fails.
    """
    try:
        row = ledger.find(session_id)
        if row is None:
            return None
        session = RankSession(row.request, read_checked_plan(row.request), daemons)
        session.restore(ledger, row)
        _check_reportable(session)
        return session
    except (sqlite3.Error, RankdumpError):
        raise
    except Exception as error:
        if state_files.is_transient(error):
            raise UnavailableError(f"session {session_id!r}: {error}") from error
        raise CorruptedError(f"the ledger is damaged: {error!r}") from error


def _check_reportable(session: RankSession) -> None:
    """Raise an error for a session that cannot be reported, because it would fail every report."""
    session_request_to_wire(session.request)
    view_to_wire(StatusView((session.status(),), tuple(session.iterations())))


_MAX_CAUSE_CHARACTERS = 512

_logger = logging.getLogger(__name__)


CONNECT_TIMEOUT_S = 60.0
"""Longest time in seconds between the opening of a session and the connection of its stream."""


_QUIET_S = 60.0
"""Seconds in which a rank whose tree cannot be written for the same reason is logged once."""
_recent_problems = RecentTexts(_QUIET_S)
MAX_CLOSED_SESSIONS = 1024
MAX_ABSENT_RANKS = 64
"""Largest number of ranks that never connected and are reported as findings."""


class SessionRegistry:
    """All sessions that are open or were open recently; safe to use from several threads."""

    def __init__(
        self,
        ledger: AgentLedger,
        *,
        max_record_bytes: int,
        capacity_fault: Callable[[int], str],
        counters: MetricCounters,
        max_sessions: int = 4096,
        roots: Sequence[str] = (),
        daemons: DaemonAddresses = DaemonAddresses(),  # noqa: B008 - it is immutable
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Trees are restricted to folders below `roots`, if any are given.

        `capacity_fault` returns why no session can be added to a number of sessions; empty if one
        can be. `daemons` has the addresses for session files.
        """
        self._ledger, self._daemons = ledger, daemons
        self._capacity_fault = capacity_fault
        self._max_record_bytes = max_record_bytes
        self._max_sessions, self._roots = max_sessions, roots
        self._clock, self._counters = clock, counters
        self._opened: dict[str, tuple[SessionRequest, float]] = {}
        """Request of each session that is open without a connected stream, and the time since which
        it is, by session id.
        """
        self._lock = threading.RLock()
        self._sessions: dict[str, RankSession] = {}
        self._rejected: dict[str, str] = {}
        """Why sessions with damaged rows are rejected, by session id."""
        self._absent: deque[str] = deque(maxlen=MAX_ABSENT_RANKS)
        self._draining = False

    def recover(self) -> list[RankSession]:
        """Restore the sessions that an earlier process left unfinished, and return them.

        A session with damaged rows does not affect other sessions.
        """
        for session_id in self._ledger.unfinished():
            try:
                session = restore_session(self._ledger, session_id, self._daemons)
                if session is None:
                    raise CorruptedError("the ledger does not find the session by its id")
                # While the tree is being repaired, the metadata and all pending frames have to
                # wait.
                session.has_metadata = session.storage.lock.reacquire()
                self._sessions[session_id] = session
            except (sqlite3.Error, RetryableError) as error:
                # When the rank of the session reconnects, the ledger is searched for it again.
                _logger.error("session %s cannot be resumed at present: %s", session_id, error)
            except RankdumpError as error:
                self.give_up(session_id, error)
        return self.list_sessions()

    def give_up(self, session_id: str, error: Exception) -> None:
        """Reject a session from now on, because its rows in the ledger cannot be used."""
        reason = make_printable(
            f"session {session_id!r} cannot be resumed: {error}", _MAX_CAUSE_CHARACTERS
        )
        _logger.error(reason, extra={"session": session_id})
        with self._lock:
            self._sessions.pop(session_id, None)
            self._rejected[session_id] = reason

    def findings(self) -> list[str]:
        """Return a sentence for each rejected session and for each rank that never connected."""
        with self._lock:
            self._expire()
            rejected = (f"{each}; its rank is rejected" for each in self._rejected.values())
            return [*rejected, *self._absent]

    def open(self, request: SessionRequest) -> SessionGrant:
        """Open or resume the session of a rank; RejectedError or UnavailableError if that is
        impossible.
        """
        plan, request = read_checked_plan(request), seal_request(request)
        with self._lock:
            session = self._check_admission(request, plan)
        try:
            # Done without the lock, so that a busy disk does not delay other ranks. The root is
            # checked first, because creating the session's storage reads the tree.
            trees.check_root(plan.output.root, self._roots, resolve=os.path.realpath)
            if session is None:
                session = RankSession(request, plan, self._daemons)
                request = number_request(session, request)
            else:
                request = dataclasses.replace(request, attempt=session.request.attempt)
            _prepare_tree(session, request)
            with self._lock:
                self._check_open()
                self._ledger.open_session(request)
                session.reopen(request)
                self._sessions[request.session_id] = session
                self._opened[request.session_id] = request, self._clock()
                self._forget_closed()
        except BaseException:
            with self._lock:
                self._opened.pop(request.session_id, None)
            raise
        self._counters.add("rankdump_agent_opened_sessions_total")
        return SessionGrant(
            token=session.token,
            acknowledged=session.acknowledged,
            max_record_bytes=self._max_record_bytes,
            excluded=session.excluded,
            keeps_steps=session.plan.black_box.steps > 0,
            keeps_step_tensors=session.plan.black_box.tensor_bytes > 0,
            changes_plans=True,
        )

    def check_token(self, session_id: str, token: bytes) -> RankSession:
        """Return an open session; ForbiddenError when the caller is not the rank of the session."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UnavailableError(
                f"session {session_id!r} is not open on this agent: open it again"
            )
        if not secrets.compare_digest(session.token, token):
            raise ForbiddenError(f"session {session_id!r}: its token does not match")
        return session

    def connect(self, session_id: str, token: bytes, listener: StreamMailbox) -> RankSession:
        """Connect the stream of a session; ForbiddenError when the caller is not the rank of the
        session.
        """
        with self._lock:
            session = self.check_token(session_id, token)
            self._check_single_process(session.request)
            _lock_tree(session)
            self._opened.pop(session_id, None)
            session.connect(listener)
            return session

    def live(self) -> int:
        """Return the number of connected sessions."""
        with self._lock:
            return sum(session.live for session in self._sessions.values())

    def get(self, session_id: str) -> RankSession:
        """Return a session that is known to exist."""
        return self._sessions[session_id]

    def find(self, session_id: str) -> RankSession | None:
        """Return a session; None when it was forgotten, or was finished by an earlier process."""
        return self._sessions.get(session_id)

    def list_sessions(self) -> list[RankSession]:
        """Return all sessions in the order in which they were opened."""
        with self._lock:
            self._expire()
            return list(self._sessions.values())

    def release_trees(self) -> None:
        """Release the tree locks of sessions that are closed and have no work left."""
        with self._lock:
            for session in self._sessions.values():
                if session.closed and session.over:
                    session.storage.lock.release()

    def close(self) -> None:
        """Release all tree locks."""
        for session in self.list_sessions():
            session.storage.lock.release()

    def refuse_sessions(self) -> None:
        """Reject new sessions from now on."""
        with self._lock:
            self._draining = True

    def _check_admission(self, request: SessionRequest, plan: DumpPlan) -> RankSession | None:
        """Return the known session of an admitted rank, None if it is new; raise the reason of a
        rejection.
        """
        self._check_open()
        session = self._find(request.session_id)
        if session:
            check_holder(session.request, request)
            check_same_rank(session.request, request)
        self._check_tree(request, plan.output.root)
        self._check_single_process(request)
        self._check_capacity(request)
        self._check_single_opening(request)
        self._opened[request.session_id] = request, self._clock()
        return session

    def _check_open(self) -> None:
        if self._draining:
            raise UnavailableError("the agent is stopping and accepts no new sessions")

    def _find(self, session_id: str) -> RankSession | None:
        if session_id in self._rejected:
            raise RejectedError(f"{self._rejected[session_id]}; a new session is accepted")
        known = self._sessions.get(session_id)
        return known or restore_session(self._ledger, session_id, self._daemons)

    def _check_tree(self, request: SessionRequest, root: str) -> None:
        """Raise a RejectedError when another rank of the job dumps into another tree."""
        for other in self._sessions.values():
            theirs = other.plan.output.root
            if other.live and other.request.job_id == request.job_id and theirs != root:
                raise RejectedError(
                    f"job {request.job_id!r} dumps into {theirs}, and this rank's plan names "
                    f"{root}: two jobs have the same id; set RANKDUMP_JOB_ID to give each its own"
                )

    def _check_single_process(self, request: SessionRequest) -> None:
        for other in self._sessions.values():
            theirs = other.request
            same = (theirs.job_id, theirs.rank) == (request.job_id, request.rank)
            if same and theirs.session_id != request.session_id and other.live:
                raise RejectedError(
                    f"rank {request.rank} of job {request.job_id!r} is already "
                    f"connected as process {theirs.pid} on host {theirs.host!r}"
                )

    def _check_single_opening(self, request: SessionRequest) -> None:
        """Raise UnavailableError while another process of this host is about to be this rank.

        Two jobs with one id may begin at the same moment. The one whose rank connects first goes
        on, and the other is rejected when it tries again.
        """
        for theirs, _ in self._opened.values():
            same = (theirs.job_id, theirs.rank) == (request.job_id, request.rank)
            other = theirs.pid != request.pid and theirs.session_id != request.session_id
            if same and other and is_process_here(theirs.pid, theirs.host):
                raise UnavailableError(
                    f"process {theirs.pid} on host {theirs.host!r} is about to connect as rank "
                    f"{request.rank} of job {request.job_id!r}"
                )

    def _check_capacity(self, request: SessionRequest) -> None:
        self._expire()
        live = {session_id for session_id, session in self._sessions.items() if session.live}
        others = len(live.union(self._opened) - {request.session_id})
        fault = self._capacity_fault(others)
        if others >= self._max_sessions:
            fault = f"{others} sessions are open, and agent.max_sessions is {self._max_sessions}"
        if fault:
            raise ExhaustedError(f"rank {request.rank} of job {request.job_id!r}: {fault}")

    def _expire(self) -> None:
        """Remove sessions that were opened and never connected, if nothing of them is left."""
        before_s = self._clock() - CONNECT_TIMEOUT_S
        for session_id in [id_ for id_, (_, since_s) in self._opened.items() if since_s < before_s]:
            del self._opened[session_id]
            session = self._sessions.get(session_id)
            if session is None or session.live:
                continue
            session.mark_lost()
            if not session.over or session.watermark or session.iterations():
                continue
            del self._sessions[session_id]
            self._note_absent(session.request)
            try:
                self._ledger.withdraw(session_id)
            except sqlite3.Error as error:
                # Only logged, because a superfluous row does no harm.
                _logger.warning("session %s stays in the ledger: %s", session_id, error)

    def _note_absent(self, request: SessionRequest) -> None:
        message = (
            f"rank {request.rank} (process {request.pid} on host {request.host}) opened its "
            "session and never connected: nothing of it is in the tree"
        )
        log_about(_logger, request).warning(message)
        self._absent.append(message)

    def _forget_closed(self) -> None:
        closed = [session_id for session_id, session in self._sessions.items() if session.over]
        for session_id in closed[: max(0, len(closed) - MAX_CLOSED_SESSIONS)]:
            del self._sessions[session_id]


def _lock_tree(session: RankSession) -> None:
    """Lock the tree of a session, which may have released it since it was opened."""
    try:
        session.storage.lock.acquire()
    except BlockingIOError as error:
        raise UnavailableError(f"session {session.request.session_id!r}: {error}") from None
    except OSError:
        return  # without space, records are counted as dropped


def _prepare_tree(session: RankSession, request: SessionRequest) -> None:
    try:
        prepare_tree(session, request, read_wall_clock_us())
    except OSError as error:
        message = f"output root {session.plan.output.root!r} cannot be written"
        if not state_files.is_transient(error):
            raise RejectedError(f"{message}: {error}") from None
        if not state_files.is_no_space(error):
            text = f"rank {request.rank}: {message} at present: {error}"
            # Logged once, because the rank tries again at once, and then every few seconds.
            is_new = _recent_problems.is_new(f"{request.job_id}: {text}")
            level = logging.WARNING if is_new else logging.DEBUG
            log_about(_logger, request).log(level, "%s", text)
            raise UnavailableError(f"{message} at present: {error}") from None
        # Space may become free while the job runs; until then records are counted as dropped.
        session.has_metadata = False
        session.pending.problem = f"rank {request.rank}: no space for its metadata: {error}"

"""Sessions that are being opened, each in a thread of its own. If that takes long, the rank gets an
answer in time, and tries again.

A busy disk may delay the writes that open a session for longer than any rank waits. So the result
of an opening is kept for the rank's next attempt. A rank that gives up sends a final balance (lost
tensors, ends of iterations and of the session). All numbers in it are checked, and it is applied
when the session is open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from rankdump._core.session_protocol import IterationEnd, SessionEnd, SessionGrant, SessionRequest
from rankdump._core.status import (
    IterationStatus,
    SessionState,
    SessionStatus,
    describe_rejection,
    describe_waiting_ranks,
)
from rankdump.errors import (
    ExhaustedError,
    ProtocolError,
    RankdumpError,
    RejectedError,
    RetryableError,
)
from rankdump.wire.v1 import agent_pb2
from rankdumpd.agent.declarations import read_lost_tensors, read_metadata_frame
from rankdumpd.agent.records import FrameId
from rankdumpd.agent.session import registry
from rankdumpd.agent.session.balance import SessionTallies
from rankdumpd.agent.session.rank_session import make_session_status
from rankdumpd.server.logs import log_about

NEVER_OPEN_NOTE = "its session was not open when it ended: nothing of it is in the tree"


@dataclass(frozen=True, slots=True)
class FinalBalance:
    """Frames that a rank sent for its session when it gave up, and the counts in these frames."""

    frames: tuple[agent_pb2.Frame, ...]
    session: SessionStatus
    iterations: tuple[IterationStatus, ...]

    @property
    def lost(self) -> int:
        """Number of tensors that are lost."""
        return sum(sum(status.dropped.values()) for status in self.iterations)


def read_final_balance(request: SessionRequest, frames: Iterable[agent_pb2.Frame]) -> FinalBalance:
    """Return the final balance of a rank; ProtocolError when a frame cannot be part of one."""
    plan, frames = registry.read_checked_plan(request), tuple(frames)
    tallies, session_end = SessionTallies(), SessionEnd(0)
    for number, frame in enumerate(frames, 1):
        if frame.sequence != number:
            raise ProtocolError(f"frame {frame.sequence} where frame {number} was expected")
        if frame.HasField("lost"):
            lost = read_lost_tensors(FrameId(request.session_id, number), frame.lost)
            tallies.add((), (lost,))
            continue
        declaration = read_metadata_frame(frame, request.session_id).declaration
        if isinstance(declaration, IterationEnd):
            tallies.end(request, declaration, number)
        elif isinstance(declaration, SessionEnd):
            session_end = SessionEnd(
                declaration.iterations_seen, (*declaration.notes, NEVER_OPEN_NOTE)
            )
        else:
            raise ProtocolError(f"frame {number} is not allowed in the final balance of a rank")
    status = make_session_status(request, plan, SessionState.CLOSED, session_end)
    return FinalBalance(frames, status, tuple(tallies.statuses(request)))


ANSWER_TIMEOUT_S = 5.0
"""Longest time in seconds that an answer waits for an opening; ranks wait for 10 s."""
RESULT_RETENTION_S = 120.0
"""Seconds for which the result of a finished opening is kept for its rank."""
FINDING_RETENTION_S = 86400.0
"""Seconds for which an opening is a finding if it was rejected, or failed after its
rank gave up.
"""
WAITING_RETENTION_S = 30.0
"""Seconds for which a rank counts as waiting after a failed attempt to open its session; ranks try
again every 5 s.
"""
MAX_OPENINGS = 4096

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _SessionOpening:
    """An opening in progress, or a finished one whose result the rank has not fetched."""

    request: SessionRequest
    since_s: float
    done: threading.Event = field(default_factory=threading.Event)
    over_s: float = 0.0
    grant: SessionGrant | None = None
    error: Exception | None = None
    late: bool = False
    """Whether a rank was answered that the opening takes long."""
    balance: FinalBalance | None = None


@dataclass(frozen=True, slots=True)
class _WaitingRank:
    """A rank whose session could not be opened, and that tries again."""

    since_s: float
    """Time of the rank's first attempt."""
    tried_s: float
    why: str


class SessionOpenings:
    """At most one opening for each session; safe to use from several threads."""

    def __init__(
        self,
        open_one: Callable[[SessionRequest], SessionGrant],
        accept_balance: Callable[[str, FinalBalance], None],
    ) -> None:
        """`accept_balance` applies the final balance of a rank to its open session."""
        self._open_one, self._accept_balance = open_one, accept_balance
        self._lock = threading.Lock()
        self._openings: dict[str, _SessionOpening] = {}
        self._rejected: dict[tuple[str, int], tuple[float, str]] = {}
        """When and why the last opening of a rank was rejected, by job and rank."""
        self._waiting: dict[tuple[str, int], _WaitingRank] = {}

    @property
    def waiting_ranks(self) -> int:
        """Number of ranks whose sessions cannot be opened at present."""
        with self._lock:
            self._forget()
            return len(self._waiting)

    def open(self, request: SessionRequest) -> SessionGrant:
        """Return the grant, or a grant that says that the opening is in progress; raise an error of
        `open_one`.
        """
        while True:
            opening = self._get_or_begin(request)
            if not opening.done.wait(ANSWER_TIMEOUT_S):
                return self._note_slow(opening)
            with self._lock:
                if self._openings.get(request.session_id) is opening:
                    del self._openings[request.session_id]
            # The result for the request of another process does not apply to this request.
            if opening.request == request:
                if opening.error is not None:
                    raise opening.error
                assert opening.grant is not None
                return opening.grant

    def take_final_balance(self, request: SessionRequest, balance: FinalBalance) -> None:
        """Note that a rank gave up; its final balance is applied when its session is open."""
        log_about(_logger, request).error(
            "rank %d gave up (process %d on host %s): its session was not open when it ended, and "
            "%d tensors are lost",
            request.rank,
            request.pid,
            request.host,
            balance.lost,
        )
        opening = self._get_or_begin(request, balance)
        if opening.request != request:
            _logger.warning(
                "session %s belongs to another process: the final balance is discarded",
                request.session_id,
            )

    def statuses(self) -> tuple[tuple[SessionStatus, ...], tuple[IterationStatus, ...]]:
        """Return the status of sessions that are not open yet, and the final balances of their
        ranks.
        """
        with self._lock:
            balances = [opening.balance for opening in self._openings.values() if opening.balance]
        iterations = tuple(status for each in balances for status in each.iterations)
        return tuple(each.session for each in balances), iterations

    def findings(self) -> list[str]:
        """Return the sessions that take long to open, or were not open in time, and the ranks that
        were rejected or wait.
        """
        now_s = time.monotonic()
        with self._lock:
            self._forget()
            openings = list(self._openings.values())
            rejected = [(job, rank, why) for (job, rank), (_, why) in self._rejected.items()]
            waiting = dict(self._waiting)
        opening = [_describe_opening(each, now_s) for each in openings if each.late or each.balance]
        return opening + _describe_rejections(rejected) + _describe_waiting(waiting, now_s)

    def _get_or_begin(
        self, request: SessionRequest, balance: FinalBalance | None = None
    ) -> _SessionOpening:
        with self._lock:
            self._forget()
            opening = self._openings.get(request.session_id)
            # A finished opening accepts no balance, so a new one is begun for the balance.
            begins = opening is None or (balance is not None and opening.done.is_set())
            if opening is None or begins:
                if len(self._openings) >= MAX_OPENINGS:
                    raise ExhaustedError(f"{MAX_OPENINGS} sessions are being opened already")
                opening = _SessionOpening(request, time.monotonic())
                self._openings[request.session_id] = opening
            if opening.request == request:
                opening.balance = balance or opening.balance
        if begins:
            threading.Thread(
                target=self._run, args=(opening,), name="rankdumpd-opening", daemon=True
            ).start()
        return opening

    def _run(self, opening: _SessionOpening) -> None:
        try:
            opening.grant = self._open_one(opening.request)
        except RankdumpError as error:
            opening.error = error
        except Exception as error:  # `open` raises it if the rank tries again
            _logger.exception("opening session %s failed", opening.request.session_id)
            opening.error = error
        request, took_s = opening.request, time.monotonic() - opening.since_s
        with self._lock:
            opening.over_s = time.monotonic()
            balance, late = opening.balance, opening.late
            self._note_rejection(opening)
            self._note_waiting(opening)
            if balance and not opening.error:
                self._openings.pop(request.session_id, None)
            opening.done.set()
        if late or balance:
            outcome = f"failed: {opening.error}" if opening.error else "is open"
            log_about(_logger, request).warning(
                "rank %d: its session %s, after %.0f s", request.rank, outcome, took_s
            )
        if balance and not opening.error:
            try:
                self._accept_balance(request.session_id, balance)
            except RankdumpError as error:
                log_about(_logger, request).error(
                    "rank %d: its final balance was not accepted: %s", request.rank, error
                )

    def _note_rejection(self, opening: _SessionOpening) -> None:
        request = opening.request
        self._rejected.pop((request.job_id, request.rank), None)
        # If the rank sent a final balance, the finding about that says why it was lost.
        if isinstance(opening.error, RejectedError) and not opening.balance:
            found = opening.over_s, str(opening.error)
            self._rejected[request.job_id, request.rank] = found
            if len(self._rejected) > MAX_OPENINGS:
                del self._rejected[next(iter(self._rejected))]

    def _note_waiting(self, opening: _SessionOpening) -> None:
        place = opening.request.job_id, opening.request.rank
        before = self._waiting.pop(place, None)
        # A rank that has sent a final balance has given up.
        if isinstance(opening.error, RetryableError) and not opening.balance:
            since_s = before.since_s if before is not None else opening.since_s
            self._waiting[place] = _WaitingRank(since_s, opening.over_s, str(opening.error))
            if len(self._waiting) > MAX_OPENINGS:
                del self._waiting[next(iter(self._waiting))]

    def _note_slow(self, opening: _SessionOpening) -> SessionGrant:
        request, since_s = opening.request, time.monotonic() - opening.since_s
        with self._lock:
            first, opening.late = not opening.late, True
        if first:
            log_about(_logger, request).warning(
                "rank %d: opening its session takes long: a disk is busy", request.rank
            )
        return SessionGrant(b"", 0, 0, opening=f"a disk is busy, for {since_s:.0f} s so far")

    def _forget(self) -> None:
        now_s = time.monotonic()
        for session_id, opening in list(self._openings.items()):
            kept_s = FINDING_RETENTION_S if opening.balance else RESULT_RETENTION_S
            if opening.done.is_set() and now_s - opening.over_s > kept_s:
                del self._openings[session_id]
        for place, (rejected_s, _) in list(self._rejected.items()):
            if now_s - rejected_s > FINDING_RETENTION_S:
                del self._rejected[place]
        for place, each in list(self._waiting.items()):
            if now_s - each.tried_s > WAITING_RETENTION_S:
                del self._waiting[place]


def _describe_waiting(waiting: Mapping[tuple[str, int], _WaitingRank], now_s: float) -> list[str]:
    """Return a sentence about the ranks of a job that wait for the same reason."""
    ranks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for (job_id, rank), each in waiting.items():
        ranks[job_id, each.why].append(rank)
    return [
        describe_waiting_ranks(found, why, now_s - min(waiting[job_id, r].since_s for r in found))
        for (job_id, why), found in ranks.items()
    ]


def _describe_rejections(rejected: Iterable[tuple[str, int, str]]) -> list[str]:
    """Return a sentence for all ranks of a job that were rejected for the same reason."""
    ranks: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for job_id, rank, why in rejected:
        ranks[job_id, why].append(rank)
    return [describe_rejection(found, why) for (_, why), found in ranks.items()]


def _describe_opening(opening: _SessionOpening, now_s: float) -> str:
    request = opening.request
    rank = f"rank {request.rank} (process {request.pid} on host {request.host})"
    lasting = f"its session has been opening for {now_s - opening.since_s:.0f} s"
    if opening.balance:
        cause = lasting
        if opening.error:
            cause = f"its session could not be opened: {opening.error}"
        return f"{rank} gave up: {cause}; {opening.balance.lost} tensors are lost"
    if opening.done.is_set():
        return f"{rank} has not connected since its session was opened late"
    return f"{rank}: {lasting}"

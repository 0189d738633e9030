"""Sessions that are being opened: a rank hears in time that it takes long, and asks again.

A disk that is busy may hold up what is written before a session is open for longer than any rank
waits. So each opening goes on in a thread of its own, and what came of it is kept for the next try.
A rank that waits no longer leaves what it would have sent, which is taken when the session is open.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rankdump.contract.errors import ExhaustedError, RankdumpError
from rankdump.contract.exchange import SessionGrant, SessionRequest
from rankdump.contract.status import IterationStatus, SessionStatus
from rankdumpd.agent.final_balance import FinalBalance
from rankdumpd.logs import about

ANSWER_S = 5.0
"""Longest an answer waits for an opening: ranks wait for 10 s."""
KEPT_S = 120.0
"""Time for which an opening that is over waits for its rank."""
SHOWN_S = 86400.0
"""Time for which people hear of one that failed when its rank had given up."""
MOST = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Opening:
    """One that goes on, or that is over and was not asked for since."""

    request: SessionRequest
    since_s: float
    done: threading.Event = field(default_factory=threading.Event)
    over_s: float = 0.0
    grant: SessionGrant | None = None
    error: Exception | None = None
    late: bool = False
    """Whether a rank heard that it takes long."""
    left: FinalBalance | None = None


class Openings:
    """One at most for each session; safe to use from several threads."""

    def __init__(
        self,
        open_one: Callable[[SessionRequest], SessionGrant],
        take_left: Callable[[str, FinalBalance], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`take_left` gives a session that is open what its rank left."""
        self._open_one, self._take_left, self._clock = open_one, take_left, clock
        self._lock = threading.Lock()
        self._openings: dict[str, _Opening] = {}

    def open(self, request: SessionRequest) -> SessionGrant:
        """Let a rank in or back in, or say that this goes on; raises what `open_one` does."""
        while True:
            opening = self._begun(request)
            if not opening.done.wait(ANSWER_S):
                return self._takes_long(opening)
            with self._lock:
                if self._openings.get(request.session_id) is opening:
                    del self._openings[request.session_id]
            # One that another process asked for tells this one nothing.
            if opening.request == request:
                return _result(opening)

    def leave(self, request: SessionRequest, left: FinalBalance) -> None:
        """Take note that a rank waits no longer; what it left is taken when its session is open."""
        _log.error(
            "rank %d gave up (process %d on host %s): its session was not open when it ended, and "
            "%d tensors are lost",
            request.rank,
            request.pid,
            request.host,
            left.lost,
            extra=about(request),
        )
        opening = self._begun(request, left)
        if opening.request != request:
            _log.warning("session %s is another's: what was left is not taken", request.session_id)

    def statuses(self) -> tuple[tuple[SessionStatus, ...], tuple[IterationStatus, ...]]:
        """Return the sessions that are not open yet and the balances that their ranks left."""
        with self._lock:
            left = [opening.left for opening in self._openings.values() if opening.left]
        iterations = tuple(status for each in left for status in each.iterations)
        return tuple(each.session for each in left), iterations

    def findings(self) -> list[str]:
        """Return whose session takes long to be opened, or was not open in time."""
        now_s = self._clock()
        with self._lock:
            openings = list(self._openings.values())
        return [_sentence(each, now_s) for each in openings if each.late or each.left]

    def _begun(self, request: SessionRequest, left: FinalBalance | None = None) -> _Opening:
        with self._lock:
            self._forget()
            opening = self._openings.get(request.session_id)
            # What is over takes nothing any more: once more, for what was left.
            begins = opening is None or (left is not None and opening.done.is_set())
            if opening is None or begins:
                if len(self._openings) >= MOST:
                    raise ExhaustedError(f"{MOST} sessions are being opened already")
                opening = _Opening(request, self._clock())
                self._openings[request.session_id] = opening
            if opening.request == request:
                opening.left = left or opening.left
        if begins:
            threading.Thread(
                target=self._run, args=(opening,), name="rankdumpd-opening", daemon=True
            ).start()
        return opening

    def _run(self, opening: _Opening) -> None:
        try:
            opening.grant = self._open_one(opening.request)
        except RankdumpError as error:
            opening.error = error
        except Exception as error:  # told to whoever asks, if anybody still does
            _log.exception("opening of session %s", opening.request.session_id)
            opening.error = error
        request, took_s = opening.request, self._clock() - opening.since_s
        with self._lock:
            opening.over_s = self._clock()
            left, late = opening.left, opening.late
            if left and not opening.error:
                self._openings.pop(request.session_id, None)
            opening.done.set()
        if late or left:
            outcome = f"failed: {opening.error}" if opening.error else "is open"
            _log.warning(
                "rank %d: its session %s, after %.0f s",
                request.rank,
                outcome,
                took_s,
                extra=about(request),
            )
        if left and not opening.error:
            try:
                self._take_left(request.session_id, left)
            except RankdumpError as error:
                _log.error("rank %d: what it left: %s", request.rank, error, extra=about(request))

    def _takes_long(self, opening: _Opening) -> SessionGrant:
        request, since_s = opening.request, self._clock() - opening.since_s
        with self._lock:
            first, opening.late = not opening.late, True
        if first:
            _log.warning(
                "rank %d: opening its session takes long: a disk is busy",
                request.rank,
                extra=about(request),
            )
        return SessionGrant(b"", 0, 0, opening=f"a disk is busy, for {since_s:.0f} s so far")

    def _forget(self) -> None:
        now_s = self._clock()
        for who, opening in list(self._openings.items()):
            kept_s = SHOWN_S if opening.left else KEPT_S
            if opening.done.is_set() and now_s - opening.over_s > kept_s:
                del self._openings[who]


def _result(opening: _Opening) -> SessionGrant:
    if opening.error is not None:
        raise opening.error
    assert opening.grant is not None
    return opening.grant


def _sentence(opening: _Opening, now_s: float) -> str:
    request = opening.request
    who = f"rank {request.rank} (process {request.pid} on host {request.host})"
    if opening.left:
        if opening.error:
            why = f"its session could not be opened: {opening.error}"
        else:
            why = f"its session has been opening for {now_s - opening.since_s:.0f} s"
        return f"{who} gave up: {why}; {opening.left.lost} tensors are lost"
    if opening.done.is_set():
        return f"{who} has not asked again since its session was opened late"
    return f"{who}: its session has been opening for {now_s - opening.since_s:.0f} s"

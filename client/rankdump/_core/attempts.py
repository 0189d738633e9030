"""Attempts of a job: their numbers, the sessions of a rank that belong to each, and how they ended.
Pure: no clock, no disk, no network.

An attempt is what runs between two starts of a rank's process. torchrun counts the restarts of a
job (`TORCHELASTIC_RESTART_COUNT`); without its count, processes of a rank that begin a session one
after another are attempts. The agent numbers them; the session files of the tree have the numbers.
Records have no attempt of their own: the session that had begun last before the time stamp of a
record is the one that sent it, because a rank has one session at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import pairwise

from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.tree_session import TreeSession


def number_attempt(request: SessionRequest, earlier: Iterable[TreeSession]) -> int:
    """Return the attempt that a new session of a rank belongs to.

    `earlier` are the session files of that rank. A session of another process is another attempt;
    the launcher's count is exceeded where a whole job was started again under the same id.
    """
    process = request.host, request.pid, request.process_us
    attempt = request.attempt
    for each in earlier:
        known = each.status
        if known.job_id != request.job_id:
            continue
        same = (known.host, known.pid, each.process_us) == process
        if same or known.session_id == request.session_id:
            return known.attempt
        attempt = max(attempt, known.attempt + 1)
    return attempt


def order_sessions(sessions: Iterable[TreeSession]) -> tuple[TreeSession, ...]:
    """Return sessions by rank, those of a rank in the order in which they began.

    A session without an end that another one followed is lost: its agent ended before it did.
    """
    ordered = sorted(sessions, key=lambda each: (each.status.rank, each.status.started_us))
    for at, (each, after) in enumerate(pairwise(ordered)):
        status = each.status
        if status.state is SessionState.OPEN and status.rank == after.status.rank:
            ordered[at] = replace(each, status=replace(status, state=SessionState.LOST))
    return tuple(ordered)


class SessionPeriods:
    """The session of each rank at each time."""

    def __init__(self, sessions: Iterable[SessionStatus] = ()) -> None:
        """Sessions without a time are ignored."""
        self._sessions: defaultdict[int, list[SessionStatus]] = defaultdict(list)
        for session in sorted(sessions, key=lambda each: each.started_us):
            if session.started_us:
                self._sessions[session.rank].append(session)
        self._starts = {
            rank: [session.started_us for session in own] for rank, own in self._sessions.items()
        }

    @property
    def attempts(self) -> tuple[int, ...]:
        """Numbers of the attempts, ascending."""
        return tuple(sorted({s.attempt for own in self._sessions.values() for s in own}))

    def find_session(self, rank: int, timestamp_us: int) -> SessionStatus | None:
        """Return the session that a record of this time belongs to; None when it is not known."""
        at = bisect_right(self._starts.get(rank, ()), timestamp_us)
        return self._sessions[rank][at - 1] if at else None

    def find_attempt(self, rank: int, timestamp_us: int) -> int:
        """Return the attempt of a record; 0 when it is not known."""
        session = self.find_session(rank, timestamp_us)
        return session.attempt if session is not None else 0


def describe_crash(
    session: SessionStatus, iterations: Iterable[IterationStatus], *, is_followed: bool
) -> str:
    """Return how a session ended with an error, as `crashed in iteration 2`; empty without one.

    `iterations` are the balances of its attempt. A lost session has crashed if another attempt
    follows it (`is_followed`); otherwise its rank may still come back.
    """
    if session.raised_in is not None:
        return f"crashed in iteration {session.raised_in}"
    if session.state is not SessionState.LOST or not is_followed:
        return ""
    ended: Mapping[int, bool] = {each.iteration: each.complete for each in iterations}
    open_iterations = [number for number, complete in ended.items() if not complete]
    if open_iterations:
        return f"crashed in iteration {max(open_iterations)}"
    return f"crashed after iteration {max(ended)}" if ended else "crashed before any iteration"

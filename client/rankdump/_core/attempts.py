"""Attempts of a job: their numbers, the sessions of a rank that belong to each, and how they ended.
Pure: no clock, no disk, no network.

An attempt is what runs between two starts of a rank's process. torchrun counts the restarts of a
job (`TORCHELASTIC_RESTART_COUNT`); without its count, processes of a rank that begin a session one
after another are attempts. The agent numbers them and adds a line to
`rank_N/.dump_metadata/sessions.jsonl` whenever a session begins or ends; the last line of a session
counts. Records have no attempt of their own: the session that had begun last before the time stamp
of a record is the one that sent it, because a rank has one session at a time.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rankdump._core.json_values import make_plain, read_json
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump.errors import CorruptedError

SESSIONS_FILE = "sessions.jsonl"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """State of a session when it began or ended."""

    session: SessionStatus
    process_us: int = 0
    """When its process loaded the library; 0 when it is not known."""
    unfinished: tuple[IterationStatus, ...] = ()
    """Balances of the iterations that had not ended when the session did."""

    def to_line(self) -> str:
        """Return its line, without a line end."""
        return json.dumps(self, default=make_plain)

    @staticmethod
    def from_line(line: str) -> SessionRecord:
        """Read a line; CorruptedError when it is not valid."""
        try:
            return read_json(
                SessionRecord, json.loads(line), defaults=True, unknown=True, minimum=0
            )
        except (ValueError, RecursionError) as error:
            raise CorruptedError(f"a line of {SESSIONS_FILE} cannot be read: {error}") from None


def number_attempt(request: SessionRequest, earlier: Iterable[SessionRecord]) -> int:
    """Return the attempt that a new session of a rank belongs to.

    `earlier` are the lines of that rank. A session of another process is another attempt; the
    launcher's count is exceeded where a whole job was started again under the same id.
    """
    process = request.host, request.pid, request.process_us
    attempt = request.attempt
    for record in earlier:
        known = record.session
        if known.job_id != request.job_id:
            continue
        same = (known.host, known.pid, record.process_us) == process
        if same or known.session_id == request.session_id:
            return known.attempt
        attempt = max(attempt, known.attempt + 1)
    return attempt


def merge_records(records: Iterable[SessionRecord]) -> tuple[SessionRecord, ...]:
    """Return the last record of each session of one rank, in the order in which they began.

    A session without an end that another one followed is lost: its agent ended before it did.
    """
    last = {record.session.session_id: record for record in records}
    ordered = sorted(last.values(), key=lambda each: each.session.started_us)
    for at, record in enumerate(ordered[:-1]):
        if record.session.state is SessionState.OPEN:
            lost = replace(record.session, state=SessionState.LOST)
            ordered[at] = replace(record, session=lost)
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

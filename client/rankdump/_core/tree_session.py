"""Session files of a tree: the state of each session that wrote to the tree, which tells the
attempts of a rank, and the addresses of the session's daemons, with which a reader of the tree
finds the running job. Pure: names, JSON and selection.

The files are in the folder `.rankdump/sessions` of the root, one JSON file for each session; the
rank's agent replaces it when the state changes. A file says what was true when it was written:
after its agent has ended, an open session is no longer open, so a reader asks the agent first.

An attempt is what runs between two starts of a rank's process. torchrun counts the restarts of a
job (`TORCHELASTIC_RESTART_COUNT`); without that count, each process of a rank that begins a session
after another one is a new attempt. The agent numbers the attempts, and the session files have the
numbers. Records do not name their attempt: because a rank has one session at a time, a record
belongs to the session that began last before the record's time stamp.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._core.json_values import make_plain, read_json
from rankdump._core.session_protocol import SessionRequest
from rankdump._core.status import IterationStatus, SessionState, SessionStatus
from rankdump._core.tree_root import STATE_FOLDER
from rankdump.errors import CorruptedError

SESSIONS_FOLDER = f"{STATE_FOLDER}/sessions"
MAX_FILE_BYTES = 1 << 20
"""Maximum size of a session file; a larger file is not one."""
_VERSION = 1
_DIGEST_BYTES = 6


@dataclass(frozen=True, slots=True)
class TreeSession:
    """Contents of one session file."""

    status: SessionStatus
    changed_us: int = 0
    """Time of the last change of the session's state, in microseconds since the epoch on the
    agent's clock.
    """
    agent: str = ""
    """Address of the session's agent; empty if no other process can use it."""
    coordinator: str = ""
    """Address of the coordinator that the agent reports to; empty if there is none."""
    agent_host: str = ""
    """Name of the agent's host, on which a `unix:` address is valid."""
    process_us: int = 0
    """Time at which the rank's process loaded the library, in microseconds since the epoch; 0 if
    unknown.
    """
    unfinished: tuple[IterationStatus, ...] = ()
    """Balances of the iterations that had not ended when the session ended."""


class DaemonAddresses(NamedTuple):
    """The fields of a session file that name the daemons of the session."""

    agent: str = ""
    coordinator: str = ""
    agent_host: str = ""


def make_session_prefix(rank: int) -> str:
    """Return the common prefix of the names of a rank's session files."""
    return f"rank_{rank}."


def make_session_file_name(status: SessionStatus) -> str:
    """Return the name of a session's file: its rank, and a digest of its ids."""
    key = f"{status.job_id}\0{status.session_id}".encode(errors="surrogateescape")
    digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()
    return f"{make_session_prefix(status.rank)}{digest}.json"


def format_tree_session(session: TreeSession) -> str:
    """Return the contents of a session file."""
    body = {"version": _VERSION, **make_plain(session)}
    return json.dumps(body, default=make_plain) + "\n"


def parse_tree_session(text: str | bytes) -> TreeSession:
    """Parse a session file; CorruptedError names the fault."""
    try:
        body = json.loads(text)
        if body["version"] != _VERSION:
            raise CorruptedError(f"version {body['version']!r} of a session file is not supported")
        return read_json(TreeSession, body, defaults=True, unknown=True, minimum=0)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(f"not a session file: {error!r}") from None


def update_session(before: TreeSession, now: TreeSession) -> TreeSession:
    """Return the new contents of a session file; the object `before` if nothing has changed.

    What the file says about the end of the session is kept, because an agent that was restarted
    since does not know it.
    """
    status, known = now.status, before.status
    if status.state is known.state:
        raised_in = known.raised_in if status.raised_in is None else status.raised_in
        ended_by = status.ended_by or known.ended_by
        now = replace(now, status=replace(status, raised_in=raised_in, ended_by=ended_by))
    return before if replace(now, changed_us=before.changed_us) == before else now


def select_running_sessions(sessions: Sequence[TreeSession]) -> tuple[TreeSession, ...]:
    """Return the sessions of the job that changed last; empty if that job has ended.

    A job has ended when the newest session of each rank is closed.
    """
    newest: dict[tuple[str, int], TreeSession] = {}
    for each in sorted(sessions, key=lambda each: each.changed_us):
        newest[each.status.job_id, each.status.rank] = each
    running = [each for each in newest.values() if each.status.state is not SessionState.CLOSED]
    if not running:
        return ()
    job = max(running, key=lambda each: each.changed_us).status.job_id
    return tuple(each for each in sessions if each.status.job_id == job)


def list_addresses(sessions: Sequence[TreeSession], host: str) -> tuple[str, tuple[str, ...]]:
    """Return the address of the coordinator and those of the agents that can be reached from a
    host; empty if there is none.
    """
    near = sorted(sessions, key=lambda each: each.changed_us, reverse=True)
    coordinators = (_keep_reachable(each.coordinator, each.agent_host, host) for each in near)
    agents = (_keep_reachable(each.agent, each.agent_host, host) for each in near)
    return next(filter(None, coordinators), ""), tuple(dict.fromkeys(filter(None, agents)))


def _keep_reachable(address: str, agent_host: str, host: str) -> str:
    """Return an address; empty for a socket of another host."""
    return "" if is_socket_address(address) and agent_host != host else address


def number_attempt(request: SessionRequest, earlier: Iterable[TreeSession]) -> int:
    """Return the number of the attempt that a new session of a rank belongs to.

    `earlier` are the session files of the rank. A session of another process is another attempt.
    The number is higher than the launcher's count if a whole job was started again under the same
    id.
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
    """Return sessions sorted by rank, and for each rank by their begin.

    A session that has no end although another one followed it is marked as lost: its agent ended
    before it.
    """
    ordered = sorted(sessions, key=lambda each: (each.status.rank, each.status.started_us))
    for at, (each, after) in enumerate(pairwise(ordered)):
        status = each.status
        if status.state is SessionState.OPEN and status.rank == after.status.rank:
            ordered[at] = replace(each, status=replace(status, state=SessionState.LOST))
    return tuple(ordered)


class SessionPeriods:
    """Index that finds the session of a rank at a given time."""

    def __init__(self, sessions: Iterable[SessionStatus] = ()) -> None:
        """Sessions without a start time are ignored."""
        self._sessions: defaultdict[int, list[SessionStatus]] = defaultdict(list)
        for session in sorted(sessions, key=lambda each: each.started_us):
            if session.started_us:
                self._sessions[session.rank].append(session)
        self._starts = {
            rank: [session.started_us for session in own] for rank, own in self._sessions.items()
        }

    @property
    def attempts(self) -> tuple[int, ...]:
        """Numbers of all attempts, ascending."""
        return tuple(sorted({s.attempt for own in self._sessions.values() for s in own}))

    def find_session(self, rank: int, timestamp_us: int) -> SessionStatus | None:
        """Return the session that a record with this time stamp belongs to; None if unknown."""
        at = bisect_right(self._starts.get(rank, ()), timestamp_us)
        return self._sessions[rank][at - 1] if at else None

    def find_attempt(self, rank: int, timestamp_us: int) -> int:
        """Return the attempt that a record with this time stamp belongs to; 0 if unknown."""
        session = self.find_session(rank, timestamp_us)
        return session.attempt if session is not None else 0


def describe_crash(
    session: SessionStatus, iterations: Iterable[IterationStatus], *, is_followed: bool
) -> str:
    """Return a text such as `crashed in iteration 2` for a session that an error ended; else empty.

    `iterations` are the balances of the session's attempt. A lost session has crashed if another
    attempt follows it (`is_followed`); otherwise the rank may still come back.
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

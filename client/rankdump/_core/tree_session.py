"""Session files of a tree: the state of each session that wrote to it, so that the attempts of a
rank are known, and the addresses of its daemons, so that a reader of the tree finds the live job.
Pure: names, JSON and selection.

They are in the folder `.rankdump/sessions` of the root, one JSON file for each session, which the
agent of the rank replaces when the state changes. A file states what was true when it was written:
after the end of its agent an open session is no longer open, so a reader asks the agent first.

An attempt is what runs between two starts of a rank's process. torchrun counts the restarts of a
job (`TORCHELASTIC_RESTART_COUNT`); without its count, processes of a rank that begin a session one
after another are attempts. The agent numbers them; the session files have the numbers. Records have
no attempt of their own: the session that had begun last before the time stamp of a record is the
one that sent it, because a rank has one session at a time.
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
"""A larger file is not a session file."""
_VERSION = 1
_DIGEST_BYTES = 6


@dataclass(frozen=True, slots=True)
class TreeSession:
    """One session file."""

    status: SessionStatus
    changed_us: int = 0
    """When its state changed last, in microseconds since the epoch on the agent's clock."""
    agent: str = ""
    """Address of its agent; empty when the agent has none that others can use."""
    coordinator: str = ""
    """Address of the coordinator that the agent reports to; empty without one."""
    agent_host: str = ""
    """Name of the agent's host, where a `unix:` address is valid."""
    process_us: int = 0
    """When the process of the rank loaded the library; 0 when it is not known."""
    unfinished: tuple[IterationStatus, ...] = ()
    """Balances of the iterations that had not ended when the session did."""


class DaemonAddresses(NamedTuple):
    """The fields of a session file that name the daemons of the session."""

    agent: str = ""
    coordinator: str = ""
    agent_host: str = ""


def make_session_prefix(rank: int) -> str:
    """Return how the names of the session files of a rank begin."""
    return f"rank_{rank}."


def make_session_file_name(status: SessionStatus) -> str:
    """Return the name of the file of a session: its rank, and a digest of its ids."""
    key = f"{status.job_id}\0{status.session_id}".encode(errors="surrogateescape")
    digest = hashlib.blake2b(key, digest_size=_DIGEST_BYTES).hexdigest()
    return f"{make_session_prefix(status.rank)}{digest}.json"


def format_tree_session(session: TreeSession) -> str:
    """Return the contents of a session file."""
    body = {"version": _VERSION, **make_plain(session)}
    return json.dumps(body, default=make_plain) + "\n"


def parse_tree_session(text: str | bytes) -> TreeSession:
    """Read a session file back; CorruptedError names what is wrong with it."""
    try:
        body = json.loads(text)
        if body["version"] != _VERSION:
            raise CorruptedError(f"version {body['version']!r} of a session file is not supported")
        return read_json(TreeSession, body, defaults=True, unknown=True, minimum=0)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise CorruptedError(f"not a session file: {error!r}") from None


def update_session(before: TreeSession, now: TreeSession) -> TreeSession:
    """Return what a session file must contain: the same object when nothing has changed.

    What the file has about the end of the session stays: an agent that was restarted since does not
    know it.
    """
    status, known = now.status, before.status
    if status.state is known.state:
        raised_in = known.raised_in if status.raised_in is None else status.raised_in
        ended_by = status.ended_by or known.ended_by
        now = replace(now, status=replace(status, raised_in=raised_in, ended_by=ended_by))
    return before if replace(now, changed_us=before.changed_us) == before else now


def select_running_sessions(sessions: Sequence[TreeSession]) -> tuple[TreeSession, ...]:
    """Return the sessions of the job that changed last and has not ended; empty without one.

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
    """Return the address of the coordinator, and those of the agents, that can be asked from a
    host; empty where there is none.
    """
    near = sorted(sessions, key=lambda each: each.changed_us, reverse=True)
    coordinators = (_keep_reachable(each.coordinator, each.agent_host, host) for each in near)
    agents = (_keep_reachable(each.agent, each.agent_host, host) for each in near)
    return next(filter(None, coordinators), ""), tuple(dict.fromkeys(filter(None, agents)))


def _keep_reachable(address: str, agent_host: str, host: str) -> str:
    """Return an address, or nothing for a socket of another host."""
    return "" if is_socket_address(address) and agent_host != host else address


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

"""Writer of the session files of trees, which contain the addresses of the live daemons and the
state of every session.

A separate thread writes the files, because a tree's disk may be busy while a rank waits for its
answer; only the first state of a session is written before its rank gets an answer. A file that
cannot be written is tried again. A file that does not exist any more is not created again, because
its tree may have been removed.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable

from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._core.log_once import LogOnce
from rankdump._core.tree_session import DaemonAddresses
from rankdumpd.agent.records import read_wall_clock_us
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.storage import rank_files
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import build_log_fields

RETRY_INTERVAL_S = 1.0
"""Seconds before a file that could not be written is tried again."""
END_INTERVAL_S = 0.2
MAX_END_WAIT_US = 30_000_000
"""Microseconds for which the process of a lost session is watched, because its exit code is known
only after its launcher has waited for it.
"""
_ANY_ADDRESS = ("0.0.0.0", "[::]", "")

_logger = logging.getLogger(__name__)


def find_client_address(listen: str, host: str) -> str:
    """Return the address at which clients reach a server; empty when its port is not known.

    >>> find_client_address("0.0.0.0:7420", "node7"), find_client_address("unix:/a.sock", "node7")
    ('node7:7420', 'unix:/a.sock')
    >>> find_client_address("127.0.0.1:0", "node7")
    ''
    """
    if is_socket_address(listen):
        return listen
    name, _, port = listen.rpartition(":")
    if port in ("", "0"):
        return ""
    return f"{host}:{port}" if name in _ANY_ADDRESS else listen


def find_daemons(listen: str, coordinator: str, host: str | None = None) -> DaemonAddresses:
    """Return the daemon addresses that an agent writes to session files; `host` is this host by
    default.
    """
    host = socket.gethostname() if host is None else host
    return DaemonAddresses(find_client_address(listen, host), coordinator, host)


class SessionFiles:
    """Writes the session files of all trees of one agent; safe to use from several threads."""

    def __init__(
        self,
        *,
        on_end: Callable[[RankSession], None] | None = None,
        clock_us: Callable[[], int] = read_wall_clock_us,
    ) -> None:
        """`on_end` is called when it becomes known how the process of a lost session ended."""
        self._on_end, self._clock_us = on_end, clock_us
        self._lost: dict[str, tuple[RankSession, int]] = {}
        """Lost sessions whose process is watched, each with the time since when, by session id."""
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[RankSession, int]] = {}
        """Sessions that may have changed, each with the time of the change, by session id."""
        self._failures = LogOnce(_logger)
        self._thread = BackgroundThread(self._run, "rankdumpd-session-files")

    def update(self, session: RankSession) -> None:
        """Let the thread write the file of a session that may have changed."""
        with self._changed:
            self._waiting[session.request.session_id] = (session, self._clock_us())
            self._changed.notify_all()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write the waiting files, and stop; return whether that took no longer than
        `timeout_s`.
        """
        self._thread.request_stop()
        with self._changed:
            self._changed.notify_all()
        return self._thread.join(timeout_s)

    def _run(self) -> None:
        failed = False
        while True:
            with self._changed:
                if failed and not self._thread.is_stopping:
                    self._changed.wait(RETRY_INTERVAL_S)
                pause_s = END_INTERVAL_S if self._lost else None
                self._changed.wait_for(lambda: self._waiting or self._thread.is_stopping, pause_s)
                # Read before the sessions are taken, so that all changes until the stop are
                # written.
                stopping = self._thread.is_stopping
                waiting, self._waiting = self._waiting, {}
            failed = False
            for session_id, (session, changed_us) in waiting.items():
                if not self._write(session, changed_us):
                    failed = True
                    with self._changed:
                        self._waiting.setdefault(session_id, (session, changed_us))
            self._check_ends()
            if stopping:
                return

    def _check_ends(self) -> None:
        """Write how the processes of lost sessions ended, as soon as that is known."""
        now_us = self._clock_us()
        for session_id, (session, since_us) in list(self._lost.items()):
            found = session.find_process_end()
            if found:
                self._write(session, now_us)
                if self._on_end is not None:
                    self._on_end(session)
            if now_us - since_us > MAX_END_WAIT_US:
                session.release_process()
            if not session.may_learn_end:
                del self._lost[session_id]

    def _write(self, session: RankSession, changed_us: int) -> bool:
        """Write the file of a session if it changed; return False when it has to be tried again."""
        request, tree = session.request, session.storage.tree
        if session.may_learn_end:
            self._lost.setdefault(request.session_id, (session, changed_us))
        try:
            rank_files.replace_session_file(tree, session.make_tree_session(changed_us))
        except FileNotFoundError:
            return True
        except OSError as error:
            message = f"the session file of rank {request.rank} cannot be written: {error}"
            root, extra = str(tree.root), build_log_fields(request)
            self._failures.log(logging.WARNING, message, about=root, extra=extra)
            return False
        return True

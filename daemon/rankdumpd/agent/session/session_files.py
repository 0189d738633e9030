"""Writer of the session files of trees, which name the live daemon and the state of every session.

A thread writes them, because a tree's disk may be busy while a rank waits for its answer. A file
that cannot be written is tried again; nothing else depends on it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable

from rankdump._core.daemon_endpoint import is_socket_address
from rankdump._core.log_once import LogOnce
from rankdump._core.status import SessionStatus
from rankdump._core.tree_session import (
    SESSIONS_FOLDER,
    TreeSession,
    format_tree_session,
    make_session_file_name,
)
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.logs import build_log_fields

RETRY_INTERVAL_S = 1.0
"""Pause before a file that could not be written is tried again."""
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


def _read_wall_clock_us() -> int:
    return time.time_ns() // 1000


class SessionFiles:
    """Session files of all trees of one agent; safe to use from several threads."""

    def __init__(
        self,
        listen: str,
        coordinator: str,
        *,
        host: str | None = None,
        clock_us: Callable[[], int] = _read_wall_clock_us,
    ) -> None:
        """`listen` and `coordinator` are the addresses of the agent and of its coordinator."""
        self._host = socket.gethostname() if host is None else host
        self._agent = find_client_address(listen, self._host)
        self._coordinator, self._clock_us = coordinator, clock_us
        self._changed = threading.Condition()
        self._waiting: dict[str, tuple[RankSession, int]] = {}
        """Sessions that may have changed, and when, by their ids."""
        self._written: dict[str, SessionStatus] = {}
        self._stopping = False
        self._failures = LogOnce(_logger)
        self._thread = BackgroundThread(self._run, "rankdumpd-session-files")

    def update(self, session: RankSession) -> None:
        """Write the file of a session that may have changed, soon."""
        with self._changed:
            self._waiting[session.request.session_id] = (session, self._clock_us())
            self._changed.notify_all()

    def start(self) -> None:
        """Start the thread."""
        self._stopping = False
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Write what waits, and stop; return whether that took no longer than `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        return self._thread.stop(timeout_s)

    def _run(self) -> None:
        failed = False
        while True:
            with self._changed:
                if failed and not self._stopping:
                    self._changed.wait(RETRY_INTERVAL_S)
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                waiting, self._waiting = self._waiting, {}
                stopping = self._stopping
            failed = False
            for session_id, (session, changed_us) in waiting.items():
                if not self._write(session, changed_us):
                    failed = True
                    with self._changed:
                        self._waiting.setdefault(session_id, (session, changed_us))
            if stopping:
                return

    def _write(self, session: RankSession, changed_us: int) -> bool:
        """Write the file of a session if it changed; return False when it is to be tried again."""
        status = session.status()
        if self._written.get(status.session_id) == status:
            return True
        name = make_session_file_name(status)
        content = TreeSession(status, changed_us, self._agent, self._coordinator, self._host)
        try:
            text = format_tree_session(content).encode(errors="replace")
            session.storage.tree.put(SESSIONS_FOLDER, name, (text,), mark=name)
        except OSError as error:
            message = f"the session file of rank {status.rank} cannot be written: {error}"
            root = str(session.storage.tree.root)
            self._failures.log(logging.WARNING, message, about=root, extra=build_log_fields(status))
            return False
        self._written[status.session_id] = status
        for earliest in list(self._written)[: len(self._written) - MAX_REMEMBERED_STATES]:
            del self._written[earliest]
        return True


MAX_REMEMBERED_STATES = 4096
"""Sessions whose last written state is kept; the file of another is written once more."""

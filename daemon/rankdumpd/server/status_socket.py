"""Socket at which the process of pages reads the status of all jobs: each connection is answered
with one message and closed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

from rankdump._core.log_once import LogOnce
from rankdump._core.status import StatusView
from rankdump._wire.status_messages import view_to_wire
from rankdumpd.server.background_thread import BackgroundThread

_SEND_TIMEOUT_S = 5.0
_BACKLOG = 4

_logger = logging.getLogger(__name__)


class StatusSocket:
    """Answers one connection at a time: there is one reader, which asks once a second at most."""

    def __init__(self, build_status: Callable[[], StatusView]) -> None:
        self._build_status = build_status
        self._listening: socket.socket | None = None
        self._logged = LogOnce(_logger)
        self._thread = BackgroundThread(self._run, "rankdumpd-status")

    def start(self, path: str) -> None:
        """Listen at a path in a folder that others cannot enter."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(path)
        self._listening.listen(_BACKLOG)
        self._thread.start()

    def stop(self) -> None:
        """Stop; may be repeated, and called without `start`."""
        if self._listening is None:
            return
        self._thread.request_stop()
        # This ends the wait for a connection, which closing alone does not.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(_SEND_TIMEOUT_S)
        self._listening.close()
        self._listening = None

    def _run(self) -> None:
        assert self._listening is not None
        while not self._thread.is_stopping:
            try:
                asking, _ = self._listening.accept()
            except OSError as error:
                if self._thread.is_stopping:
                    return
                self._logged.log(logging.ERROR, f"the pages cannot ask for the status: {error}")
                self._thread.wait(1.0)
                continue
            with asking:
                self._answer(asking)

    def _answer(self, asking: socket.socket) -> None:
        """Send the status; nothing when it cannot be told."""
        try:
            asking.settimeout(_SEND_TIMEOUT_S)
            asking.sendall(view_to_wire(self._build_status()).SerializeToString())
        except Exception:
            # The daemon has other work, which this must not end.
            _logger.exception("the status cannot be told to the pages")

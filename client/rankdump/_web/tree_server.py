"""Process that serves pages for the coordinator that started it. It is run with `python -m`, with
the number of a listening socket, and with the path of the socket at which the coordinator sends the
status of its jobs. Each line of its standard input names trees, and the end of the input ends the
process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from rankdump._core.job_control import ControlAction, ControlOrder
from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._core.status import StatusView
from rankdump._http.http_server import HttpServer
from rankdump._web.dump_source import SourceList
from rankdump._web.job_source import ControlOutcome
from rankdump._web.web_server import THREADS, LoggedRefusals, run_pages
from rankdump._wire.status_messages import view_from_wire
from rankdump.errors import ForbiddenError, UnavailableError
from rankdump.wire.v1.status_pb2 import StatusView as StatusMessage

_STATUS_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 16


class CoordinatorStates:
    """The jobs of the coordinator that started this process; they cannot be controlled from these
    pages.
    """

    def __init__(self, path: str) -> None:
        """`path` is a socket that answers each connection with a status."""
        self._path = path

    @property
    def address(self) -> str:
        """Address of the coordinator, for people."""
        return f"coordinator on {socket.gethostname()}"

    def read_status(self) -> StatusView:
        """Return the status of all jobs; UnavailableError when the coordinator does not answer."""
        pieces: list[bytes] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
                asking.settimeout(_STATUS_TIMEOUT_S)
                asking.connect(self._path)
                while piece := asking.recv(_CHUNK_BYTES):
                    pieces.append(piece)
        except OSError as error:
            raise UnavailableError(f"the coordinator does not tell its status: {error}") from None
        if not pieces:
            raise UnavailableError("the coordinator cannot tell its status: its log says why")
        return view_from_wire(StatusMessage.FromString(b"".join(pieces)))

    def list_actions(self) -> tuple[ControlAction, ...]:
        """Return no actions, because the pages of a coordinator are read-only."""
        return ()

    def send_control(self, order: ControlOrder) -> ControlOutcome:
        """Refuse the order."""
        raise ForbiddenError(
            "the pages of a coordinator do not control jobs: use rankdump control, or rankdump web "
            "--job"
        )


_NICE = 10
_OOM_SCORE = "800"
_MAX_CONNECTIONS = 512
"""Largest number of connections, which is more than the coordinator opens."""


def serve_coordinator(number: int, status_path: str, lines: Iterable[str]) -> None:
    """Serve pages on a listening socket until the input ends."""
    leave_pandas_out()
    listening = socket.socket(fileno=number)
    sources = SourceList()
    with run_pages(sources, CoordinatorStates(status_path)) as pages:
        server = HttpServer(
            pages.make_application(),
            listening,
            refusals=LoggedRefusals(),
            max_connections=_MAX_CONNECTIONS,
            threads=THREADS,
        )

        def follow() -> None:
            for line in lines:
                sources.add(map(Path, json.loads(line)["trees"]))
            server.request_stop()

        threading.Thread(target=follow, name="rankdump-trees", daemon=True).start()
        server.run()
    sources.close()


def _give_way() -> None:
    """Lower the priority of this process, so that the coordinator gets processor and
    memory first.
    """
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    _give_way()
    serve_coordinator(int(sys.argv[1]), sys.argv[2], sys.stdin)

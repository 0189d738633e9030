"""Process that serves pages to the coordinator that started it: `python -m` with the number of a
listening socket. Lines of its standard input name the trees, and its end ends the process.
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

from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._http.http_server import HttpServer
from rankdump._web.source_list import SourceList
from rankdump._web.web_server import THREADS, LoggedRefusals, run_pages

_NICE = 10
_OOM_SCORE = "800"
_MAX_CONNECTIONS = 512
"""More than its coordinator opens."""


def serve_coordinator(number: int, lines: Iterable[str]) -> None:
    """Serve pages on a listening socket until the lines end."""
    leave_pandas_out()
    listening = socket.socket(fileno=number)
    sources = SourceList()
    with run_pages(sources) as pages:
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
    """Let the coordinator have processor and memory first."""
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    _give_way()
    serve_coordinator(int(sys.argv[1]), sys.stdin)

"""Process that serves pages to the coordinator that started it: `python -m` with the number of a
listening socket. Lines of its standard input name the trees, and its end ends the process.

Trees may come while it runs, in an order that stays: pages name a tree by its number.
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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import overload

from rankdump._core.pandas_blocker import leave_pandas_out
from rankdump._http.http_server import HttpServer
from rankdump._web.dump_source import DumpSource
from rankdump._web.web_server import THREADS, LoggedRefusals, run_pages
from rankdump.errors import RankdumpError

MAX_OPEN = 8
"""Trees whose tables are open: each holds memory."""


class SourceList(Sequence[DumpSource]):
    """The trees that could be opened so far; safe to use from several threads."""

    def __init__(self) -> None:
        self._sources: list[DumpSource] = []
        self._waiting: list[Path] = []
        self._known: set[Path] = set()
        self._latest: OrderedDict[int, None] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, roots: Iterable[Path]) -> None:
        """Add the trees that are not known; those that do not exist yet follow when they do."""
        with self._lock:
            new = [root for root in dict.fromkeys(roots) if root not in self._known]
            self._known.update(new)
            self._waiting += new

    def close(self) -> None:
        """Close all tables."""
        for source in tuple(self):
            source.close()

    def __len__(self) -> int:
        with self._lock:
            self._open_waiting()
            return len(self._sources)

    def __iter__(self) -> Iterator[DumpSource]:
        with self._lock:
            return iter(tuple(self._sources))

    @overload
    def __getitem__(self, index: int) -> DumpSource: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[DumpSource]: ...
    def __getitem__(self, index: int | slice) -> DumpSource | Sequence[DumpSource]:
        with self._lock:
            found = self._sources[index]
            if isinstance(index, slice):
                return found
            self._latest[index] = None
            self._latest.move_to_end(index)
            over = len(self._latest) - MAX_OPEN
            late = [self._latest.popitem(last=False)[0] for _ in range(over)]
            closed = [self._sources[number] for number in late]
        for source in closed:
            source.close()
        return found

    def _open_waiting(self) -> None:
        still: list[Path] = []
        for root in self._waiting:
            try:
                self._sources.append(DumpSource(root))
            except (RankdumpError, OSError):
                still.append(root)
        self._waiting = still


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

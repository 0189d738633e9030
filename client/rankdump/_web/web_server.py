"""Server of the pages: on the loopback interface with the token in the address that it prints, or
with certificates and roles.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from starlette.types import ASGIApp

from rankdump._core.caller_roles import CallerIdentity
from rankdump._core.daemon_endpoint import is_loopback, parse_tcp_address
from rankdump._core.log_once import LogOnce
from rankdump._http.http_server import HttpServer, bind_listener
from rankdump._http.role_gate import CONTROL_METHOD, RoleGate
from rankdump._http.server_guard import HttpsGuard, RefusalSink
from rankdump._web.access_gate import AccessGate, AccessTokens
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.dump_source import DumpSource
from rankdump._web.job_source import JobSource
from rankdump._web.query_process import QueryProcess
from rankdump._web.source_list import SourceList
from rankdump.errors import ConfigError, UnavailableError

LOOPBACK = "127.0.0.1"
THREADS = 4
"""Pages that are made at a time: more need more memory, and no page is done earlier."""
_NICE = 10
"""A host that trains comes first: so much lower is the priority of the server and its processes."""
_MAX_CONNECTIONS = 256
_ADDRESS_NOTE = (
    "The address works once, for ten minutes; Ctrl-C ends the server. From another machine:"
)
_ALLOWED_ADDRESSES = (
    "HOST:PORT on loopback, or any HOST:PORT with certificates "
    "(RANKDUMP_TLS_CA, RANKDUMP_TLS_CERT, RANKDUMP_TLS_KEY)"
)

_logger = logging.getLogger(__name__)


class LoggedRefusals(RefusalSink):
    """Logs each refusal of a kind once."""

    def __init__(self) -> None:
        self._logged = LogOnce(_logger)

    def count(self, reason: str) -> None:
        """Log that there are too many connections."""
        self._logged.log(logging.WARNING, f"a connection was refused: {reason}", about=reason)

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        """Log a refused request."""
        text = f"a request of {caller.name or caller.peer} was refused: {why}"
        self._logged.log(logging.WARNING, text, about=f"{reason} {caller.name}")


def bind_socket(address: str) -> socket.socket:
    """Return a socket that listens; ConfigError for what is no HOST:PORT, and UnavailableError for
    a taken one.
    """
    found = parse_tcp_address(address)
    if found is None:
        raise ConfigError("--listen", "", address, "HOST:PORT")
    try:
        return bind_listener(*found)
    except OSError as error:
        raise UnavailableError(f"{address}: cannot listen: {error.strerror}") from None


def serve_trees(
    trees: Iterable[Path],
    *,
    job: JobSource | None = None,
    listen: str = f"{LOOPBACK}:0",
    guard: HttpsGuard | None = None,
    opens_browser: bool,
) -> None:
    """Serve the pages of trees and of a running job until a signal comes.

    CorruptedError for a folder that is no tree, unless a job may still begin it, and ConfigError
    for an address beyond loopback without a guard.
    """
    if guard is None and not is_loopback(listen):
        raise ConfigError("--listen", "", listen, _ALLOWED_ADDRESSES)
    sources: Sequence[DumpSource]
    if job is None:
        sources = [DumpSource(tree) for tree in trees]
    else:
        sources = open_begun_trees(trees)
    try:
        with run_pages(sources, job) as pages:
            _serve_pages(pages, listen, guard, opens_browser=opens_browser)
    except KeyboardInterrupt:
        pass  # that is how it is ended, here before it serves
    finally:
        for source in sources:
            source.close()


def open_begun_trees(trees: Iterable[Path]) -> SourceList:
    """Return the trees, and say of those that have not begun that they follow."""
    sources = SourceList()
    sources.add(trees)
    for tree in sources.list_waiting():
        sys.stdout.write(f"{tree} is no dump yet: its pages are there once the job has begun it\n")
    return sources


@contextmanager
def run_pages(sources: Sequence[DumpSource], job: JobSource | None = None) -> Generator[WebPages]:
    """Make the pages of trees and of a job, with the processes that they need."""
    queries, comparisons = QueryProcess(), ComparisonProcesses()
    try:
        yield WebPages(sources, queries, comparisons, job)
    finally:
        queries.close()
        comparisons.close()


def _serve_pages(
    pages: WebPages, listen: str, guard: HttpsGuard | None, *, opens_browser: bool
) -> None:
    listening = bind_socket(listen)
    os.nice(_NICE)
    host, port = listen.rpartition(":")[0], listening.getsockname()[1]
    refusals, application = LoggedRefusals(), pages.make_application()
    if guard is None:
        tokens = AccessTokens(time.monotonic())
        address = f"http://{host}:{port}/?token={tokens.token}"
        gate: ASGIApp = AccessGate(application, tokens, time.monotonic, pages.writing_paths)
        lines = [address, _ADDRESS_NOTE, f"  ssh -L {port}:{host}:{port} {socket.gethostname()}"]
    else:
        address = f"https://{host}:{port}/"
        gate = RoleGate(
            application,
            guard.explain_refusal,
            refusals,
            writing=dict.fromkeys(pages.writing_paths, CONTROL_METHOD),
        )
        lines = [address, "Browsers need a certificate with the role reader or operator."]
    server = HttpServer(
        gate,
        listening,
        refusals=refusals,
        guard=guard,
        max_connections=_MAX_CONNECTIONS,
        threads=THREADS,
        end_streams=pages.close,
    )
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    if opens_browser and has_desktop(os.environ):
        webbrowser.open(address)
    server.run(signals=(signal.SIGINT, signal.SIGTERM))


def has_desktop(environment: Mapping[str, str]) -> bool:
    """Return whether a browser can be opened: not in a terminal alone, nor on another machine."""
    return any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))

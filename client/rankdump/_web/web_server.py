"""Server of the pages: on the loopback interface with a token in the printed address, or with
certificates and roles; and the gate for pages on the loopback interface, which checks methods, host
names, tokens and cookies.

A token can be used once, in exchange for a cookie. Times are seconds of a monotonic clock that the
caller reads.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import signal
import socket
import sys
import time
import webbrowser
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from urllib.parse import quote, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from rankdump._core.caller_roles import CallerIdentity
from rankdump._core.daemon_endpoint import is_loopback, parse_tcp_address
from rankdump._core.log_once import LogOnce
from rankdump._http.http_server import HttpServer, bind_listener
from rankdump._http.request_gate import CONTROL_METHOD, RequestGate, RoleGate, is_same_origin
from rankdump._http.server_guard import HttpsGuard, RefusalSink
from rankdump._web.application import WebPages
from rankdump._web.comparison_process import ComparisonProcesses
from rankdump._web.dump_source import DumpSource, SourceList
from rankdump._web.job_source import JobSource
from rankdump._web.query_process import QueryProcess
from rankdump.errors import ConfigError, UnavailableError

_HOST_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Host names that a browser may use. A name that an attacker points to 127.0.0.1 is not
among them.
"""


class AccessGate(RequestGate):
    """Admits read requests that name this host and have the server's cookie; on some paths also
    requests that a page of this server sends with another method.
    """

    def __init__(
        self,
        inner: ASGIApp,
        tokens: AccessTokens,
        read_clock_s: Callable[[], float],
        writing_paths: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(inner)
        self._tokens, self._read_clock_s, self._writing_paths = tokens, read_clock_s, writing_paths

    async def find_refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is refused; None for a request that may pass."""
        writes = request.method == "POST" and request.scope["path"] in self._writing_paths
        if request.method != "GET" and not writes:
            text = f"method {request.method} is not allowed: the pages only read (GET)"
            return PlainTextResponse(f"rankdump: {text}\n", 405, {"allow": "GET"})
        host = request.headers.get("host", "")
        if not is_own_host(host):
            text = f"host {host[:60]!r} is not allowed; allowed: {', '.join(sorted(_HOST_NAMES))}"
            return PlainTextResponse(f"rankdump: {text}\n", 421)
        if writes and not is_same_origin(request.headers):
            return _refuse("this request does not come from a page of this server")
        if "token" in request.query_params:
            return self._exchange_token(request)
        if not self._tokens.admits(request.cookies.get(self._tokens.cookie_name, "")):
            return _refuse("this browser has no access: open the address that rankdump web printed")
        return None

    def _exchange_token(self, request: Request) -> Response:
        token = request.query_params["token"]
        verdict, cookie = self._tokens.exchange(token, self._read_clock_s())
        if verdict is not TokenVerdict.ACCEPTED:
            return _refuse(verdict.value)
        others = [pair for pair in request.query_params.multi_items() if pair[0] != "token"]
        # The address is relative, because the browser may reach the server through a tunnel with
        # another port.
        query = f"?{urlencode(others)}" if others else ""
        # The path is not taken from `url`, which fails if a query is not UTF-8.
        path = quote(str(request.scope["path"]).lstrip("/"))
        answer = RedirectResponse(f"/{path}{query}", 303)
        answer.set_cookie(
            self._tokens.cookie_name, cookie, path="/", httponly=True, samesite="strict"
        )
        return answer


def is_own_host(host: str) -> bool:
    """Return whether a header `Host` names this host, with any port, because a tunnel has its own
    port.
    """
    try:
        split = urlsplit(f"//{host}")
        _ = split.port  # ValueError if the port is not valid
    except ValueError:
        return False
    plain = split.hostname is not None and "@" not in host and not (split.path or split.query)
    return plain and split.hostname in _HOST_NAMES


def _refuse(text: str) -> Response:
    return PlainTextResponse(f"rankdump: {text}\n", 403)


TOKEN_LIFE_S = 600.0
"""Seconds for which the printed address is valid."""
_TOKEN_BYTES = 32


class TokenVerdict(Enum):
    """Result of using a token; the value is the sentence for people."""

    ACCEPTED = "the token is accepted"
    WRONG = "this token is not that of the running server: open the address that it printed"
    REUSED = "this token was used already: it works once; start rankdump web again for another"
    EXPIRED = "this token has expired: start rankdump web again for another"


class AccessTokens:
    """Token and cookie of one server."""

    def __init__(self, started_s: float) -> None:
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._cookie = secrets.token_urlsafe(_TOKEN_BYTES)
        # Cookies do not depend on the port, so two servers behind tunnels need cookies with
        # different names.
        self.cookie_name = f"rankdump_{secrets.token_hex(4)}"
        self._expires_s = started_s + TOKEN_LIFE_S
        self._is_used = False

    def exchange(self, token: str, now_s: float) -> tuple[TokenVerdict, str]:
        """Return the result of using a token, and the value of the cookie if the token
        is accepted.
        """
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            return TokenVerdict.WRONG, ""
        if self._is_used:
            return TokenVerdict.REUSED, ""
        if now_s >= self._expires_s:
            return TokenVerdict.EXPIRED, ""
        self._is_used = True
        return TokenVerdict.ACCEPTED, self._cookie

    def admits(self, cookie: str) -> bool:
        """Return whether a cookie is the one that the token was exchanged for."""
        if not self._is_used:
            return False
        return hmac.compare_digest(cookie.encode(errors="replace"), self._cookie.encode())


LOOPBACK = "127.0.0.1"
THREADS = 4
"""Number of pages that are made at the same time; more would need more memory, and no page would be
ready earlier.
"""
_NICE = 10
"""Niceness of the server and its processes, because training on the host has priority."""
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
    """Logs the first refusal of each kind."""

    def __init__(self) -> None:
        self._logged = LogOnce(_logger)

    def count(self, reason: str) -> None:
        """Log that a connection was refused because there are too many."""
        self._logged.log(logging.WARNING, f"a connection was refused: {reason}", about=reason)

    def add(self, reason: str, caller: CallerIdentity, request: str, why: str) -> None:
        """Log a refused request."""
        text = f"a request of {caller.name or caller.peer} was refused: {why}"
        self._logged.log(logging.WARNING, text, about=f"{reason} {caller.name}")


def bind_socket(address: str) -> socket.socket:
    """Return a listening socket; ConfigError for an address that is not HOST:PORT, UnavailableError
    for one in use.
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
    """Serve the pages of trees and of a running job until a signal arrives.

    CorruptedError for a folder that is not a tree, unless a job may still create it; ConfigError
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
        pass  # a signal ends it in this way, here before it serves
    finally:
        for source in sources:
            source.close()


def open_begun_trees(trees: Iterable[Path]) -> SourceList:
    """Return the trees that exist, and print which trees are added when a job has begun them."""
    sources = SourceList()
    sources.add(trees)
    for tree in sources.list_waiting():
        sys.stdout.write(f"{tree} is no dump yet: its pages are there once the job has begun it\n")
    return sources


@contextmanager
def run_pages(sources: Sequence[DumpSource], job: JobSource | None = None) -> Generator[WebPages]:
    """Create the pages of trees and of a job, with the processes that they need."""
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
    """Return whether a browser can be opened; it cannot without a graphical desktop, or on another
    machine.
    """
    return any(environment.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))

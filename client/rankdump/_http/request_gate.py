"""Gates of an HTTP server: each gate is an ASGI application around another one; it refuses some
requests, and adds the headers that forbid a browser to load anything from elsewhere or to send
anything there. `RoleGate` knows callers by their certificates, and checks methods, roles, and
requests that pages of other sites make.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rankdump._core.caller_roles import LOCAL_CALLER, CallerIdentity
from rankdump._http.http_server import CALLER_KEY
from rankdump._http.server_guard import RefusalSink

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    # With `no-referrer` a browser would name no origin when it submits a form.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class RequestGate:
    """Answers refused requests itself, and passes all others on."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request if it is refused, or pass it on."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif scope["type"] != "http":  # the server has no web sockets
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = await self.find_refusal(Request(scope))
            await (refusal or self._inner)(scope, receive, _send_with_headers(send))

    async def find_refusal(self, request: Request) -> Response | None:
        """Return the answer to a refused request; None for a request that is passed on."""
        raise NotImplementedError


def _send_with_headers(send: Send) -> Send:
    """Return a `send` that adds the headers to each answer; by default no cache may
    keep an answer.
    """

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_more


def is_same_origin(headers: Headers) -> bool:
    """Return whether a request comes from a page of this server, according to the browser."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin") or (site is None and origin is None):
        return False
    if origin is None:
        return True
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and place == headers.get("host")


READ_METHOD = "/rankdump.wire.v1.CoordinatorService/Status"
"""gRPC method whose roles may read pages."""
CONTROL_METHOD = "/rankdump.wire.v1.CoordinatorService/Control"
"""gRPC method whose roles may control a job."""
_HTTP_VERSIONS = ("1.0", "1.1")


class RoleGate(RequestGate):
    """Passes on read requests, and for some paths requests that a page of this server sends, if the
    caller has the required role.
    """

    def __init__(
        self,
        inner: ASGIApp,
        explain_refusal: Callable[[str, CallerIdentity], str],
        refusals: RefusalSink,
        find_method: Callable[[str], str] = lambda path: READ_METHOD,
        writing: Mapping[str, str] | None = None,
    ) -> None:
        """`find_method` returns the gRPC method whose roles may read a path; `writing` has the
        method whose roles may submit a form, by the form's path. `explain_refusal` returns why a
        caller may not call a method, or an empty text if it may.
        """
        super().__init__(inner)
        self._explain_refusal, self._refusals = explain_refusal, refusals
        self._find_method, self._writing = find_method, writing or {}

    async def find_refusal(self, request: Request) -> Response | None:
        """Return the answer to a refused request, after noting the refusal; None for a request that
        is passed on.
        """
        status, reason, why = self._check_request(request)
        if not reason:
            return None
        line, caller = format_request_line(request.scope), get_caller(request.scope)
        # The refusal is noted in a thread, because the audit log may wait for a disk.
        await asyncio.to_thread(self._refusals.add, reason, caller, line, why)
        headers = {"connection": "close", **({"allow": "GET"} if reason == "method" else {})}
        return PlainTextResponse(f"{why}\n", status, headers)

    def _check_request(self, request: Request) -> tuple[int, str, str]:
        """Return status, reason and sentence of a refusal; the reason is empty for a request that
        is passed on.
        """
        if request.scope["http_version"] not in _HTTP_VERSIONS:
            return 505, "malformed", f"version {request.scope['http_version']} of HTTP is not known"
        written = self._writing.get(request.scope["path"]) if request.method == "POST" else None
        if request.method != "GET" and written is None:
            return 501, "method", f"method {request.method} is not allowed: pages only read (GET)"
        if is_from_other_site(request):
            return 403, "role", "a page of another site has made this request"
        if written is not None and not is_same_origin(request.headers):
            return 403, "role", "this request does not come from a page of this server"
        method = written or self._find_method(request.scope["path"])
        why = self._explain_refusal(method, get_caller(request.scope))
        return (403, "role", why) if why else (200, "", "")


def admit_local_caller(method: str, caller: CallerIdentity) -> str:
    """Return an empty text: without TLS every caller is on this host and admitted."""
    return ""


def get_caller(scope: Scope) -> CallerIdentity:
    """Return the caller that made a request."""
    return scope.get(CALLER_KEY, LOCAL_CALLER)


def format_request_line(scope: Scope) -> str:
    """Return the first line of a request."""
    query = scope["query_string"].decode("latin-1")
    path = scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    return f"{scope['method']} {path} HTTP/{scope['http_version']}"


def is_from_other_site(request: Request) -> bool:
    """Return whether a page of another site made a request, except by a link.

    Browsers present certificates to every server that asks, so such requests would be made in the
    name of the user.
    """
    if request.headers.get("sec-fetch-site", "") not in ("cross-site", "same-site"):
        return False
    is_link = request.headers.get("sec-fetch-mode") == "navigate"
    return not (is_link and request.headers.get("sec-fetch-dest") == "document")

"""What the gates of a server share: each is an ASGI application around another, which refuses some
requests and adds the headers that forbid a browser to load or to send anything elsewhere.
"""

from __future__ import annotations

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; object-src 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    # With `no-referrer` a browser would name no origin when it sends a form.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class RequestGate:
    """Answers requests that are refused, and hands the others on."""

    def __init__(self, inner: ASGIApp) -> None:
        self._inner = inner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        if scope["type"] == "lifespan":
            await self._inner(scope, receive, send)
        elif scope["type"] != "http":  # the server has no web sockets
            await send({"type": "websocket.close", "code": 1008})
        else:
            refusal = await self.find_refusal(Request(scope))
            await (refusal or self._inner)(scope, receive, _send_with_headers(send))

    async def find_refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that goes no further; None for one that may."""
        raise NotImplementedError


def _send_with_headers(send: Send) -> Send:
    """Return a `send` that adds the headers to each answer, which no cache may keep by default."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_more


def is_same_origin(headers: Headers) -> bool:
    """Return whether the page that sends a request is of this server, as the browser tells it."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site not in (None, "same-origin") or (site is None and origin is None):
        return False
    if origin is None:
        return True
    scheme, _, place = origin.partition("://")
    return scheme in ("http", "https") and place == headers.get("host")

"""Headers that forbid a browser to load or to send anything elsewhere."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

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


def send_with_headers(send: Send) -> Send:
    """Return a `send` that adds the headers to each answer, which no cache may keep by default."""

    async def send_more(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
            headers.setdefault("cache-control", "no-store")
        await send(message)

    return send_more

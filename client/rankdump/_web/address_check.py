"""Check of addresses before anything reads them: browsers send ASCII alone (RFC 3986), and
Starlette fails for other bytes.
"""

from __future__ import annotations

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class AddressCheck:
    """Hands requests on whose query is ASCII, and answers others with one line."""

    def __init__(self, app: ASGIApp) -> None:
        self._inner = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or hand it on."""
        query: bytes = scope.get("query_string", b"")
        if query.isascii():
            await self._inner(scope, receive, send)
            return
        text = f"query {query[:60]!r} is not allowed; allowed: ASCII, other characters as %C3%A9"
        await PlainTextResponse(f"rankdump: {text}\n", 400)(scope, receive, send)

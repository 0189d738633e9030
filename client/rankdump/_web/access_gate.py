"""Gate in front of all pages on this host: methods, host names, tokens and cookies.

A token is used once, and exchanged for a cookie. Times are seconds of a monotonic clock that the
caller reads.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from enum import Enum
from urllib.parse import quote, urlencode, urlsplit

from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp

from rankdump._http.request_gate import RequestGate, is_same_origin

_HOST_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
"""Names under which a browser may ask: a name that an attacker points to 127.0.0.1 is not one."""


class AccessGate(RequestGate):
    """Lets requests through that read, name this host, and have the cookie of the server; to some
    paths also those that a page of the server sends.
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
        """Return the answer to a request that goes no further; None for one that may."""
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
        # Relative: the browser may reach the server through a tunnel with another port.
        query = f"?{urlencode(others)}" if others else ""
        # Not from `url`, which fails where a query is not UTF-8.
        path = quote(str(request.scope["path"]).lstrip("/"))
        answer = RedirectResponse(f"/{path}{query}", 303)
        answer.set_cookie(
            self._tokens.cookie_name, cookie, path="/", httponly=True, samesite="strict"
        )
        return answer


def is_own_host(host: str) -> bool:
    """Return whether a header `Host` names this host, with any port: a tunnel has its own."""
    try:
        split = urlsplit(f"//{host}")
        _ = split.port  # ValueError for what is no port
    except ValueError:
        return False
    plain = split.hostname is not None and "@" not in host and not (split.path or split.query)
    return plain and split.hostname in _HOST_NAMES


def _refuse(text: str) -> Response:
    return PlainTextResponse(f"rankdump: {text}\n", 403)


TOKEN_LIFE_S = 600.0
"""How long the printed address works."""
_TOKEN_BYTES = 32


class TokenVerdict(Enum):
    """What becomes of a token; the value is the sentence for people."""

    ACCEPTED = "the token is accepted"
    WRONG = "this token is not that of the running server: open the address that it printed"
    REUSED = "this token was used already: it works once; start rankdump web again for another"
    EXPIRED = "this token has expired: start rankdump web again for another"


class AccessTokens:
    """Token and cookie of one server."""

    def __init__(self, started_s: float) -> None:
        self.token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._cookie = secrets.token_urlsafe(_TOKEN_BYTES)
        # Cookies do not know ports: two servers behind tunnels must not overwrite each other's.
        self.cookie_name = f"rankdump_{secrets.token_hex(4)}"
        self._expires_s = started_s + TOKEN_LIFE_S
        self._is_used = False

    def exchange(self, token: str, now_s: float) -> tuple[TokenVerdict, str]:
        """Return what becomes of a token, and the value of the cookie where it is accepted."""
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

"""Access to the pages: a token that is used once, and the cookie that it is exchanged for. Pure but
for the random numbers; times are seconds of a monotonic clock that the caller reads.
"""

from __future__ import annotations

import hmac
import secrets
from enum import Enum

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

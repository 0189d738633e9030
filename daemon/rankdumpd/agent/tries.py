"""How often in a row one number of a session failed to come in. Safe to use from several threads."""

from __future__ import annotations

import threading

_MOST_SESSIONS = 4096


class Tries:
    """Remembers the last failure of each session, of the sessions that failed lately."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[str, int]] = {}

    def failed(self, session_id: str, what: str) -> int:
        """Count a failure; return how many of the last ones of this session were the same."""
        with self._lock:
            before, count = self._last.pop(session_id, ("", 0))
            count = count + 1 if before == what else 1
            self._last[session_id] = what, count
            if len(self._last) > _MOST_SESSIONS:
                del self._last[next(iter(self._last))]
            return count

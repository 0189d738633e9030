"""How often in a row a session failed at the same place."""

from __future__ import annotations

import threading

_MOST_SESSIONS = 4096


class Tries:
    """The last failure of each session that failed lately; safe to use from several threads."""

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

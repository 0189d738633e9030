"""Sessions that were opened and have no stream yet, for a minute each. Its owner holds the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""A rank connects at once; who has not by then never will."""


class Lobby:
    """Remembers who is due, and since when."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since_s: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._since_s)

    def enter(self, session_id: str) -> None:
        """Expect a stream of this session from now on."""
        self._since_s[session_id] = self._clock()

    def leave(self, session_id: str) -> None:
        """Expect it no more."""
        self._since_s.pop(session_id, None)

    def take_overdue(self) -> list[str]:
        """Return those that did not come, and expect them no more."""
        now_s = self._clock()
        overdue = [who for who, since_s in self._since_s.items() if now_s - since_s > PATIENCE_S]
        for session_id in overdue:
            del self._since_s[session_id]
        return overdue

"""Sessions that are not taken up again because their rows are damaged. Its owner holds the lock."""

from __future__ import annotations

import logging

from rankdump.contract.errors import RefusedError
from rankdump.wire.limits import shown

_LONGEST_CAUSE = 512

_log = logging.getLogger(__name__)


class GivenUp:
    """Remembers which, and why."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def add(self, session_id: str, error: Exception) -> None:
        """Give a session up, and say so in the log."""
        said = shown(f"session {session_id!r} cannot be taken up again: {error}", _LONGEST_CAUSE)
        _log.error(said, extra={"session": session_id})
        self._said[session_id] = said

    def check(self, session_id: str) -> None:
        """Raise RefusedError for a session that was given up."""
        if session_id in self._said:
            raise RefusedError(f"{self._said[session_id]}; one that begins anew is let in")

    def findings(self) -> list[str]:
        """Return a sentence for each."""
        return [f"{said}; its rank is refused" for said in self._said.values()]

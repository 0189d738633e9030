"""Log lines that are written only the first time."""

from __future__ import annotations

import logging
from collections.abc import Mapping

MAX_KEYS = 1000
"""Maximum number of subjects that are remembered; lines on further subjects are not written."""


class LogOnce:
    """Writes at most one line on each subject; safe to use from several threads."""

    def __init__(self, logger: logging.Logger, *, max_keys: int = MAX_KEYS) -> None:
        self._logger = logger
        self._max_keys = max_keys
        self._known: set[str] = set()

    def log(
        self,
        level: int,
        message: str,
        *,
        about: str = "",
        extra: Mapping[str, object] | None = None,
    ) -> bool:
        """Write a line unless one on the same subject was written; return whether it was written.

        The subject is `about`, or the message itself.
        """
        if not self.is_new(about or message):
            return False
        self._logger.log(level, "%s", message, extra=dict(extra) if extra else None)
        return True

    @property
    def is_full(self) -> bool:
        """Whether lines on further subjects are not written."""
        return len(self._known) >= self._max_keys

    def is_new(self, subject: str) -> bool:
        """Remember a subject; return whether it is new."""
        # Two threads that ask at the same time may both get True, but a repeated line does no harm.
        if subject in self._known or self.is_full:
            return False
        self._known.add(subject)
        return True

    def forget(self, subject: str) -> None:
        """Allow another line on a subject."""
        self._known.discard(subject)

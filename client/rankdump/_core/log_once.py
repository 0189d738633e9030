"""Log lines that are written the first time only."""

from __future__ import annotations

import logging
from collections.abc import Mapping

MAX_KEYS = 1000
"""Subjects that are remembered; further ones get no line."""


class LogOnce:
    """Writes one line for each subject, at most; safe to use from several threads."""

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
        """Write a line unless one on that subject was written; return whether it was.

        The subject is `about`, or the message itself.
        """
        if not self.is_new(about or message):
            return False
        self._logger.log(level, "%s", message, extra=dict(extra) if extra else None)
        return True

    @property
    def is_full(self) -> bool:
        """Whether further subjects get no line."""
        return len(self._known) >= self._max_keys

    def is_new(self, subject: str) -> bool:
        """Remember a subject; return whether it is the first time."""
        # Two threads at the same instant may both see it as new: a doubled line does no harm.
        if subject in self._known or self.is_full:
            return False
        self._known.add(subject)
        return True

    def forget(self, subject: str) -> None:
        """Let the next line on a subject be written again."""
        self._known.discard(subject)

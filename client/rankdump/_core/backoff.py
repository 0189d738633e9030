"""Pauses between attempts that double up to a limit, for one thing or for many by name.

Pure: who waits, and by which clock, is the caller's.
"""

from __future__ import annotations

from dataclasses import dataclass


class RetryBackoff:
    """The pause before the next attempt at one thing."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """Start with a pause of `first_s` seconds; none is longer than `last_s`."""
        self._first_s, self._last_s = first_s, last_s
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Return the pause after one more failure, in seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._last_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the first pause again: an attempt succeeded."""
        self._next_s = self._first_s


@dataclass(frozen=True, slots=True)
class _ScheduledAttempt:
    due_s: float
    backoff: RetryBackoff


class RetrySchedule:
    """When each of several things, known by name, is to be attempted again."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """Each begins with a pause of `first_s` seconds; none is longer than `last_s`."""
        self._first_s, self._last_s = first_s, last_s
        self._attempts: dict[str, _ScheduledAttempt] = {}

    def postpone(self, name: str, *, now_s: float) -> float:
        """Note one more failure, or the first; return the pause in seconds."""
        known = self._attempts.get(name)
        backoff = known.backoff if known else RetryBackoff(self._first_s, self._last_s)
        pause_s = backoff.next_pause_s()
        self._attempts[name] = _ScheduledAttempt(now_s + pause_s, backoff)
        return pause_s

    def is_due(self, name: str, *, now_s: float) -> bool:
        """Return whether something may be attempted now; what never failed always may."""
        known = self._attempts.get(name)
        return known is None or known.due_s <= now_s

    def list_due(self, *, now_s: float) -> list[str]:
        """Return the names of what failed and may be attempted again now."""
        return [name for name, each in self._attempts.items() if each.due_s <= now_s]

    def forget(self, name: str) -> bool:
        """Forget what succeeded or is gone; return whether it had failed before."""
        return self._attempts.pop(name, None) is not None

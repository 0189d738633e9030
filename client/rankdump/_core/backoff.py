"""Pauses between retries that double up to a limit, for one operation or for several by name. Pure:
the caller provides the clock and does the waiting.
"""

from __future__ import annotations


class RetryBackoff:
    """Pauses between the attempts to perform one operation."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """`first_s` is the first pause in seconds, `last_s` the longest."""
        self._first_s, self._last_s = first_s, last_s
        self._next_s = first_s

    def next_pause_s(self) -> float:
        """Count a failure; return the pause after it in seconds."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._last_s)
        return pause_s

    def reset(self) -> None:
        """Continue with the first pause, after a success."""
        self._next_s = self._first_s


class RetrySchedule:
    """Times of the next attempts to perform several operations, by name."""

    def __init__(self, first_s: float, last_s: float) -> None:
        """`first_s` is the first pause of each operation in seconds, `last_s` the longest."""
        self._first_s, self._last_s = first_s, last_s
        self._due_s: dict[str, float] = {}
        self._backoffs: dict[str, RetryBackoff] = {}

    def postpone(self, name: str, *, now_s: float) -> float:
        """Count a failure of an operation; return the pause after it in seconds."""
        backoff = self._backoffs.setdefault(name, RetryBackoff(self._first_s, self._last_s))
        pause_s = backoff.next_pause_s()
        self._due_s[name] = now_s + pause_s
        return pause_s

    def is_due(self, name: str, *, now_s: float) -> bool:
        """Return whether an operation may be attempted now; one that has not failed always may."""
        return name not in self._due_s or self._due_s[name] <= now_s

    def list_due(self, *, now_s: float) -> list[str]:
        """Return the operations that failed and may be attempted again now."""
        return [name for name, due_s in self._due_s.items() if due_s <= now_s]

    def forget(self, name: str) -> bool:
        """Forget an operation that succeeded or is no longer needed; return whether it
        had failed.
        """
        self._backoffs.pop(name, None)
        return self._due_s.pop(name, None) is not None

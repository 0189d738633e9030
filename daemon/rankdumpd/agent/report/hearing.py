"""Up to when ranks are known: those that are quiet, once the log is told to its end. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rankdumpd.agent.values import QuietRank

TOLD_AFTER_US = 2_000_000
"""A rank tells what it began at most so long after: open calls after a second, twice a second."""


class Hearing:
    """For one thread at a time; the clock is an argument."""

    def __init__(self, quiet: Callable[[], Iterable[QuietRank]]) -> None:
        self._quiet = quiet
        self._before: frozenset[QuietRank] = frozenset()
        self._found: tuple[QuietRank, ...] = ()
        self._until_us = self._newest = 0

    def begin(self) -> None:
        """Begin a stream: what was found for an earlier one may come too late now."""
        self._before, self._found = frozenset(), ()

    def look(self, *, now_us: int, newest: Callable[[], int]) -> None:
        """See who is quiet, and since the last look; `newest` returns the last number of the log.

        One look would not do: the next frame may be about to come.
        """
        quiet = frozenset(self._quiet())
        self._found = tuple(quiet & self._before)
        # Behind the look: what quiet ranks have sent stands in the log by now.
        self._before, self._newest = quiet, newest()
        self._until_us = now_us - TOLD_AFTER_US

    def told_to(self, number: int) -> tuple[tuple[QuietRank, ...], int]:
        """Return who is known up to when, now that the log is told up to a number; each once."""
        if number < self._newest:
            return (), 0
        found, self._found = self._found, ()
        return found, self._until_us

"""Freezes that an agent has begun, joined or refused in the last minute, for the reports to its
coordinator; and which freezes of the coordinator it has seen. They are neither numbered nor
stored: reports repeat them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump._core.freeze_record import FreezeReach, FrozenCause, JobFreeze, RelayedFreeze

REPORTED_S = 60.0
"""Time for which a freeze is reported: a coordinator that restarts hands it on afterwards."""
MAX_RELAYED = 256
"""Freezes of the coordinator that are remembered."""

FreezeKey = tuple[str, int, int]
"""Job, attempt and iteration."""


class RecentFreezes:
    """The freezes of one agent; safe to use from several threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._own: dict[FreezeKey, tuple[JobFreeze, float]] = {}
        """With the time until which it is reported."""
        self._seen: dict[FreezeKey, RelayedFreeze] = {}
        """What the coordinator said last of each freeze."""

    def add(self, freeze: JobFreeze, *, age_s: float = 0.0) -> None:
        """Add a freeze that began so long ago; with the same key it replaces an earlier one."""
        until_s = self._clock() + REPORTED_S - max(0.0, age_s)
        with self._lock:
            self._forget_old()
            self._own[freeze.key] = freeze, until_s

    def remove(self, key: FreezeKey) -> None:
        """Forget a freeze that has become part of another one."""
        with self._lock:
            self._own.pop(key, None)

    def list_reported(self) -> tuple[JobFreeze, ...]:
        """Return the freezes to be reported now."""
        with self._lock:
            self._forget_old()
            return tuple(freeze for freeze, _ in self._own.values())

    def _forget_old(self) -> None:
        now_s = self._clock()
        self._own = {key: own for key, own in self._own.items() if own[1] > now_s}

    def note_relayed(self, relayed: RelayedFreeze) -> tuple[bool, list[FrozenCause]]:
        """Note a freeze of the coordinator; return whether it was not seen before, and which of its
        later causes were not.
        """
        key = relayed.freeze.key
        with self._lock:
            before = self._seen.get(key)
            self._seen[key] = relayed
            while len(self._seen) > MAX_RELAYED:
                del self._seen[next(iter(self._seen))]
        known = {each.identity for each in before.later_causes} if before else set[object]()
        return before is None, [e for e in relayed.later_causes if e.identity not in known]

    def find_reach(self, key: FreezeKey) -> FreezeReach:
        """Return how far a freeze had come when the coordinator said so last."""
        with self._lock:
            seen = self._seen.get(key)
        return FreezeReach() if seen is None else seen.reach

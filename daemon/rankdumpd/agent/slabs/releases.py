"""How far a slab may be overwritten: only as far as everything before is safe. Pure."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Taken:
    """An entry that was read."""

    sequence: int
    end: int
    copied: bool


class Releases:
    """Entries that were read and are not released yet, in their order."""

    def __init__(self, acknowledged: int) -> None:
        self._acknowledged = acknowledged
        self._taken: deque[_Taken] = deque()

    def add(self, sequence: int, end: int, *, copied: bool) -> None:
        """Note an entry up to a position; one that was copied waits for no acknowledgement."""
        self._taken.append(_Taken(sequence, end, copied))

    def acknowledge(self, sequence: int) -> None:
        """Note that everything up to a number is safe."""
        self._acknowledged = max(self._acknowledged, sequence)

    def pop(self) -> int:
        """Return the position up to which nothing is needed any more, once; 0 without news."""
        position = 0
        while self._taken and self._over(self._taken[0]):
            position = self._taken.popleft().end
        return position

    def _over(self, taken: _Taken) -> bool:
        return taken.copied or taken.sequence <= self._acknowledged

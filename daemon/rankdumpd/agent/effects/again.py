"""When what failed is tried again: after a pause that grows. Pure."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S = 1.0
LAST_S = 30.0
"""A disk that was full for an hour is noticed to have room again after so long at most."""


@dataclass(frozen=True, slots=True)
class _Try:
    at_s: float
    pause_s: float


class Again:
    """By name of what waits, when it is to be tried next."""

    def __init__(self) -> None:
        self._tries: dict[str, _Try] = {}

    def later(self, name: str, *, now_s: float) -> None:
        """Note that it failed, once more or for the first time."""
        before = self._tries.get(name)
        pause_s = min(2 * before.pause_s, LAST_S) if before else FIRST_S
        self._tries[name] = _Try(now_s + pause_s, pause_s)

    def due(self, *, now_s: float) -> list[str]:
        """Return what is to be tried now."""
        return [name for name, each in self._tries.items() if each.at_s <= now_s]

    def over(self, name: str) -> bool:
        """Forget what is done; return whether it had waited."""
        return self._tries.pop(name, None) is not None

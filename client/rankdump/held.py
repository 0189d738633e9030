"""What waits for the end of its operator: inputs that are kept only if something goes wrong.

Decides nothing about tensors; forgets what nobody asks for. Never sends anything.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

# A loop without steps, of operators that never end, must not be remembered for ever.
_MAX_OPEN = 1 << 14


@dataclass(slots=True)
class _Open(Generic[T]):
    """One operator that is not over."""

    kept: bool = False
    items: list[T] = field(default_factory=list[T])


class Held(Generic[T]):
    """Items by the name of their operator; safe to use from several threads."""

    def __init__(self, limit: int = 0) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._open: dict[str, _Open[T]] = {}
        self._kept = 0

    @property
    def full(self) -> bool:
        """Whether as many operators were kept as the limit allows; 0 allows any number."""
        return 0 < self._limit <= self._kept

    def keeps(self, op_name: str) -> bool:
        """Return whether an operator that is not over is being kept."""
        found = self._open.get(op_name)
        return found is not None and found.kept

    def hold(self, op_name: str, item: T) -> list[T]:
        """Let an item wait for its operator; return what nothing waits for any more."""
        with self._lock:
            self._open.setdefault(op_name, _Open()).items.append(item)
            if len(self._open) <= _MAX_OPEN:
                return []
            return self._open.pop(next(iter(self._open))).items

    def keep(self, op_name: str) -> list[T]:
        """Keep an operator, if the limit allows; return what waited for that."""
        with self._lock:
            operator = self._open.setdefault(op_name, _Open())
            if self.full and not operator.kept:
                return []
            self._kept += not operator.kept
            operator.kept = True
            items, operator.items = operator.items, []
            return items

    def settle(self, op_name: str) -> list[T]:
        """Say that an operator is over; return what waited for nothing."""
        with self._lock:
            operator = self._open.pop(op_name, None)
            return operator.items if operator is not None else []

    def clear(self) -> list[T]:
        """Say that every operator is over; return what waited for nothing."""
        with self._lock:
            waiting, self._open = self._open, {}
        return [item for operator in waiting.values() for item in operator.items]

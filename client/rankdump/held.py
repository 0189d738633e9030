"""What waits for the end of its operator: inputs that are kept only if something goes wrong.

Decides nothing about tensors; forgets what nobody asks for. Never sends anything.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
Operator: TypeAlias = "tuple[int, str]"
"""Its graph and its name: two models may call an operator alike."""

# A loop without steps, of operators that never end, must not be remembered for ever.
_MAX_OPEN = 1 << 14


@dataclass(slots=True)
class _Open(Generic[T]):
    """One operator that is not over."""

    kept: bool = False
    items: list[T] = field(default_factory=list[T])


class Held(Generic[T]):
    """Items by their operator; safe to use from several threads."""

    def __init__(self, limit: int = 0) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._open: dict[Operator, _Open[T]] = {}
        self._kept = 0

    @property
    def full(self) -> bool:
        """Whether as many operators were kept as the limit allows; 0 allows any number."""
        return 0 < self._limit <= self._kept

    def keeps(self, call: Operator) -> bool:
        """Return whether an operator that is not over is being kept."""
        found = self._open.get(call)
        return found is not None and found.kept

    def hold(self, call: Operator, item: T) -> list[T]:
        """Let an item wait for its operator; return what nothing waits for any more."""
        with self._lock:
            self._open.setdefault(call, _Open()).items.append(item)
            if len(self._open) <= _MAX_OPEN:
                return []
            return self._open.pop(next(iter(self._open))).items

    def keep(self, call: Operator) -> list[T]:
        """Keep an operator, if the limit allows; return what waited for that."""
        with self._lock:
            operator = self._open.setdefault(call, _Open())
            if self.full and not operator.kept:
                return []
            self._kept += not operator.kept
            operator.kept = True
            items, operator.items = operator.items, []
            return items

    def settle(self, call: Operator) -> list[T]:
        """Say that an operator is over; return what waited for nothing."""
        with self._lock:
            operator = self._open.pop(call, None)
            return operator.items if operator is not None else []

    def clear(self) -> list[T]:
        """Say that every operator is over; return what waited for nothing."""
        with self._lock:
            waiting, self._open = self._open, {}
        return [item for operator in waiting.values() for item in operator.items]

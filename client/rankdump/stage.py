"""Room 3: one copy of a kept tensor into memory that outlives the step.

That is the agent's shared memory, whose free space is the budget, or the heap under a budget of
its own. Never compresses, never waits longer than the plan allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from rankdump.contract.exchange import RecordHead
from rankdump.values import Placing, Staged, TensorSource

HEAD_BYTES = 512
"""About what a record takes without its elements: what is smaller is charged as much."""


class Budget:
    """Bytes that may be held at once; one larger than the limit is let in alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._freed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    def acquire(self, byte_count: int, patience_s: Callable[[], float]) -> bool:
        """Hold the bytes, waiting as long as patience lasts; False when it ended first."""
        with self._freed:
            while self._held_bytes and self._held_bytes + byte_count > self._limit_bytes:
                left_s = patience_s()
                if left_s <= 0:
                    return False
                # Patience may grow with the agent's progress, so it is asked again.
                self._freed.wait(min(left_s, 1.0))
            self._held_bytes += byte_count
            return True

    def release(self, byte_count: int) -> None:
        """Give bytes back and wake who waits."""
        with self._freed:
            self._held_bytes -= byte_count
            self._freed.notify_all()


class Stage:
    """Makes room for records and copies tensors in; safe to use from several threads."""

    def __init__(
        self,
        *,
        budget: Budget,
        patience_s: Callable[[], float],
        place: Callable[[RecordHead, TensorSource], Placing] | None = None,
        reduce: Callable[[RecordHead, TensorSource], Staged | None] | None = None,
    ) -> None:
        """`place` copies into shared memory; `reduce` makes figures where there is no room."""
        self._budget = budget
        self._patience_s = patience_s
        self._place = place
        self._reduce = reduce

    def keep(self, head: RecordHead, source: TensorSource) -> Staged | None:
        """Copy a record's elements once; None when there was room neither for them nor figures."""
        placing = Placing.ELSEWHERE if self._place is None else self._place(head, source)
        if placing is Placing.DONE:
            return Staged(head, memoryview(b""), on_its_way=True)
        record = None
        if placing is Placing.ELSEWHERE:
            record = self._admitted(head, lambda: self._copied(head, source))
        if record is None and self._reduce is not None:
            reduce = self._reduce
            # Room for figures is little, and what they are is not known before.
            record = self._admitted(replace(head, figures=()), lambda: reduce(head, source))
        return record

    def admit(self, head: RecordHead) -> bool:
        """Hold room for a record, until `release`; False when the buffer stayed full."""
        return self._budget.acquire(_charge(head), self._patience_s)

    def release(self, head: RecordHead) -> None:
        """Give a record's room back."""
        self._budget.release(_charge(head))

    def _admitted(self, head: RecordHead, make: Callable[[], Staged | None]) -> Staged | None:
        """Return the record, or None when it has no room or cannot be made."""
        if not self.admit(head):
            return None
        record = None
        try:
            record = make()
            return record
        finally:
            if record is None:
                self.release(head)

    def _copied(self, head: RecordHead, source: TensorSource) -> Staged:
        data = memoryview(bytearray(head.data_bytes))
        source.copy_into(data)
        return Staged(head, data)


def _charge(head: RecordHead) -> int:
    return max(head.data_bytes, HEAD_BYTES)

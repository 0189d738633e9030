"""Staging of tensors: one copy into memory that outlives the step, which is the agent's shared
memory or the heap under a byte budget. Never compresses, never waits longer than the plan
allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump._core.record import StatisticRows
from rankdump._core.recorder_protocol import PlacementResult, StagedRecord, TensorSource
from rankdump._core.session_protocol import CallStacks, RecordHead

MIN_RECORD_BYTES = 512
"""About what a record takes without its elements: what is smaller is charged as much."""
ROW_BYTES = 128
"""About what a row of figures takes: its text and its part of the frame."""

CALL_BYTES = 256
"""About what a call with its stack takes: stacks that repeat are said once."""


class StagingBudget:
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


class StagingBuffer:
    """Makes room for records and rows, and copies tensors in; safe to use from several threads."""

    def __init__(
        self,
        *,
        records: StagingBudget,
        rows: StagingBudget,
        patience_s: Callable[[], float],
        place: Callable[[RecordHead, TensorSource], PlacementResult] | None = None,
    ) -> None:
        """`place` copies into shared memory; rows leave when records have filled all theirs."""
        self._records = records
        self._rows = rows
        self._patience_s = patience_s
        self._place = place

    def keep(self, head: RecordHead, source: TensorSource) -> StagedRecord | None:
        """Copy a record's elements once; None when there was no room for them."""
        placing = PlacementResult.ELSEWHERE if self._place is None else self._place(head, source)
        if placing is PlacementResult.DONE:
            return StagedRecord(head, memoryview(b""), is_in_shared_memory=True)
        if placing is PlacementResult.FULL:
            return None
        charge = _compute_charge(head)
        if not self._records.acquire(charge, self._patience_s):
            return None
        try:
            data = memoryview(bytearray(head.byte_count))
            source.copy_into(data)
        except BaseException:
            self._records.release(charge)
            raise
        return StagedRecord(head, data)

    def admit(self, rows: StatisticRows) -> bool:
        """Hold room for rows, until `release`; False when there stayed none."""
        return self._rows.acquire(len(rows) * ROW_BYTES, self._patience_s)

    def admit_at_once(self, stacks: CallStacks) -> bool:
        """Hold room for where calls came from, until `release`; False when there is none now."""
        return self._rows.acquire(len(stacks.calls) * CALL_BYTES, lambda: 0.0)

    def release(self, item: StagedRecord | StatisticRows | CallStacks) -> None:
        """Give the room of what has left back."""
        if isinstance(item, StatisticRows):
            self._rows.release(len(item) * ROW_BYTES)
        elif isinstance(item, CallStacks):
            self._rows.release(len(item.calls) * CALL_BYTES)
        elif not item.is_in_shared_memory:
            self._records.release(_compute_charge(item.head))


def _compute_charge(head: RecordHead) -> int:
    return max(head.byte_count, MIN_RECORD_BYTES)

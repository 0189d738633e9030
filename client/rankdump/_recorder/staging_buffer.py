"""Staging of tensors: one copy into memory that outlives the step, either the agent's shared memory
or the heap under a byte budget. Never compresses, never waits longer than the plan allows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump._core.record import StatisticRows
from rankdump._core.recorder_protocol import PlacementResult, StagedRecord, TensorSource
from rankdump._core.session_protocol import CallStacks, RecordHead
from rankdump._transport.send_buffer import SendBuffer

MIN_RECORD_BYTES = 512
"""Approximate bytes of a record without elements; smaller records are charged this much."""
ROW_BYTES = 128
"""Approximate bytes of a row of statistics: its text and its part of the frame."""

CALL_BYTES = 256
"""Approximate bytes of a call with its stack; a repeated stack is sent once."""


class StagingBudget:
    """Budget of bytes held at once; an item larger than the limit is admitted alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held_bytes = 0
        self._freed = threading.Condition()

    @property
    def held_bytes(self) -> int:
        """Bytes held now."""
        return self._held_bytes

    def acquire(self, byte_count: int, compute_remaining_s: Callable[[], float]) -> bool:
        """Hold the bytes, waiting for space as long as allowed; False if time ran out."""
        with self._freed:
            while self._held_bytes and self._held_bytes + byte_count > self._limit_bytes:
                left_s = compute_remaining_s()
                if left_s <= 0:
                    return False
                # The remaining time is extended whenever the agent makes progress.
                self._freed.wait(min(left_s, 1.0))
            self._held_bytes += byte_count
            return True

    def release(self, byte_count: int) -> None:
        """Release bytes, and wake waiting threads."""
        with self._freed:
            self._held_bytes -= byte_count
            self._freed.notify_all()


class StagingBuffer:
    """Reserves space for records and rows, and copies tensors; safe for several threads."""

    def __init__(
        self,
        send_buffer: SendBuffer,
        *,
        records: StagingBudget,
        rows: StagingBudget,
        copies_directly: bool = True,
    ) -> None:
        """`copies_directly` permits copies into shared memory.

        Rows have their own budget, so that they are sent even if records have used all of theirs.
        """
        self._send_buffer = send_buffer
        self._records = records
        self._rows = rows
        self._copies_directly = copies_directly

    def keep(self, head: RecordHead, source: TensorSource) -> StagedRecord | None:
        """Copy a record's elements once; None if there is no space for them."""
        if self._copies_directly:
            result = self._send_buffer.place_record(head, source)
            if result is PlacementResult.DONE:
                return StagedRecord(head, memoryview(b""), is_in_shared_memory=True)
            if result is PlacementResult.FULL:
                return None
        charge = _compute_charge(head)
        if not self._records.acquire(charge, self._send_buffer.compute_remaining_wait_s):
            return None
        try:
            data = memoryview(bytearray(head.byte_count))
            source.copy_into(data)
        except BaseException:
            self._records.release(charge)
            raise
        return StagedRecord(head, data)

    def admit(self, rows: StatisticRows) -> bool:
        """Reserve space for rows until `release`; False if there is none in time."""
        return self._rows.acquire(len(rows) * ROW_BYTES, self._send_buffer.compute_remaining_wait_s)

    def admit_at_once(self, stacks: CallStacks) -> bool:
        """Reserve space for call stacks until `release`; False if there is none now."""
        return self._rows.acquire(len(stacks.calls) * CALL_BYTES, lambda: 0.0)

    def release(self, item: StagedRecord | StatisticRows | CallStacks) -> None:
        """Release the space of an item that was sent."""
        if isinstance(item, StatisticRows):
            self._rows.release(len(item) * ROW_BYTES)
        elif isinstance(item, CallStacks):
            self._rows.release(len(item.calls) * CALL_BYTES)
        elif not item.is_in_shared_memory:
            self._records.release(_compute_charge(item.head))


def _compute_charge(head: RecordHead) -> int:
    return max(head.byte_count, MIN_RECORD_BYTES)

"""Room 3: one copy of a kept tensor into memory that outlives the step, under a byte budget.

Later the copy goes into the agent's shared memory; the budget is then its free space. Never
compresses, never waits for the network longer than the plan allows.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rankdump.contract.exchange import IterationEnd, RecordHead
from rankdump.contract.key import TensorKey
from rankdump.values import Observation, Staged

BUFFER_FULL = "buffer_full"


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


@dataclass(slots=True)
class Tally:
    """The balance of one iteration so far."""

    expected: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    stall_ns: int = 0


class Stage:
    """Copies tensors in and keeps the balance; safe to use from several threads."""

    def __init__(
        self,
        *,
        rank: int,
        net_name: str,
        budget: Budget,
        patience_s: Callable[[], float],
        clock_us: Callable[[], int],
    ) -> None:
        self._rank = rank
        self._net_name = net_name
        self._budget = budget
        self._patience_s = patience_s
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._last_us = 0
        self._tallies: dict[int, Tally] = {}

    def take(self, observation: Observation, iteration: int) -> Staged | None:
        """Copy a kept tensor; None when it became a counted drop."""
        begun_ns = time.perf_counter_ns()
        source = observation.tensor
        staged = None
        if self._budget.acquire(source.byte_count, self._patience_s):
            try:
                data = memoryview(bytearray(source.byte_count))
                source.copy_into(data)
                staged = Staged(self._head(observation, iteration), data)
            finally:
                if staged is None:
                    self._budget.release(source.byte_count)
        with self._lock:
            tally = self._tally(iteration)
            tally.expected += 1
            tally.stall_ns += time.perf_counter_ns() - begun_ns
            if staged is None:
                tally.dropped[BUFFER_FULL] += 1
        return staged

    def lose(self, iteration: int, reason: str) -> None:
        """Count a selected tensor that never got here."""
        with self._lock:
            tally = self._tally(iteration)
            tally.expected += 1
            tally.dropped[reason] += 1

    def settle(self, iteration: int) -> IterationEnd:
        """Close the balance of an iteration and return it."""
        with self._lock:
            tally = self._tallies.pop(iteration, Tally())
        return IterationEnd(iteration, tally.expected, dict(tally.dropped), tally.stall_ns // 1000)

    def _tally(self, iteration: int) -> Tally:
        return self._tallies.setdefault(iteration, Tally())

    def _head(self, observation: Observation, iteration: int) -> RecordHead:
        source = observation.tensor
        key = TensorKey(
            rank=self._rank,
            net_name=self._net_name,
            graph=observation.graph,
            iteration=iteration,
            timestamp_us=self._stamp(),
            op_type=observation.op_type,
            op_name=observation.op_name,
            side=observation.side,
            slot=observation.slot,
        )
        return RecordHead(key, source.dtype, source.shape, source.byte_count, observation.argument)

    def _stamp(self) -> int:
        # Unique and rising even when the clock stands still or steps back: it names the file.
        with self._lock:
            self._last_us = max(self._last_us + 1, self._clock_us())
            return self._last_us

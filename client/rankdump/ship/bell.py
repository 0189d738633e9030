"""When the sender wakes: at once while it idles, and for a batch while entries keep coming."""

from __future__ import annotations

import threading

BATCH_ENTRIES = 256
BATCH_BYTES = 32 << 20
BATCH_S = 0.002


class Bell:
    """Counts entries of a slab; every call is made under the lock that it was given."""

    def __init__(self, lock: threading.RLock) -> None:
        self._rung = threading.Condition(lock)
        self._entries = self._bytes = 0
        self._enough = 1

    def count(self, byte_count: int) -> None:
        """Note an entry; it wakes the sender when enough have come for what it waits for."""
        self._entries += 1
        self._bytes += byte_count
        if self._entries >= self._enough or self._bytes >= BATCH_BYTES:
            self._rung.notify_all()

    def strike(self) -> None:
        """Wake the sender for anything that is no entry."""
        if self._enough == 1:
            self._rung.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait for anything; False when nothing came."""
        self._enough = 1
        return self._rung.wait(timeout_s)

    def gather(self) -> None:
        """Wait until a batch is full or its time is over, and begin the next."""
        self._enough = BATCH_ENTRIES
        if self._entries < BATCH_ENTRIES and self._bytes < BATCH_BYTES:
            self._rung.wait(BATCH_S)
        self._entries = self._bytes = 0
        self._enough = 1

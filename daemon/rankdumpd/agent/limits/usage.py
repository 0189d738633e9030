"""Bytes in use: the budget of frames in flight through the agent, which makes senders wait, and the
sizes of dumps on disk by job and by tree.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from rankdump.errors import UnavailableError


class QueueBudget:
    """A limit in bytes; callers that wait are served in their order.

    An item that is larger than the whole limit is admitted alone, when nothing else is in flight.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        """Largest number of bytes in use."""
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self.used_bytes = 0
        """Bytes in flight."""
        self.items = 0
        """Frames in flight."""
        self.finished_count = 0
        """Number of releases of frames."""
        self._growing: dict[object, int] = {}
        """Bytes of incomplete frames by owner, the oldest first."""
        self._closed = False

    @property
    def has_waiting(self) -> bool:
        """Whether a caller waits."""
        return bool(self._waiting)

    def acquire(self, cost_bytes: int, *, items: int = 1) -> None:
        """Wait until the bytes fit into the limit, then charge them; UnavailableError after
        `close`.
        """
        place = object()
        with self._changed:
            self._waiting.append(place)
            try:
                self._changed.wait_for(lambda: self._closed or self._may_pass(place, cost_bytes))
                if self._closed:
                    raise UnavailableError("the agent is stopping")
                self.used_bytes += cost_bytes
                self.items += items
            finally:
                self._waiting.remove(place)
                self._changed.notify_all()

    def begin(self, owner: object, cost_bytes: int) -> None:
        """Charge the first bytes of a frame; `grow` charges the rest as it arrives."""
        with self._changed:
            self.acquire(cost_bytes)
            self._growing[owner] = cost_bytes

    def grow(self, owner: object, more_bytes: int) -> None:
        """Wait until more bytes of an incomplete frame fit, then charge them.

        If only incomplete frames are in flight, no bytes can become free: then the oldest frame may
        exceed the limit.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_grow(owner, more_bytes))
            if self._closed:
                raise UnavailableError("the agent is stopping")
            self.used_bytes += more_bytes
            self._growing[owner] += more_bytes

    def end(self, owner: object, cost_bytes: int) -> None:
        """Set the final size of a frame that is complete now."""
        with self._changed:
            self.used_bytes += cost_bytes - self._growing.pop(owner)
            self._changed.notify_all()

    def abandon(self, owner: object) -> None:
        """Release the bytes of a frame that will never be complete."""
        with self._changed:
            self.used_bytes -= self._growing.pop(owner)
            self.items -= 1
            self._changed.notify_all()

    def count_unfinished(self) -> None:
        """Count one more frame without bytes, because its post-commit actions are not done."""
        with self._changed:
            self.items += 1

    def release(self, cost_bytes: int, *, items: int = 1) -> None:
        """Release the bytes of frames, and the frames."""
        with self._changed:
            self.used_bytes -= cost_bytes
            self.items -= items
            self.finished_count += 1
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> int:
        """Wait until nothing is in flight; return the number of frames that still are."""
        with self._changed:
            self._changed.wait_for(lambda: self.items == 0, timeout_s)
            return self.items

    def close(self) -> None:
        """Let all waiting calls fail, now and later."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _may_pass(self, place: object, cost_bytes: int) -> bool:
        if self._waiting[0] is not place:
            return False
        return self.items == 0 or self.used_bytes + cost_bytes <= self.limit_bytes

    def _may_grow(self, owner: object, more_bytes: int) -> bool:
        if self.used_bytes + more_bytes <= self.limit_bytes:
            return True
        only_begun = self.used_bytes == sum(self._growing.values())
        return only_begun and next(iter(self._growing)) is owner


class DumpUsage:
    """Size of the tensors in trees, in bytes; safe to use from several threads.

    Links, tables and manifests are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._jobs: Counter[str] = Counter()
        self._roots: Counter[str] = Counter()
        self._retired: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Bytes of all trees together."""
        return max(0, self._total)

    def restore(self, used: Iterable[tuple[str, str, int]], retired: Mapping[str, int]) -> None:
        """Start with the ledger's bytes by job and root, and removed iterations by job."""
        for job_id, root, byte_count in used:
            self.add(job_id, root, byte_count)
        self._retired.update(retired)

    def add(self, job_id: str, root: str, byte_count: int) -> None:
        """Add bytes of a job's tensors under a root; a negative number subtracts."""
        if byte_count:
            with self._lock:
                self._total += byte_count
                self._jobs[job_id] += byte_count
                self._roots[root] += byte_count

    def count_retired(self, job_id: str) -> None:
        """Count an iteration of a rank that was removed."""
        with self._lock:
            self._retired[job_id] += 1

    def job_bytes(self, job_id: str) -> int:
        """Return the size of a job's dump."""
        return max(0, self._jobs[job_id])

    def root_bytes(self, root: str) -> int:
        """Return the size of a tree."""
        return max(0, self._roots[root])

    def list_largest_roots(self, count: int) -> list[str]:
        """Return the roots of the `count` largest trees."""
        with self._lock:
            return [root for root, taken in self._roots.most_common(count) if taken > 0]

    def jobs(self) -> list[tuple[str, int, int]]:
        """Return each job with its size and the number of its removed iterations."""
        with self._lock:
            return [
                (job_id, taken, self._retired[job_id])
                for job_id, taken in self._jobs.items()
                if taken > 0
            ]

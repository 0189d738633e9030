"""The balance of every iteration: what was selected, what was lost and why, and what it cost.

Never decides; whoever keeps or loses a tensor says so here.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

from rankdump.contract.exchange import IterationEnd

_STALLS_AT_ONCE = 1024


@dataclass(slots=True)
class Tally:
    """The balance of one iteration so far."""

    expected: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    stall_ns: int = 0


class Accounts:
    """Counts of one rank; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[int, Tally] = {}
        self._lost: Counter[str] = Counter()
        self._kept = 0

    @property
    def kept(self) -> int:
        """Tensors that are kept, as records or as figures, in the whole run."""
        return self._kept

    @property
    def losses(self) -> Mapping[str, int]:
        """Tensors lost in the whole run, by reason, the most frequent first."""
        with self._lock:
            return dict(self._lost.most_common())

    def took(self, iteration: int, count: int = 1) -> None:
        """Count selected tensors that are on their way."""
        with self._lock:
            self._tally(iteration).expected += count
            self._kept += count

    def lost(self, iteration: int, reason: str, count: int = 1) -> None:
        """Count selected tensors that are not."""
        with self._lock:
            tally = self._tally(iteration)
            tally.expected += count
            tally.dropped[reason] += count
            self._lost[reason] += count

    def lost_on_the_way(self, count: int, reason: str) -> None:
        """Count tensors that were sent, and never arrived."""
        with self._lock:
            self._lost[reason] += count

    def stalled(self, iteration: int, stall_ns: int) -> None:
        """Add time for which the training thread was held up."""
        with self._lock:
            self._tally(iteration).stall_ns += stall_ns

    def expects(self, iteration: int) -> bool:
        """Return whether any tensor of the iteration was selected, whatever became of it."""
        with self._lock:
            tally = self._tallies.get(iteration)
            return tally is not None and tally.expected > 0

    def settle(self, iteration: int, span: tuple[int, int] = (0, 0)) -> IterationEnd:
        """Close the balance of an iteration and return it, with the positions that are its own."""
        with self._lock:
            tally = self._tallies.pop(iteration, Tally())
        stall_us = tally.stall_ns // 1000
        return IterationEnd(iteration, tally.expected, dict(tally.dropped), stall_us, *span)

    def _tally(self, iteration: int) -> Tally:
        found = self._tallies.get(iteration)
        if found is None:
            found = self._tallies[iteration] = Tally()
        return found


class Stalls:
    """How long dumping held the job up, all threads together; no tensor takes a lock."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._since: dict[int, int] = {}
        self._ended: list[int] = []
        self._total_ns = self._unsettled_ns = self._told_ns = 0

    def begin(self) -> None:
        """Note that this thread is held up from now on."""
        self._since[get_ident()] = self._clock_ns()

    def end(self) -> None:
        """Note that it no longer is."""
        self._ended.append(self._clock_ns() - self._since.pop(get_ident()))
        if len(self._ended) >= _STALLS_AT_ONCE:
            with self._lock:
                self._gather()

    @contextmanager
    def counted(self) -> Generator[None]:
        """Count what is done within."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def total_us(self) -> int:
        """Return the time so far, with what goes on right now; it never gets less."""
        with self._lock:
            self._gather()
            since = list(self._since.values())
            running_ns = len(since) * self._clock_ns() - sum(since)
            self._told_ns = max(self._told_ns, self._total_ns + running_ns)
            return self._told_ns // 1000

    def settle_ns(self) -> int:
        """Return what has ended since this was asked last."""
        with self._lock:
            self._gather()
            settled_ns, self._unsettled_ns = self._unsettled_ns, 0
            return settled_ns

    def _gather(self) -> None:
        # The list stays the same one: another thread may be about to append to it.
        ended = self._ended[:]
        del self._ended[: len(ended)]
        some_ns = sum(ended)
        self._total_ns += some_ns
        self._unsettled_ns += some_ns

"""The balance of every iteration: what was selected, what was lost and why, and what it cost.

Never decides; whoever keeps or loses a tensor says so here.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rankdump.contract.exchange import IterationEnd


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

    def settle(self, iteration: int) -> IterationEnd:
        """Close the balance of an iteration and return it."""
        with self._lock:
            tally = self._tallies.pop(iteration, Tally())
        return IterationEnd(iteration, tally.expected, dict(tally.dropped), tally.stall_ns // 1000)

    def _tally(self, iteration: int) -> Tally:
        found = self._tallies.get(iteration)
        if found is None:
            found = self._tallies[iteration] = Tally()
        return found

"""State of a rank's iterations: which one runs and whether it is dumped, what was selected and lost
in each and why, and for how long dumping held the job up. Decides nothing about tensors.

`dump_start` and `dump_stop` replace the plan's iterations from their first use on, as
MindSpore's dynamic mode does (MindSpore 2.3, Dump guide).
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident

from rankdump._core.plan import DumpPlan
from rankdump._core.selection import decide_device, decide_iteration
from rankdump._core.session_protocol import IterationEnd


class IterationState:
    """The iterations of one rank; changed on the training thread, read from any."""

    def __init__(self, plan: DumpPlan, device: int) -> None:
        self._plan = plan
        self._here = decide_device(plan, device).accepted
        self._switch: bool | None = None
        self._described = False
        self._touched = False  # armed at some time in the running iteration
        self.iteration = plan.selection.initial_iteration
        """The iteration that runs now."""
        self.armed = False
        """Whether tensors of this iteration are kept now."""
        self.active = False
        """Whether anything happened in this iteration."""
        self.ever_armed = False
        """Whether any iteration was armed."""
        self.iterations_seen = 0
        """Iterations that ran."""
        self.iterations_armed = 0
        """Iterations that ran and were dumped, at least in part."""
        self.retired_in: int | None = None
        """The last iteration to be dumped, once the plan has what it asked for."""

    @property
    def switched(self) -> bool:
        """Whether the script itself says when to dump."""
        return self._switch is not None

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described now."""
        return self.armed and not self._described

    def begin(self, iteration: int) -> None:
        """Make this the running iteration."""
        self.iteration = iteration
        self.active = self._touched = False
        self._arm()

    def end(self, *, ran: bool) -> bool:
        """Return whether the iteration that is over counts as dumped; it does not if none ran."""
        if not (ran or self.active):
            return False
        self.iterations_seen += 1
        self.iterations_armed += self._touched
        self._described = self._described or self._touched
        return self._touched

    def set_dumping(self, on: bool) -> None:
        """Dump from now on, or no longer, whatever iterations the plan names."""
        self._switch = on
        self._arm()

    def describe_again(self) -> None:
        """Let operators be described in the next armed iteration too: a model was added."""
        self._described = False

    def stop_after_current(self) -> None:
        """Dump no iteration after this one: the plan has what it asked for."""
        self.retired_in = self.iteration

    def disable(self) -> None:
        """Dump nothing any more: there is nowhere to send it."""
        self._here = self.armed = False

    def _arm(self) -> None:
        wanted = self._switch
        if wanted is None:
            wanted = decide_iteration(self._plan, self.iteration).accepted
        over = self.retired_in is not None and self.retired_in != self.iteration
        self.armed = self._here and wanted and not over
        self._touched = self._touched or self.armed
        self.ever_armed = self.ever_armed or self.armed


_MAX_UNSUMMED_STALLS = 1024


@dataclass(slots=True)
class IterationBalance:
    """The balance of one iteration so far."""

    expected: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    stall_ns: int = 0


class IterationCounters:
    """Counts of one rank; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[int, IterationBalance] = {}
        self._lost: Counter[str] = Counter()
        self._kept = 0

    @property
    def kept_tensors(self) -> int:
        """Tensors that are kept, as records or as statistics, in the whole run."""
        return self._kept

    @property
    def losses_by_reason(self) -> Mapping[str, int]:
        """Tensors lost in the whole run, by reason, the most frequent first."""
        with self._lock:
            return dict(self._lost.most_common())

    def count_sent(self, iteration: int, count: int = 1) -> None:
        """Count selected tensors that are on their way."""
        with self._lock:
            self._tally(iteration).expected += count
            self._kept += count

    def count_lost(self, iteration: int, reason: str, count: int = 1) -> None:
        """Count selected tensors that are not."""
        with self._lock:
            tally = self._tally(iteration)
            tally.expected += count
            tally.dropped[reason] += count
            self._lost[reason] += count

    def count_undelivered(self, count: int, reason: str) -> None:
        """Count tensors that were sent, and never arrived."""
        with self._lock:
            self._lost[reason] += count

    def add_stall(self, iteration: int, stall_ns: int) -> None:
        """Add time for which the training thread was held up."""
        with self._lock:
            self._tally(iteration).stall_ns += stall_ns

    def expects(self, iteration: int) -> bool:
        """Return whether any tensor of the iteration was selected, whatever became of it."""
        with self._lock:
            tally = self._tallies.get(iteration)
            return tally is not None and tally.expected > 0

    def close_iteration(self, iteration: int, span: tuple[int, int] = (0, 0)) -> IterationEnd:
        """Close the balance of an iteration and return it, with the positions that are its own."""
        with self._lock:
            tally = self._tallies.pop(iteration, IterationBalance())
        stall_us = tally.stall_ns // 1000
        return IterationEnd(iteration, tally.expected, dict(tally.dropped), stall_us, *span)

    def _tally(self, iteration: int) -> IterationBalance:
        found = self._tallies.get(iteration)
        if found is None:
            found = self._tallies[iteration] = IterationBalance()
        return found


class StallTimer:
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
        if len(self._ended) >= _MAX_UNSUMMED_STALLS:
            with self._lock:
                self._gather()

    @contextmanager
    def measure_stall(self) -> Generator[None]:
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

    def take_ended_ns(self) -> int:
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

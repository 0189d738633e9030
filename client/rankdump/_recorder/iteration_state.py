"""State of a rank's iterations: which iteration runs and whether it is dumped, counts of selected
and lost tensors with reasons, and how long dumping delayed the job. It makes no decision about a
tensor.

From their first use on, `dump_start` and `dump_stop` replace the iterations that the plan names, as
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

from rankdump._core.job_control import IterationPlan
from rankdump._core.plan import DumpPlan
from rankdump._core.recorder_protocol import UNDIVIDED_PASS, ForwardPass
from rankdump._core.selection import decide_device, decide_iteration
from rankdump._core.session_protocol import IterationEnd


class IterationState:
    """Iterations of one rank; changed on the training thread, read from any thread."""

    def __init__(self, plan: DumpPlan, device: int) -> None:
        self._plan = plan
        self._here = decide_device(plan, device).accepted
        self._switch: bool | None = None
        self._is_hidden = False
        self._overrides_switch = False
        self._described = False
        self.was_armed = False
        """Whether tensors were kept during any part of the running iteration."""
        self.iteration = plan.selection.initial_iteration
        """The iteration that runs now."""
        self.declared_pass = UNDIVIDED_PASS
        """The micro-batch that the script declared last in this iteration, if any."""
        self.armed = False
        """Whether tensors of this iteration are kept now."""
        self.active = False
        """Whether any operator ran in this iteration."""
        self.switched = False
        """Whether the script has used `dump_start` or `dump_stop`."""
        self.ever_armed = False
        """Whether any iteration of the run was armed."""
        self.iterations_seen = 0
        """Iterations that ran."""
        self.iterations_armed = 0
        """Iterations that ran and were dumped, at least in part."""
        self.retired_in: int | None = None
        """Last iteration to be dumped, after the plan's limit was reached; None before."""

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described for the graph now."""
        return self.armed and not self._described

    def begin(self, iteration: int) -> None:
        """Make this the running iteration."""
        self.iteration = iteration
        self.active = self.was_armed = False
        self.declared_pass = UNDIVIDED_PASS
        self._arm()

    def end(self, *, ran: bool) -> bool:
        """End the iteration; return whether it was dumped. An iteration in which nothing ran was
        not.
        """
        if not (ran or self.active):
            return False
        self.iterations_seen += 1
        self.iterations_armed += self.was_armed
        self._described = self._described or self.was_armed
        return self.was_armed

    def set_microbatch(self, index: int) -> None:
        """Assign this micro-batch number to everything that the script runs from now on in this
        iteration.
        """
        self.declared_pass = ForwardPass(index)

    def set_dumping(self, on: bool) -> None:
        """Start or stop dumping now, whatever iterations the plan names."""
        self._switch, self.switched = on, True
        self._arm()

    def use_plan(self, found: IterationPlan) -> None:
        """Use another plan from the next iteration on; called before that iteration begins."""
        self._plan = found.plan
        self._overrides_switch = found.overrides_switch
        if found.ends_switch:
            self._switch, self.switched = None, False

    def describe_again(self) -> None:
        """Describe operators in the next armed iteration again, because a model was added."""
        self._described = False

    def stop_after_current(self) -> None:
        """Dump no iteration after this one, because the plan's limit is reached."""
        self.retired_in = self.iteration

    def hide(self, on: bool) -> None:
        """Suspend dumping within this iteration, or resume it; whether the script has switched
        dumping on is not changed.
        """
        self._is_hidden = on
        self._arm()

    def disable(self) -> None:
        """Dump nothing from now on, because no agent takes the data."""
        self._here = self.armed = False

    def _arm(self) -> None:
        wanted = None if self._overrides_switch else self._switch
        if wanted is None:
            wanted = decide_iteration(self._plan, self.iteration).accepted
        over = self.retired_in is not None and self.retired_in != self.iteration
        self.armed = self._here and wanted and not over and not self._is_hidden
        self.was_armed = self.was_armed or self.armed
        self.ever_armed = self.ever_armed or self.armed


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A selected tensor that was not recorded, with the reason."""

    iteration: int
    op_name: str
    reason: str


_MAX_UNSUMMED_STALLS = 1024


@dataclass(slots=True)
class IterationBalance:
    """Counts of selected tensors of one iteration so far."""

    expected: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])
    stall_ns: int = 0


class IterationCounters:
    """Counts of kept and lost tensors of one rank; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tallies: dict[int, IterationBalance] = {}
        self._lost: Counter[str] = Counter()
        self.kept_tensors = 0
        """Tensors kept in the whole run, as records or as statistics."""

    @property
    def losses_by_reason(self) -> Mapping[str, int]:
        """Tensors lost in the whole run, by reason, the most frequent first."""
        with self._lock:
            return dict(self._lost.most_common())

    def count_sent(self, iteration: int, count: int = 1) -> None:
        """Count selected tensors that were submitted."""
        with self._lock:
            tally = self._tallies.get(iteration) or self._get_balance(iteration)
            tally.expected += count
            self.kept_tensors += count

    def count_lost(self, iteration: int, reason: str, count: int = 1) -> None:
        """Count selected tensors that were lost."""
        with self._lock:
            tally = self._get_balance(iteration)
            tally.expected += count
            tally.dropped[reason] += count
            self._lost[reason] += count

    def count_undelivered(self, count: int, reason: str) -> None:
        """Count tensors that were submitted but never reached the agent."""
        with self._lock:
            self._lost[reason] += count

    def add_stall(self, iteration: int, stall_ns: int) -> None:
        """Add nanoseconds for which the training thread was delayed."""
        with self._lock:
            self._get_balance(iteration).stall_ns += stall_ns

    def expects(self, iteration: int) -> bool:
        """Return whether any tensor of the iteration was selected, kept or not."""
        with self._lock:
            tally = self._tallies.get(iteration)
            return tally is not None and tally.expected > 0

    def close_iteration(self, iteration: int, span: tuple[int, int] = (0, 0)) -> IterationEnd:
        """Close the balance of an iteration; return it with the range of positions of
        its events.
        """
        with self._lock:
            tally = self._tallies.pop(iteration, IterationBalance())
        stall_us = tally.stall_ns // 1000
        return IterationEnd(iteration, tally.expected, dict(tally.dropped), stall_us, *span)

    def _get_balance(self, iteration: int) -> IterationBalance:
        found = self._tallies.get(iteration)
        if found is None:
            found = self._tallies[iteration] = IterationBalance()
        return found


class StallTimer:
    """Time for which dumping delayed the job, summed over all threads; measuring takes no lock."""

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._since: dict[int, int] = {}
        self._ended: list[int] = []
        self._total_ns = self._unsettled_ns = self._told_ns = 0

    def begin(self) -> None:
        """Begin a delay of the calling thread."""
        self._since[get_ident()] = self._clock_ns()

    def end(self) -> None:
        """End the delay of the calling thread."""
        self._ended.append(self._clock_ns() - self._since.pop(get_ident()))
        if len(self._ended) >= _MAX_UNSUMMED_STALLS:
            with self._lock:
                self._gather()

    @contextmanager
    def measure_stall(self) -> Generator[None]:
        """Measure the time of the block as a delay of the calling thread."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def total_us(self) -> int:
        """Return the total delay in microseconds, including delays that have not ended; it never
        decreases.
        """
        with self._lock:
            self._gather()
            since = list(self._since.values())
            running_ns = len(since) * self._clock_ns() - sum(since)
            self._told_ns = max(self._told_ns, self._total_ns + running_ns)
            return self._told_ns // 1000

    def take_ended_ns(self) -> int:
        """Return the nanoseconds of delays that ended since the last call."""
        with self._lock:
            self._gather()
            settled_ns, self._unsettled_ns = self._unsettled_ns, 0
            return settled_ns

    def _gather(self) -> None:
        # The list object is kept: another thread may be about to append to it.
        ended = self._ended[:]
        del self._ended[: len(ended)]
        some_ns = sum(ended)
        self._total_ns += some_ns
        self._unsettled_ns += some_ns

"""The rooms of a training process, wired: an observation goes filter -> stage -> ship.

Composition root. Answers to adapters as their `Recorder`; nothing here raises into the job.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable

from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.exchange import SessionEnd, SessionRequest
from rankdump.contract.key import Side
from rankdump.contract.plan import DumpPlan
from rankdump.contract.selection import device_verdict, iteration_verdict
from rankdump.filter import Filter, Run, size_decision, why_nothing
from rankdump.ship import Link, Ship
from rankdump.stage import Budget, Stage
from rankdump.trace import Trace, now_us
from rankdump.values import Collective, Observation, Staged

logger = logging.getLogger("rankdump")

FIRST_ANSWER_S = 5.0
"""Longest a job waits at its start for an agent that neither answers nor refuses."""


class Pipeline:
    """One rank's way from operator to agent; safe to use from several threads."""

    def __init__(self, plan: DumpPlan, request: SessionRequest, address: str) -> None:
        self._plan = plan
        self._address = address
        self._device = request.device
        self._here = device_verdict(plan, request.device).accepted
        self._filter = Filter(plan)
        self._budget = Budget(plan.delivery.buffer_bytes)
        self._stage = Stage(
            rank=request.rank,
            net_name=plan.output.net_name,
            budget=self._budget,
            patience_s=self._patience_s,
            clock_us=now_us,
        )
        self._trace = Trace()
        self._ship = Ship(
            request,
            address,
            on_taken=self._taken,
            on_idle=self._hand_over_events,
            on_link=self._link_changed,
        )
        self._armed = self._in_child = self._away = False
        self._iteration = 0
        self._active = False  # anything happened in this iteration
        self._seen = self._armed_seen = self._kept = 0
        self._lost: Counter[str] = Counter()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Connect to the agent and begin at iteration 0."""
        disarm = weakref.WeakMethod(self._disarm_in_child)
        os.register_at_fork(after_in_child=lambda: _call(disarm()))
        self._ship.start(FIRST_ANSWER_S)
        self.begin_iteration(0)

    # -- iterations, called by the session on the training thread

    @property
    def iteration(self) -> int:
        """The iteration that runs now."""
        return self._iteration

    @property
    def armed(self) -> bool:
        """Whether the plan selects the iteration that runs now on this rank."""
        return self._armed

    @property
    def losses(self) -> int:
        """Tensors lost so far, over all reasons."""
        return sum(self._lost.values())

    def begin_iteration(self, iteration: int) -> None:
        """Make this the running iteration."""
        self._iteration = iteration
        self._trace.begin_iteration(iteration)
        self._active = False
        self._armed = self._here and iteration_verdict(self._plan, iteration).accepted

    def end_iteration(self, *, ran: bool) -> None:
        """Declare the running iteration over; one in which nothing ran is not declared."""
        if not (ran or self._active):
            return
        self._seen += 1
        if self._armed:
            self._armed_seen += 1
            self._hand_over_events()
            self._ship.submit(self._stage.settle(self._iteration))

    # -- what adapters call, from any thread

    def wants(self, op_name: str, side: Side) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        self._active = True
        return self._armed and self._filter.decide(op_name, side).keep

    def observe(self, observation: Observation) -> None:
        """Take one tensor, if the plan selects it."""
        if not self.wants(observation.op_name, observation.side):
            return
        source = observation.tensor
        if source.dtype not in ELEMENT_TYPES:
            self._lose("unsupported_dtype", observation.op_name)
        elif size_decision(source.byte_count).keep:
            try:
                staged = self._stage.take(observation, self._iteration)
            except Exception:  # a tensor that cannot be read must not end the training
                logger.debug("copy failed", exc_info=True)
                self._lose("copy_failed", observation.op_name)
                return
            with self._lock:
                self._kept += staged is not None
                self._lost["buffer_full"] += staged is None
            if staged is not None:
                self._ship.submit(staged)

    def lose(self, op_name: str, side: Side, reason: str) -> None:
        """Count a tensor that could not be read, if the plan selects it."""
        if self.wants(op_name, side):
            self._lose(reason, op_name)

    def started(self) -> tuple[int, int]:
        """Advance the rank's program by one event; return its position and the time in us."""
        return self._trace.started()

    def finished(
        self,
        begun: tuple[int, int],
        *,
        graph: int,
        name: str,
        collective: Collective | None = None,
    ) -> None:
        """Record an event begun earlier as complete now; from any thread."""
        self._active = True
        if self._trace.finished(begun, graph=graph, name=name, collective=collective):
            self._hand_over_events()

    def warn_once(self, message: str) -> None:
        """Log a warning the first time it is said."""
        with self._lock:
            if message in self._said:
                return
            self._said.add(message)
        logger.warning("rankdump: %s", message)

    # -- the end

    def close(self) -> None:
        """Say goodbye, deliver what waits, and tell what was lost."""
        if self._in_child:
            return
        self._armed = False
        self._hand_over_events()
        reason = why_nothing(self._plan, self._run())
        notes = (reason,) if reason else ()
        self._ship.submit(SessionEnd(self._seen, notes))
        left = self._ship.close(self._plan.delivery.block_timeout_s)
        if reason:
            self.warn_once(f"nothing was dumped: {reason}")
        if left:
            self._lost["not_taken_by_agent"] += left
        if self._ship.lost_declarations:
            count = self._ship.lost_declarations
            self.warn_once(f"{count} batches of events and ends of iterations were not sent")
        lost = +self._lost
        if lost:
            listed = ", ".join(f"{count} {name}" for name, count in lost.most_common())
            self.warn_once(f"{sum(lost.values())} tensors were not dumped: {listed}")

    # -- what the rooms and the interpreter call back

    def _disarm_in_child(self) -> None:
        # A fork copies neither the sender's thread nor the channel: the session is the parent's.
        self._in_child = True
        self._here = self._armed = False

    def _taken(self, staged: Staged) -> None:
        self._budget.release(staged.head.byte_count)

    def _hand_over_events(self) -> None:
        events = self._trace.take()
        if events is not None:
            self._ship.submit(events)

    def _patience_s(self) -> float:
        """Return how long a tensor may still wait for room."""
        delivery = self._plan.delivery
        if delivery.on_full != "block" or self._ship.link not in (Link.UP, Link.AWAY):
            return 0.0
        return delivery.block_timeout_s - self._ship.idle_s()

    def _link_changed(self, link: Link, reason: str) -> None:
        if link is Link.ABSENT:
            held = self._plan.delivery.buffer_bytes >> 20
            self.warn_once(
                f"no agent at {self._address}: training goes on, up to {held} MiB of tensors "
                f"wait for one, the rest is dropped and counted"
            )
        elif link is Link.REFUSED:
            self._here = self._armed = False
            self.warn_once(f"the agent at {self._address} refused this rank: {reason}")
        elif link is Link.AWAY and not self._away:
            self._away = True
            if not self._ship.closing:
                logger.warning("rankdump: lost the agent at %s: %s", self._address, reason)
        elif link is Link.UP and self._away:
            self._away = False
            logger.warning("rankdump: the agent at %s is back", self._address)

    def _lose(self, reason: str, op_name: str) -> None:
        self._stage.lose(self._iteration, reason)
        with self._lock:
            self._lost[reason] += 1
        self.warn_once(f"tensors are dropped for {reason}, the first at {op_name}")

    def _run(self) -> Run:
        return Run(
            device=self._device,
            iterations_seen=self._seen,
            iterations_armed=self._armed_seen,
            last_iteration=self._iteration,
            operators_seen=self._filter.asked,
            tensors_kept=self._kept,
        )


def _call(method: Callable[[], None] | None) -> None:
    if method is not None:
        method()

"""Answers of a rank to orders that change what its job dumps. They are made on the thread of the
connection, so a rank whose training hangs answers too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from rankdump._config.control_changes import make_plan_change
from rankdump._core.bounded_cache import remember
from rankdump._core.job_control import ControlAnswer, ControlOrder, PlanChange, PlanSchedule
from rankdump.errors import ConfigError

_TIMED_STEPS = 8
_MAX_REMEMBERED_ORDERS = 64
NOT_ASKED = "it was not asked before which iteration it runs"
"""Reason of a rank that was not asked first: the coordinator neither waited for it nor chose an
iteration that it can begin with.
"""


class OrderResponder:
    """Applies each order once, and reports the rank's position in its job."""

    def __init__(
        self,
        schedule: PlanSchedule,
        find_fault: Callable[[PlanChange], str],
        change_plan: Callable[[PlanChange, int], int | str],
        find_note: Callable[[PlanChange], str] = lambda change: "",
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """`schedule` has the changes so far. `find_fault` returns why a change is impossible.
        `change_plan` returns the first iteration that has the change, or why it is impossible.
        `find_note` returns a remark on a change with a surprising effect.
        """
        self._schedule, self._clock_ns = schedule, clock_ns
        self._find_fault, self._change_plan = find_fault, change_plan
        self._find_note = find_note
        self._asked: dict[str, bool] = {}
        """Ids of orders that asked for the rank's position."""
        self._answers: dict[str, ControlAnswer] = {}
        self._iteration = 0
        self._begun_ns = clock_ns()
        self._steps_ns: deque[int] = deque(maxlen=_TIMED_STEPS)

    def begin_iteration(self, iteration: int) -> None:
        """Note that an iteration begins; called on the training thread."""
        now_ns = self._clock_ns()
        if iteration != self._iteration:
            self._steps_ns.append(now_ns - self._begun_ns)
        self._iteration, self._begun_ns = iteration, now_ns

    def answer(self, order: ControlOrder) -> ControlAnswer:
        """Apply an order; if it names no iteration, return the rank's position instead."""
        try:
            change = make_plan_change(order.action, order.values)
        except ConfigError as error:
            return ControlAnswer(order.id, order.iteration is not None, 0, refused=str(error))
        known = self._answers.get(order.id)
        if order.iteration is None:
            remember(self._asked, order.id, True, _MAX_REMEMBERED_ORDERS)
            begun = None if known is None or known.refused else known.iteration
            position = self._tell_position(order.id, self._find_fault(change))
            return replace(position, begun=begun)
        if known is None:
            known = self._apply(order.id, change, order.iteration)
            remember(self._answers, order.id, known, _MAX_REMEMBERED_ORDERS)
        return known

    def _tell_position(self, order_id: str, fault: str) -> ControlAnswer:
        running_ns = self._clock_ns() - self._begun_ns
        # The list is copied, because another thread may append to it at any time.
        step_ns = min(list(self._steps_ns), default=running_ns)
        pending = self._schedule.pending
        return ControlAnswer(order_id, False, self._iteration, step_ns // 1000, fault, pending)

    def _apply(self, order_id: str, change: PlanChange, iteration: int) -> ControlAnswer:
        asked = order_id in self._asked
        found = self._change_plan(change, iteration) if asked else NOT_ASKED
        if isinstance(found, str):
            return ControlAnswer(order_id, True, self._iteration, refused=found)
        return ControlAnswer(order_id, True, found, note=self._find_note(change))

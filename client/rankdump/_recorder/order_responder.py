"""Answers of a rank to orders that control its job. Called on the thread of the connection, so a
rank whose training hangs answers as well.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from rankdump._config.control_changes import make_plan_change
from rankdump._core.bounded_cache import remember
from rankdump._core.job_control import ControlAction, ControlAnswer, ControlOrder
from rankdump._core.plan_change import PlanChange, PlanSchedule
from rankdump.errors import ConfigError

_TIMED_STEPS = 8
_NO_BLACK_BOX = "it has no black box: rankdump.blackbox of its configuration switches one on"
_MAX_REMEMBERED_ORDERS = 64


class OrderResponder:
    """Carries out orders, each once, and says where the rank is in its job."""

    def __init__(
        self,
        schedule: PlanSchedule,
        find_fault: Callable[[PlanChange], str],
        change_plan: Callable[[PlanChange, int], int | str],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        *,
        has_black_box: bool = False,
    ) -> None:
        """`schedule` has the changes so far. `find_fault` returns why a plan cannot be changed,
        `change_plan` that or the first iteration that has the change.
        """
        self._schedule, self._clock_ns = schedule, clock_ns
        self._find_fault, self._change_plan = find_fault, change_plan
        self._freeze_fault = "" if has_black_box else _NO_BLACK_BOX
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
        """Carry out an order, or say where the rank is if it has no iteration."""
        if order.action is ControlAction.FREEZE:
            return self._tell_position(order.id, self._freeze_fault)
        try:
            change = make_plan_change(order.action, order.values)
        except ConfigError as error:
            return ControlAnswer(order.id, order.iteration is not None, 0, refused=str(error))
        if order.iteration is None:
            return self._tell_position(order.id, self._find_fault(change))
        known = self._answers.get(order.id)
        if known is None:
            known = self._apply(order.id, change, order.iteration)
            remember(self._answers, order.id, known, _MAX_REMEMBERED_ORDERS)
        return known

    def _tell_position(self, order_id: str, fault: str) -> ControlAnswer:
        running_ns = self._clock_ns() - self._begun_ns
        # Another thread may add one at any time.
        step_ns = min(list(self._steps_ns), default=running_ns)
        pending = self._schedule.pending
        return ControlAnswer(order_id, False, self._iteration, step_ns // 1000, fault, pending)

    def _apply(self, order_id: str, change: PlanChange, iteration: int) -> ControlAnswer:
        found = self._change_plan(change, iteration)
        if isinstance(found, str):
            return ControlAnswer(order_id, True, self._iteration, refused=found)
        return ControlAnswer(order_id, True, found)

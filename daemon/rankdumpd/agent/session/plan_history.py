"""Plans of one session: each holds for the frames between two changed plans, so that a frame that
is resent is judged by the plan that it was made for.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from rankdump._core.job_control import is_changeable_to
from rankdump._core.plan import DumpPlan
from rankdump._layout.tree_layouts import find_contradiction
from rankdump.errors import ProtocolError
from rankdumpd.agent.storage.session_storage import SessionStorage, change_session_storage


@dataclass(frozen=True, slots=True)
class PlanPeriod:
    """Frames behind one changed plan, up to the next one."""

    begin: int
    """Number of the frame that brought the plan; 0 for the one that opened the session."""
    plan: DumpPlan
    storage: SessionStorage
    iteration: int | None = None
    """First iteration with the plan; None for the plan that opened the session, also when it comes
    back, as after the iterations that a watch rule dumps."""


class PlanHistory:
    """Plans of one session, in the order of their frames; safe to use from several threads."""

    def __init__(self, plan: DumpPlan, storage: SessionStorage) -> None:
        self._lock = threading.Lock()
        self._periods = [PlanPeriod(0, plan, storage)]

    @property
    def latest(self) -> PlanPeriod:
        """The period of the newest plan."""
        return self._periods[-1]

    def find(self, sequence: int) -> tuple[PlanPeriod, int | None]:
        """Return the period of a frame, and the number of the change that ends it, if any."""
        with self._lock:
            end: int | None = None
            for period in reversed(self._periods):
                if period.begin < sequence or not period.begin:
                    return period, end
                end = period.begin
        raise AssertionError("the first period has all frames that no other has")

    def add(self, sequence: int, plan: DumpPlan, iteration: int) -> None:
        """Begin a period with the plan of a frame, which holds from an iteration on.

        A known number changes nothing.

        ProtocolError when a running job cannot have that plan.
        """
        with self._lock:
            latest = self._periods[-1]
            if sequence <= latest.begin:
                return
            if not is_changeable_to(latest.plan, plan):
                raise ProtocolError(f"frame {sequence} changes what a plan has for good")
            fault = find_contradiction(plan)
            if fault:
                raise ProtocolError(f"frame {sequence} brings a plan that is impossible: {fault}")
            storage = change_session_storage(latest.storage, plan)
            begin = None if plan == self._periods[0].plan else iteration
            self._periods.append(PlanPeriod(sequence, plan, storage, begin))

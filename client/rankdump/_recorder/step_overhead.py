"""Overhead of a rank: measures the time that dumping takes in each iteration, and keeps the form
that the governor chose for the tensors of the running iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from rankdump._core.hook_meter import HOOK_METER, HookMeter
from rankdump._core.plan import DumpPlan
from rankdump._core.units import format_percentage
from rankdump._recorder.overhead_governor import (
    FidelityLevel,
    GovernorDecision,
    GovernorState,
    LevelReason,
    OverheadGovernor,
    RecordForm,
    StepCost,
)
from rankdump._recorder.plan_settings import SAMPLE_ELEMENTS, list_record_forms

_BUDGET_PART = 4
"""Divisor of the tightest timeout of communication: dumping may hold up an iteration for a quarter
of that timeout. Ranks that wait for this rank have then used a quarter of it, and half of it only
after further growth.
"""


_FORM_TEXTS: Mapping[RecordForm, str] = {
    RecordForm.FULL: "all that the plan selects",
    RecordForm.SAMPLE: f"the first {SAMPLE_ELEMENTS} elements of each tensor",
    RecordForm.STATISTICS: "statistics",
    RecordForm.NOTHING: "no tensors",
}


def describe_level(level: FidelityLevel) -> str:
    """Return a description of the tensors that a level keeps.

    >>> describe_level(FidelityLevel(RecordForm.STATISTICS, 2, 5, RecordForm.NOTHING))
    'statistics in 2 of 5 iterations, no tensors in the others'
    """
    form = _FORM_TEXTS[level.form]
    if level.mean_interval == 1:
        return form
    others = _FORM_TEXTS[level.other_form]
    kept, length = level.kept_per_cycle, level.cycle_length
    return f"{form} in {kept} of {length} iterations, {others} in the others"


class StepOverhead:
    """Overhead of one rank; changed on the training thread. `select_form` is called from any
    thread.
    """

    def __init__(
        self,
        plan: DumpPlan,
        *,
        rank: int,
        find_timeout_us: Callable[[], int],
        warn: Callable[[str, str], None],
        meter: HookMeter = HOOK_METER,
    ) -> None:
        """`find_timeout_us` returns the tightest known timeout of communication in microseconds; 0
        if none is known. `warn(text, subject)` logs a text once for each subject.
        """
        self.use_plan(plan)
        self._rank, self._find_timeout_us, self._warn = rank, find_timeout_us, warn
        self._meter = meter
        self._begun_ns = self._spent_ns = 0
        self._limit_ns = 0
        """Reading of the meter in nanoseconds at which the running iteration has used its budget; 0
        if there is no budget.
        """
        self._forms_used: Counter[RecordForm] = Counter()

    def use_plan(self, plan: DumpPlan) -> None:
        """Restart the governor with another plan, which may permit other forms."""
        self._governor = OverheadGovernor(plan.delivery.max_step_overhead, list_record_forms(plan))
        self._state = GovernorState()
        self._form = RecordForm.FULL

    def start(self) -> None:
        """Start measuring."""
        self._meter.start()
        self._begun_ns, self._spent_ns = self._meter.split()

    def stop(self) -> None:
        """Stop measuring."""
        self._meter.stop()

    def disarm(self) -> None:
        """Stop measuring in a forked child."""
        self._meter.disarm()

    def select_form(self) -> RecordForm:
        """Return the form of a tensor that is observed now."""
        if 0 < self._limit_ns <= self._meter.ended_ns:
            self._form = self._governor.forms[-1]
        return self._form

    def end_iteration(self, iteration: int, *, dumped: bool) -> None:
        """Take the cost of an iteration, and decide how the next one is kept."""
        now_ns, spent_ns = self._meter.split()
        cost_ns, whole_ns = spent_ns - self._spent_ns, now_ns - self._begun_ns
        self._begun_ns, self._spent_ns = now_ns, spent_ns
        budget_ns = self._find_timeout_us() * 1000 // _BUDGET_PART
        self._limit_ns = spent_ns + budget_ns if budget_ns else 0
        if dumped:
            self._forms_used[self._state.form] += 1
            step = StepCost(cost_ns, max(0, whole_ns - cost_ns))
            before = self._state.level
            decision = self._governor.advance(self._state, step, budget_ns=budget_ns)
            self._state = decision.state
            self._announce(iteration, before, decision)
        self._form = self._state.form

    def summarize(self) -> str:
        """Return a text about what was kept of how many iterations; empty if everything
        was kept.
        """
        used = self._forms_used
        if not used.total() - used[RecordForm.FULL]:
            return ""
        parts = [f"{_FORM_TEXTS[form]} in {used[form]:,}" for form in RecordForm if used[form]]
        share = format_percentage(self._governor.allowed)
        return (
            f"max_step_overhead is {share} of a step: of {used.total():,} iterations the rank kept "
            f"{', '.join(parts)}"
        )

    def _announce(self, iteration: int, before: FidelityLevel, decision: GovernorDecision) -> None:
        level, reason = decision.state.level, decision.reason
        if reason in (LevelReason.STAY, LevelReason.ROOM):
            return
        took, allowed = map(format_percentage, (decision.share, self._governor.allowed))
        cause = f"dumping took {took} of the step, {allowed} is allowed"
        if reason is LevelReason.TIMEOUT:
            cause += ", and held it up for a quarter of a timeout of communication"
        keeps = f"instead of {describe_level(before)} it now keeps {describe_level(level)}"
        if reason is LevelReason.LEAST:
            keeps = f"it keeps {describe_level(level)} already, and there is nothing less"
        text = f"rank {self._rank}, iteration {iteration}: {cause} (max_step_overhead): {keeps}"
        # Cycle lengths change often, so only a change to other forms is logged, and only once.
        forms = (before.form, before.base, level.form, level.base)
        self._warn(text, f"fidelity of rank {self._rank} {[each.name for each in forms]}")

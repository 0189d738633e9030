"""Governor of a rank's overhead: from the cost of each iteration it decides in which form the
tensors of the next iterations are kept, so that the cost stays within the allowed share of a step.
Pure: no clock, no disk, no network.

A level keeps every k-th iteration in one form, where k may be a fraction, and the iterations
between in a cheaper form. When the cost is too high, the rank goes down to a level with the next
cheaper form for all iterations. When a form leaves room, every k-th iteration is kept in a richer
form. A level is judged over a window of whole cycles: it stays while its measured share of the step
is between ROOM_SHARE of the allowed share and the allowed share. If a level that was tried because
of room costs too much, the wait before the next trial is doubled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, gcd
from typing import NamedTuple

MIN_WINDOW_STEPS = 4
"""A level is judged by at least this many iterations; the first iteration of the level is not
counted.
"""
ROOM_SHARE = 0.8
"""Fraction of the allowed share below which there is room for a richer level."""
MAX_INTERVAL = 1024
_SHORT_INTERVAL = 8
_SHORT_KEPT_PER_CYCLE = 4
"""Iterations of a cycle that are kept in the richer form if the mean interval between them is below
`_SHORT_INTERVAL`: several in a cycle make fractions possible, so neighbouring levels differ little
in cost.
"""
FIRST_WAIT_STEPS = 16
MAX_WAIT_STEPS = 1024
_PAUSE_STEPS = 1
_PAUSE_STEPS_AFTER_OVER = 4
"""Iterations that are not counted after a level that cost too much, because the agent is still busy
writing what that level sent.
"""
_TARGET_SHARE = 0.92
"""Fraction of the allowed share that a new level is planned to use."""
_EARLY_FACTOR = 1.5
"""A window ends early when its iterations have cost this many times what the whole
window may cost.
"""
_LEAST_SETTLED_INTERVAL = 8
"""From this mean interval on, the share measured for the iterations in the cheaper form is taken as
their own cost: there are so many that what is left over from the others hardly counts.
"""
_NEW_WEIGHT = 0.5
_FORGETTING = 0.999
"""Factor per iteration for the shares of the forms that the present level does not use: the forms
are tried again some day, because the reason for their cost may have ended.
"""
_REFUSED_FACTOR = 1e6
"""Share, in units of the allowed share, that is noted for a form which used up the time budget of
an iteration: the form is not tried again for thousands of iterations.
"""


class RecordForm(IntEnum):
    """Form in which the tensors of an iteration are kept; the richest form comes first."""

    FULL = 0
    """Every tensor is kept as the plan says."""
    SAMPLE = 1
    """Only the first elements of each tensor are kept."""
    STATISTICS = 2
    NOTHING = 3
    """Only events are kept; tensors are counted as dropped."""


class StepCost(NamedTuple):
    """Cost of dumping in one iteration of a rank, and the rest of the iteration's time."""

    cost_ns: int
    """Time in calls of rankdump."""
    other_ns: int
    """Rest of the iteration: the time of the step without dumping."""


@dataclass(frozen=True, slots=True)
class FidelityLevel:
    """Fidelity level: the forms in which the iterations of a cycle are kept."""

    form: RecordForm
    kept_per_cycle: int = 1
    """Number of iterations of a cycle, evenly spread, that are kept in `form`."""
    cycle_length: int = 1
    """Number of iterations in a cycle."""
    other_form: RecordForm = RecordForm.NOTHING
    """Form of the other iterations of a cycle; without meaning if the cycle has none."""

    @property
    def mean_interval(self) -> float:
        """Average number of iterations from one that is kept in `form` to the next one."""
        return self.cycle_length / self.kept_per_cycle

    def select_form(self, number: int) -> RecordForm:
        """Return the form of an iteration, which is numbered from 0 since the level began."""
        if self.mean_interval == 1:
            return self.form
        before = max(number - 1, 0) * self.kept_per_cycle // self.cycle_length
        kept = number * self.kept_per_cycle // self.cycle_length
        return self.form if kept > before else self.other_form

    @property
    def base(self) -> RecordForm:
        """The poorest form of the level, which most iterations have."""
        return self.form if self.mean_interval == 1 else self.other_form

    @property
    def is_full(self) -> bool:
        """Whether all iterations are kept as the plan says."""
        return self.form is RecordForm.FULL and self.mean_interval == 1


def make_cycle_level(form: RecordForm, interval: float, other_form: RecordForm) -> FidelityLevel:
    """Return the level that keeps an iteration in a form at this mean interval, which is rounded up
    to a multiple of 1 / `_SHORT_KEPT_PER_CYCLE`, or to an integer.
    """
    kept = _SHORT_KEPT_PER_CYCLE if interval < _SHORT_INTERVAL else 1
    cycle_length = ceil(kept * interval)
    if cycle_length <= kept:
        return FidelityLevel(form, other_form=other_form)
    divisor = gcd(kept, cycle_length)
    return FidelityLevel(form, kept // divisor, cycle_length // divisor, other_form)


class LevelReason(IntEnum):
    """Why a governor changes the level, or keeps it."""

    STAY = 0
    OVER = 1
    """The cost was above the allowed share of the step."""
    ROOM = 2
    """The cost left room for more."""
    TIMEOUT = 3
    """Dumping held up an iteration for a large part of a timeout of communication."""
    LEAST = 4
    """The cost was above the allowed share, but the plan permits no poorer form."""


@dataclass(frozen=True, slots=True)
class GovernorState:
    """Present level of a rank, and the measurements so far."""

    level: FidelityLevel = FidelityLevel(RecordForm.FULL)
    number: int = 0
    """Number of the running iteration since the level began."""
    pauses: int = 1
    """Coming iterations that are not counted: the first iteration of a run, in which torch
    allocates and compiles, and those in which data of the previous level are still being sent.
    """
    steps: int = 0
    """Number of counted iterations in the present window."""
    cost_ns: int = 0
    other_ns: int = 0
    """Sum of the times without dumping over the window; `cost_ns` is the sum of the costs."""
    shares: tuple[float, ...] = (0.0,) * len(RecordForm)
    """Recent cost of an iteration kept in each form, as a share of the step; 0 if the form was not
    used.
    """
    rose: bool = False
    """Whether the present level was tried because there was room."""
    waits: int = 0
    """Iterations until a richer level may be tried."""
    next_wait: int = FIRST_WAIT_STEPS
    """Iterations to wait if the next trial of a richer level costs too much."""

    @property
    def form(self) -> RecordForm:
        """Form of the running iteration."""
        return self.level.select_form(self.number)


class GovernorDecision(NamedTuple):
    """Decision of the governor after an iteration."""

    state: GovernorState
    reason: LevelReason = LevelReason.STAY
    share: float = 0.0
    """Measured cost of the judged level as a share of the step."""


@dataclass(frozen=True, slots=True)
class OverheadGovernor:
    """Limit of the overhead of a rank, and the decisions that follow from it."""

    allowed: float
    """Highest allowed cost, divided by the time of the step without dumping."""
    forms: tuple[RecordForm, ...]
    """Forms that the plan permits, the richest first."""

    def advance(
        self, state: GovernorState, step: StepCost, *, budget_ns: int = 0
    ) -> GovernorDecision:
        """Return the decision for the next iteration, given the cost of the iteration that ended.

        `budget_ns` is the longest time that dumping may hold up one iteration without endangering a
        timeout of communication; 0 means no limit.
        """
        used = state.form
        if 0 < budget_ns <= step.cost_ns:
            share = step.cost_ns / max(step.other_ns, 1)
            refused = max(share, _REFUSED_FACTOR * self.allowed)
            state = replace(state, shares=_set_share(state.shares, used, refused))
            return self._lower(state, used, LevelReason.TIMEOUT, share)
        if state.pauses:
            left = state.pauses - 1
            return GovernorDecision(replace(state, pauses=left, number=int(not left)))
        state = _count_step(state, used, step)
        window = state.level.cycle_length * ceil(MIN_WINDOW_STEPS / state.level.cycle_length)
        share = state.cost_ns / max(state.other_ns, 1)
        planned = share * state.steps / window
        if state.steps < window and planned <= _EARLY_FACTOR * self.allowed:
            return GovernorDecision(state)
        return self._judge(state, share if state.level.mean_interval == 1 else planned)

    def _judge(self, state: GovernorState, share: float) -> GovernorDecision:
        """Return the decision at the end of a window."""
        level = state.level
        if share > self.allowed:
            if level.mean_interval > 1 and not self._is_base_over(state):
                return self._change_interval(state, share)
            if level.mean_interval == 1 and state.rose:
                # The level was tried because the cycle before, which had few iterations in the
                # cheaper form, left room; so go back to a short cycle.
                base = state.shares[level.other_form]
                interval = min(2.0, self._compute_interval(state, share, base))
                new = make_cycle_level(level.form, interval, level.other_form)
                return _change_level(state, new, LevelReason.OVER, share)
            return self._lower(state, level.base, LevelReason.OVER, share)
        if share < ROOM_SHARE * self.allowed and not state.waits:
            if level.mean_interval > 1:
                return self._change_interval(state, share)
            return self._raise(state, share)
        return GovernorDecision(_restart_window(state), share=share)

    def _is_base_over(self, state: GovernorState) -> bool:
        """Return whether the iterations in the cheaper form cost too much by themselves."""
        is_settled = state.level.mean_interval >= _LEAST_SETTLED_INTERVAL
        return is_settled and state.shares[state.level.base] > self.allowed

    def _compute_interval(self, state: GovernorState, share: float, base: float) -> float:
        """Return the needed mean interval, given the share that the present level took, and the
        share of its iterations in the cheaper form.
        """
        interval = state.level.mean_interval
        target = _TARGET_SHARE * self.allowed
        most, least = 4 * interval, interval / 2
        if base >= target:
            return most if share > self.allowed else interval
        return min(most, max(least, interval * (share - base) / (target - base)))

    def _change_interval(self, state: GovernorState, share: float) -> GovernorDecision:
        """Return the decision to keep the two forms of the level, with another mean interval."""
        level = state.level
        interval = self._compute_interval(state, share, state.shares[level.base])
        is_over = share > self.allowed
        reason = LevelReason.OVER if is_over else LevelReason.ROOM
        if interval > MAX_INTERVAL:
            return _change_level(state, FidelityLevel(level.other_form), reason, share)
        new = make_cycle_level(level.form, interval, level.other_form)
        if new.mean_interval == level.mean_interval or (
            new.mean_interval > level.mean_interval and not is_over
        ):
            return GovernorDecision(_restart_window(state), share=share)
        return _change_level(state, new, reason, share)

    def _lower(
        self, state: GovernorState, form: RecordForm, reason: LevelReason, share: float
    ) -> GovernorDecision:
        """Return the decision to change to the next form that is poorer than `form`, if there is
        one.
        """
        level = state.level
        if level.mean_interval > 1 and form < level.other_form:
            return _change_level(state, FidelityLevel(level.other_form), reason, share)
        poorer = [each for each in self.forms if each > form]
        if not poorer:
            return GovernorDecision(_restart_window(state), LevelReason.LEAST, share)
        return _change_level(state, FidelityLevel(poorer[0]), reason, share)

    def _raise(self, state: GovernorState, share: float) -> GovernorDecision:
        """Return the decision to use the room that the present form leaves for the cheapest richer
        form.
        """
        form = state.level.form
        richer = [each for each in self.forms if each < form]
        room = _TARGET_SHARE * self.allowed - share
        if not richer or room <= 0:
            return GovernorDecision(_restart_window(state), share=share)
        cheapest = min(richer, key=lambda each: (state.shares[each], each))
        interval = max(2.0, (state.shares[cheapest] - share) / room)
        if interval > MAX_INTERVAL:
            return GovernorDecision(_restart_window(state), share=share)
        level = make_cycle_level(cheapest, interval, form)
        return _change_level(state, level, LevelReason.ROOM, share)


def _count_step(state: GovernorState, used: RecordForm, step: StepCost) -> GovernorState:
    share = step.cost_ns / max(step.other_ns, 1)
    before = state.shares[used]
    shares = [
        each if form in (state.level.form, state.level.base) else each * _FORGETTING
        for form, each in enumerate(state.shares)
    ]
    new = before + _NEW_WEIGHT * (share - before) if before else share
    return replace(
        state,
        number=state.number + 1,
        steps=state.steps + 1,
        waits=max(0, state.waits - 1),
        cost_ns=state.cost_ns + step.cost_ns,
        other_ns=state.other_ns + step.other_ns,
        shares=_set_share(tuple(shares), used, new),
    )


def _set_share(shares: tuple[float, ...], form: RecordForm, share: float) -> tuple[float, ...]:
    return (*shares[:form], share, *shares[form + 1 :])


def _restart_window(state: GovernorState) -> GovernorState:
    """Return the state with an empty window, whose cycle begins anew without uncounted
    iterations.
    """
    return replace(state, number=1, steps=0, cost_ns=0, other_ns=0)


def _change_level(
    state: GovernorState, level: FidelityLevel, reason: LevelReason, share: float
) -> GovernorDecision:
    rises = reason is LevelReason.ROOM
    waits, following = state.waits, state.next_wait
    if not rises and state.rose:
        waits, following = following, min(2 * following, MAX_WAIT_STEPS)
    pauses = _PAUSE_STEPS if rises else _PAUSE_STEPS_AFTER_OVER
    state = replace(_restart_window(state), level=level, number=0, pauses=pauses, rose=rises)
    return GovernorDecision(replace(state, waits=waits, next_wait=following), reason, share)

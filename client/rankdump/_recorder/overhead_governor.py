"""Governor of a rank's overhead: from the cost of each iteration it decides in which form the
tensors of the next ones are kept, so that the cost stays within a share of the step. Pure: no
clock, no disk, no network.

A level is the form of every k-th iteration, where k may be a fraction, and a cheaper form of the
iterations between. A rank goes down by measuring the next form alone; room that a form leaves is
used by every k-th iteration of a richer one. A level is judged by a window of whole cycles: it
stays while the measured share is between ROOM_SHARE of the allowed one and all of it. After a level
that was tried because there was room, and cost too much, the next trial waits twice as long.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from math import ceil, gcd
from typing import NamedTuple

MIN_WINDOW_STEPS = 4
"""Fewest iterations that a level is judged by, after one that is not counted."""
ROOM_SHARE = 0.8
"""Part of the allowed share below which there is room for more."""
MAX_EVERY = 1024
_SHORT_EVERY = 8
_SHORT_TURNS = 4
"""Cycles shorter than that have so many turns, so that their costs are not far apart."""
FIRST_WAIT_STEPS = 16
MAX_WAIT_STEPS = 1024
_PAUSE_STEPS = 1
_PAUSE_STEPS_AFTER_OVER = 4
"""After a level that cost too much, the agent still has much to write."""
_TARGET_SHARE = 0.92
"""Part of the allowed share that a new level is meant to take."""
_EARLY_FACTOR = 1.5
"""A window ends early once it has cost so many times what the whole of it may."""
_LEAST_SETTLED_EVERY = 8
"""From here on the iterations between are so many that what the others leave behind is little."""
_NEW_WEIGHT = 0.5
_FORGETTING = 0.999
"""Per iteration, for the shares of forms that the level does not use: they are tried again some
day, because what made them dear may have ended."""
_REFUSED_FACTOR = 1e6
"""Share, over the allowed one, of a form that used up the budget of an iteration: it is not tried
again for thousands of iterations."""


class RecordForm(IntEnum):
    """Form in which the tensors of an iteration are kept, the richest first."""

    FULL = 0
    """As the plan says."""
    SAMPLE = 1
    """The first elements of each tensor."""
    STATISTICS = 2
    NOTHING = 3
    """Events only; tensors are counted as dropped."""


class StepCost(NamedTuple):
    """Time of one iteration on a rank."""

    cost_ns: int
    """Time that calls of rankdump took."""
    other_ns: int
    """The rest, which is what the step would take without them."""


@dataclass(frozen=True, slots=True)
class FidelityLevel:
    """Forms of the iterations of a level."""

    form: RecordForm
    turns: int = 1
    """In so many iterations"""
    cycle: int = 1
    """of each cycle of this length, evenly spread."""
    between: RecordForm = RecordForm.NOTHING
    """Of the iterations between; without meaning where there are none."""

    @property
    def every(self) -> float:
        """Iterations from one turn to the next, on average."""
        return self.cycle / self.turns

    def select_form(self, number: int) -> RecordForm:
        """Return the form of an iteration, numbered from 0 since the level began."""
        if self.every == 1:
            return self.form
        before = max(number - 1, 0) * self.turns // self.cycle
        return self.form if number * self.turns // self.cycle > before else self.between

    @property
    def base(self) -> RecordForm:
        """The poorest form of the level, which most iterations have."""
        return self.form if self.every == 1 else self.between

    @property
    def is_full(self) -> bool:
        """Whether every iteration is kept as the plan says."""
        return self.form is RecordForm.FULL and self.every == 1


def make_cycle_level(form: RecordForm, every: float, between: RecordForm) -> FidelityLevel:
    """Return the level with a form in every so-many-th iteration; a fraction is rounded up."""
    turns = _SHORT_TURNS if every < _SHORT_EVERY else 1
    cycle = ceil(turns * every)
    if cycle <= turns:
        return FidelityLevel(form, between=between)
    divisor = gcd(turns, cycle)
    return FidelityLevel(form, turns // divisor, cycle // divisor, between)


class LevelReason(IntEnum):
    """Why a governor goes to a level, or stays."""

    STAY = 0
    OVER = 1
    """The cost was above the allowed share of the step."""
    ROOM = 2
    """The cost left room for more."""
    TIMEOUT = 3
    """An iteration was held up for a large part of a timeout of communication."""
    LEAST = 4
    """The cost was above the allowed share, and there is no poorer form."""


@dataclass(frozen=True, slots=True)
class GovernorState:
    """Present level of a rank, and what was measured."""

    level: FidelityLevel = FidelityLevel(RecordForm.FULL)
    number: int = 0
    """Number of the running iteration since the level began."""
    pauses: int = 1
    """Iterations that are not counted yet: the first of a run, in which torch allocates and
    compiles, and those in which what the level before left behind is still being sent."""
    steps: int = 0
    """Iterations of the window so far."""
    cost_ns: int = 0
    other_ns: int = 0
    """Sums over the window."""
    shares: tuple[float, ...] = (0.0,) * len(RecordForm)
    """Recent cost of an iteration of each form, as a share of the step; 0 for one without any."""
    rose: bool = False
    """The level was tried because there was room."""
    waits: int = 0
    """Iterations until a richer level may be tried."""
    next_wait: int = FIRST_WAIT_STEPS
    """Iterations to wait after the next trial that costs too much."""

    @property
    def form(self) -> RecordForm:
        """Form of the running iteration."""
        return self.level.select_form(self.number)


class GovernorDecision(NamedTuple):
    """What follows from an iteration."""

    state: GovernorState
    reason: LevelReason = LevelReason.STAY
    share: float = 0.0
    """Measured cost as a share of the step, of the level that ends."""


@dataclass(frozen=True, slots=True)
class OverheadGovernor:
    """Limits of a rank, and the decisions that follow from them."""

    allowed: float
    """Cost over the time of the step without it."""
    forms: tuple[RecordForm, ...]
    """Forms that the plan permits, the richest first."""

    def advance(
        self, state: GovernorState, step: StepCost, *, budget_ns: int = 0
    ) -> GovernorDecision:
        """Return the state for the next iteration, given the cost of the one that ended.

        `budget_ns` is the longest that one iteration may be held up, by timeouts of communication;
        0 for no limit.
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
        window = state.level.cycle * ceil(MIN_WINDOW_STEPS / state.level.cycle)
        share = state.cost_ns / max(state.other_ns, 1)
        planned = share * state.steps / window
        if state.steps < window and planned <= _EARLY_FACTOR * self.allowed:
            return GovernorDecision(state)
        return self._judge(state, share if state.level.every == 1 else planned)

    def _judge(self, state: GovernorState, share: float) -> GovernorDecision:
        """Return the decision at the end of a window."""
        level, base = state.level, state.shares[state.level.base]
        if share > self.allowed:
            if level.every > 1 and not self._is_base_over(state):
                return self._turn(state, self._compute_every(state, share, base), share)
            if level.every == 1 and state.rose:
                # It was tried because a cycle with few iterations between left room.
                every = min(2.0, self._compute_every(state, share, state.shares[level.between]))
                cycle = make_cycle_level(level.form, every, level.between)
                return _change_level(state, cycle, LevelReason.OVER, share)
            return self._lower(state, level.base, LevelReason.OVER, share)
        if share < ROOM_SHARE * self.allowed and not state.waits:
            if level.every > 1:
                return self._turn(state, self._compute_every(state, share, base), share)
            return self._raise(state, share)
        return GovernorDecision(_restart_window(state), share=share)

    def _is_base_over(self, state: GovernorState) -> bool:
        """Return whether the iterations between cost too much by themselves."""
        is_settled = state.level.every >= _LEAST_SETTLED_EVERY
        return is_settled and state.shares[state.level.base] > self.allowed

    def _compute_every(self, state: GovernorState, share: float, base: float) -> float:
        """Return the cycle that is needed, given the shares that the present one and the
        iterations between took.
        """
        every = state.level.every
        target = _TARGET_SHARE * self.allowed
        most, least = 4 * every, every / 2
        if base >= target:
            return most if share > self.allowed else every
        return min(most, max(least, every * (share - base) / (target - base)))

    def _turn(self, state: GovernorState, every: float, share: float) -> GovernorDecision:
        """Return the decision to keep the forms of a level, with another cycle."""
        level = state.level
        is_over = share > self.allowed
        reason = LevelReason.OVER if is_over else LevelReason.ROOM
        if every > MAX_EVERY:
            return _change_level(state, FidelityLevel(level.between), reason, share)
        new = make_cycle_level(level.form, every, level.between)
        if new.every == level.every or (new.every > level.every and not is_over):
            return GovernorDecision(_restart_window(state), share=share)
        return _change_level(state, new, reason, share)

    def _lower(
        self, state: GovernorState, form: RecordForm, reason: LevelReason, share: float
    ) -> GovernorDecision:
        """Return the decision for the next poorer form than one, if there is any."""
        level = state.level
        if level.every > 1 and form < level.between:
            return _change_level(state, FidelityLevel(level.between), reason, share)
        poorer = [each for each in self.forms if each > form]
        if not poorer:
            return GovernorDecision(_restart_window(state), LevelReason.LEAST, share)
        return _change_level(state, FidelityLevel(poorer[0]), reason, share)

    def _raise(self, state: GovernorState, share: float) -> GovernorDecision:
        """Return the decision to use the room that one form leaves by the cheapest richer one."""
        form = state.level.form
        richer = [each for each in self.forms if each < form]
        room = _TARGET_SHARE * self.allowed - share
        if not richer or room <= 0:
            return GovernorDecision(_restart_window(state), share=share)
        cheapest = min(richer, key=lambda each: (state.shares[each], each))
        every = max(2.0, (state.shares[cheapest] - share) / room)
        if every > MAX_EVERY:
            return GovernorDecision(_restart_window(state), share=share)
        level = make_cycle_level(cheapest, every, form)
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
    """Return the state with an empty window; its cycle begins anew, without a pause."""
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

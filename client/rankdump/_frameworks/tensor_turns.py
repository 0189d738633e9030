"""Turns of the black box: which hooks compute a fingerprint of their next tensor, and which keep it
in full. Turns go round over the whole model, and each step has as many as their time allows.

Tensors that watch rules name are kept first, with at most half of the time; then fingerprints are
computed; other tensors are kept with the rest of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Protocol

from rankdump._core.recorder_protocol import PulseRecorder, TurnSpending

_MAX_HOOKS = 256
"""Maximum number of hooks that are considered in a step."""
_LEAST = TurnSpending(0, 1), TurnSpending(copies=1)
"""Smallest spending on a fingerprint, and on a copy."""


class TurnHook(Protocol):
    """A hook that measures a tensor for the black box."""

    byte_count: int
    """Bytes of the tensor that was measured last; 0 before the first one, and if it has no readable
    elements.
    """
    is_due: bool
    """Whether the fingerprint of the hook's next tensor is computed."""
    is_kept: bool
    """Whether the hook's next tensor is kept in full."""
    is_named: bool
    """Whether a watch rule names the hook's tensor."""


class TensorTurns:
    """Turns of those hooks of one model that have measured a tensor."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Identities of the hooks that take turns."""
        self._fingerprinted, self._named, self._others = (_HookCycle() for _ in range(3))

    def add_measured(self, hooks: Iterable[TurnHook]) -> None:
        """Let the hooks that have measured a tensor by now take turns."""
        for hook in hooks:
            if hook.byte_count and id(hook) not in self._known:
                self._known.add(id(hook))
                self._fingerprinted.add(hook)
                (self._named if hook.is_named else self._others).add(hook)

    def choose_due(self, pulses: PulseRecorder) -> list[TurnHook]:
        """Return the hooks whose turn is in the step that begins. A turn in which the hook measures
        nothing is lost; a hook whose tensor is too large for any step has no turns.
        """
        if not any(map(pulses.can_afford, _LEAST)):
            return []
        spending, keeps = _PlannedSpending(pulses), pulses.keeps_tensors
        named = self._named.take(spending.add_named) if keeps else []
        due = self._fingerprinted.take(spending.add_fingerprint)
        others = self._others.take(spending.add_other) if keeps else []
        for hook in due:
            hook.is_due = True
        for hook in (*named, *others):
            hook.is_kept = True
        return list(dict.fromkeys((*named, *due, *others)))


def clear_turns(hooks: Iterable[TurnHook]) -> None:
    """End the turns of hooks whose step is over."""
    for hook in hooks:
        hook.is_due = hook.is_kept = False


class _TurnOutcome(Enum):
    """Outcome of an attempt to give a hook a turn in a step."""

    ADDED = auto()
    STEP_FULL = auto()
    """The turn does not fit into what is left of the step, so the hook keeps its place."""
    TOO_LARGE = auto()
    """The tensor is too large for any step, so the hook is passed over."""


class _PlannedSpending:
    """Time and memory that the turns of a step are planned to take; each method attempts to add the
    turn of a hook.
    """

    def __init__(self, pulses: PulseRecorder) -> None:
        self._pulses = pulses
        self._planned = TurnSpending()

    def add_fingerprint(self, hook: TurnHook) -> _TurnOutcome:
        return self._add(TurnSpending(hook.byte_count, 1))

    def add_named(self, hook: TurnHook) -> _TurnOutcome:
        # The factor 2 limits these tensors to half of what can be afforded.
        return self._add(TurnSpending(copied_bytes=hook.byte_count, copies=1), factor=2)

    def add_other(self, hook: TurnHook) -> _TurnOutcome:
        return self._add(TurnSpending(copied_bytes=hook.byte_count, copies=1))

    def _add(self, spending: TurnSpending, factor: int = 1) -> _TurnOutcome:
        """Add a spending if `factor` times everything that is planned then can be afforded."""
        if self._pulses.is_too_much(_multiply(spending, factor)):
            return _TurnOutcome.TOO_LARGE
        planned = TurnSpending(*map(operator.add, self._planned, spending))
        if not self._pulses.can_afford(_multiply(planned, factor)):
            return _TurnOutcome.STEP_FULL
        self._planned = planned
        return _TurnOutcome.ADDED


def _multiply(spending: TurnSpending, factor: int) -> TurnSpending:
    return spending if factor == 1 else TurnSpending(*(factor * each for each in spending))


class _HookCycle:
    """Hooks that take turns in a fixed order, again and again."""

    def __init__(self) -> None:
        self._hooks: list[TurnHook] = []
        self._next = 0

    def add(self, hook: TurnHook) -> None:
        """Add a hook after all others."""
        self._hooks.append(hook)

    def take(self, add: Callable[[TurnHook], _TurnOutcome]) -> list[TurnHook]:
        """Return the next hooks that `add` adds, until the step is full."""
        taken: list[TurnHook] = []
        for _ in range(min(len(self._hooks), _MAX_HOOKS)):
            hook = self._hooks[self._next]
            outcome = add(hook)
            if outcome is _TurnOutcome.STEP_FULL:
                break
            if outcome is _TurnOutcome.ADDED:
                taken.append(hook)
            self._next = (self._next + 1) % len(self._hooks)
        return taken

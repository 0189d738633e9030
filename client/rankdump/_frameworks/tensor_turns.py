"""Turns of the black box: of which hooks the next tensor gets its fingerprint, and of which it is
kept in full, one after the other over the whole model, as many in a step as their time allows.

Tensors that watch rules name are kept first, with half of the time; then come the fingerprints, and
other tensors are kept with what these leave.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Protocol

from rankdump._core.recorder_protocol import PulseRecorder, TurnSpending

_MAX_HOOKS = 256
"""Hooks that are looked at in a step."""
_LEAST = TurnSpending(0, 1), TurnSpending(copies=1)
"""Of a fingerprint, and of a copy."""


class TurnHook(Protocol):
    """A hook that measures tensors."""

    byte_count: int
    """Of the tensor that was measured last; 0 before, and where it has no elements to read."""
    is_due: bool
    """Whether the fingerprint of its next tensor is computed."""
    is_kept: bool
    """Whether its next tensor is kept in full."""
    is_named: bool
    """Whether a watch rule names it."""


class TensorTurns:
    """The turns of the hooks of one model that have measured a tensor."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        """Numbers of the objects of the hooks."""
        self._fingerprinted, self._named, self._others = (_HookCycle() for _ in range(3))

    def add_measured(self, hooks: Iterable[TurnHook]) -> None:
        """Give turns to hooks that have measured a tensor by now."""
        for hook in hooks:
            if hook.byte_count and id(hook) not in self._known:
                self._known.add(id(hook))
                self._fingerprinted.add(hook)
                (self._named if hook.is_named else self._others).add(hook)

    def choose_due(self, pulses: PulseRecorder) -> list[TurnHook]:
        """Return the hooks whose turn it is in the step that begins; a turn that is not taken
        is lost. A tensor too large for any step has none.
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


class _PlannedSpending:
    """What the turns of a step will take. Each method adds a hook and returns True, or False when
    there is no more for it now, or None when it has no turn.
    """

    def __init__(self, pulses: PulseRecorder) -> None:
        self._pulses = pulses
        self._planned = TurnSpending()

    def add_fingerprint(self, hook: TurnHook) -> bool | None:
        return self._add(TurnSpending(hook.byte_count, 1))

    def add_named(self, hook: TurnHook) -> bool | None:
        # Twice, so that they have half.
        return self._add(TurnSpending(copied_bytes=hook.byte_count, copies=1), factor=2)

    def add_other(self, hook: TurnHook) -> bool | None:
        return self._add(TurnSpending(copied_bytes=hook.byte_count, copies=1))

    def _add(self, spending: TurnSpending, factor: int = 1) -> bool | None:
        """Add spending where so many times of it, and of all that is planned, can be afforded."""
        if self._pulses.is_too_much(_multiply(spending, factor)):
            return None
        planned = TurnSpending(*map(operator.add, self._planned, spending))
        if not self._pulses.can_afford(_multiply(planned, factor)):
            return False
        self._planned = planned
        return True


def _multiply(spending: TurnSpending, factor: int) -> TurnSpending:
    return spending if factor == 1 else TurnSpending(*(factor * each for each in spending))


class _HookCycle:
    """Some hooks, one after the other again and again."""

    def __init__(self) -> None:
        self._hooks: list[TurnHook] = []
        self._next = 0

    def add(self, hook: TurnHook) -> None:
        """Add a hook, after the others."""
        self._hooks.append(hook)

    def take(self, add: Callable[[TurnHook], bool | None]) -> list[TurnHook]:
        """Return the next hooks for which `add` returns True, up to one for which it is False."""
        taken: list[TurnHook] = []
        for _ in range(min(len(self._hooks), _MAX_HOOKS)):
            hook = self._hooks[self._next]
            added = add(hook)
            if added is False:
                break
            if added:
                taken.append(hook)
            self._next = (self._next + 1) % len(self._hooks)
        return taken

"""Turns of the black box: of which hooks the next tensor gets its fingerprint, and of which it is
kept in full, one after the other over the whole model, as many in a step as their time allows.

Tensors that watch rules name are kept first, with half of the time; then come the fingerprints, and
other tensors are kept with what these leave.
"""

from __future__ import annotations

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
        size, (fingerprinted, count, *copies) = hook.byte_count, self._planned
        if self._pulses.is_too_much(TurnSpending(size, 1)):
            return None
        return self._plan(TurnSpending(fingerprinted + size, count + 1, *copies))

    def add_named(self, hook: TurnHook) -> bool | None:
        # Twice, so that they have half.
        size, (_, _, copied, count) = hook.byte_count, self._planned
        if self._pulses.is_too_much(TurnSpending(copied_bytes=2 * size, copies=2)):
            return None
        doubled = TurnSpending(0, 0, 2 * (copied + size), 2 * (count + 1))
        if not self._pulses.can_afford(doubled):
            return False
        self._planned = TurnSpending(0, 0, copied + size, count + 1)
        return True

    def add_other(self, hook: TurnHook) -> bool | None:
        size, (fingerprinted, fingerprints, copied, count) = hook.byte_count, self._planned
        if self._pulses.is_too_much(TurnSpending(copied_bytes=size, copies=1)):
            return None
        return self._plan(TurnSpending(fingerprinted, fingerprints, copied + size, count + 1))

    def _plan(self, planned: TurnSpending) -> bool:
        if not self._pulses.can_afford(planned):
            return False
        self._planned = planned
        return True


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

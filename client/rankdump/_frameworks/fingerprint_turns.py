"""Turns of the black box: of which hooks the next tensor gets its fingerprint, one after the other
over the whole model, as many in a step as their time allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rankdump._core.recorder_protocol import PulseRecorder

_MAX_HOOKS = 256
"""Hooks that are looked at in a step."""


class TurnHook(Protocol):
    """A hook that measures tensors."""

    byte_count: int
    """Of the tensor that was measured last; 0 before, and where it has no elements to read."""
    is_due: bool
    """Whether the fingerprint of its next tensor is computed."""


class FingerprintTurns:
    """The turns of the hooks of one model."""

    def __init__(self, hooks: Sequence[TurnHook]) -> None:
        self._hooks = hooks
        self._next = 0

    def choose_due(self, pulses: PulseRecorder) -> list[TurnHook]:
        """Return the hooks whose turn it is in the step that begins; a turn that is not taken
        is lost. A tensor too large for any step has none.
        """
        due: list[TurnHook] = []
        size = 0
        for _ in range(min(len(self._hooks), _MAX_HOOKS)):
            hook = self._hooks[self._next]
            if hook.byte_count and not pulses.is_too_large(hook.byte_count):
                size += hook.byte_count
                if not pulses.can_fingerprint(size, len(due) + 1):
                    break
                hook.is_due = True
                due.append(hook)
            self._next = (self._next + 1) % len(self._hooks)
        return due

"""Keeps what optimizers do in their steps from being heard: it is no call of the script's.

Of a step that is given a closure the closure's calls are the script's: there it is told from the
frames whose call it is.
"""

# torch's stubs leave an optimizer's hooks untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from rankdump.adapters.torch.guard import uncompiled
from rankdump.adapters.torch.internals import traced


class Pausing(Protocol):
    """What can be deaf for a while, in one thread."""

    def pause(self) -> None:
        """Hear nothing in this thread until it goes on."""
        ...

    def resume(self) -> None:
        """Go on listening where it was paused."""
        ...


class OptimizerSteps:
    """The steps of all optimizers of the process, from now until `remove`."""

    def __init__(self, calls: Pausing) -> None:
        self._calls = calls
        self._handles = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def remove(self) -> None:
        """Leave optimizers as they were."""
        for handle in self._handles:
            handle.remove()

    @uncompiled
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # The optimizer itself is the first argument, a closure the next one.
        if not traced() and len(args) < 2 and not kwargs:
            self._calls.pause()

    @uncompiled
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not traced():
            self._calls.resume()

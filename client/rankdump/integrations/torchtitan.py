"""Attachment to the Trainer of torchtitan, and to trainers of the same form.

    trainer = config.build()
    rankdump.integrations.torchtitan.attach(trainer)
    trainer.train()

An iteration is one call of `trainer.train_step` and has the number `trainer.step - 1`, because
torchtitan counts from 1. With gradient accumulation each call of `trainer.forward_backward_step` is
a micro-batch.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump.integrations._loop_session import (
    LoopSession,
    check_models,
    check_owner,
    notify_around,
    shield,
)

__all__ = ["attach"]

_MEMBERS = (
    *("train_step", "forward_backward_step", "close"),
    *("step", "model_parts", "gradient_accumulation_steps"),
)


class TitanLoop:
    """Steps and micro-batches of one trainer, determined from the methods that it calls."""

    def __init__(self, trainer: Any, loop: LoopSession) -> None:
        self._trainer = trainer
        self._loop = loop
        self._accumulates = False
        self._microbatch = -1

    @shield
    def watch(self) -> None:
        """Determine steps from calls of the trainer's methods, from now on."""
        notify_around(self._trainer, "train_step", before=self.begin_step)
        notify_around(self._trainer, "forward_backward_step", before=self.begin_microbatch)
        notify_around(self._trainer, "close", before=self.end)

    @shield
    def begin_step(self) -> None:
        """Begin a step; the trainer has counted it already."""
        trainer = self._trainer
        self._accumulates = trainer.gradient_accumulation_steps > 1
        self._microbatch = -1
        self._loop.begin_step(trainer.step - 1, trainer.model_parts, accumulates=self._accumulates)

    @shield
    def begin_microbatch(self) -> None:
        """Begin a forward and backward pass."""
        self._microbatch += 1
        if self._accumulates and self._microbatch:  # the first one begins the step
            self._loop.begin_microbatch(self._microbatch)

    @shield
    def end(self) -> None:
        """End the last step, and deliver what was dumped."""
        self._loop.close()


def attach(trainer: Any, *, session: Session | None = None) -> Session:
    """Observe the model parts of a trainer, and begin an iteration at each of its steps.

    The session is by default that of the environment, which `trainer.close` closes; a session that
    is given stays open. TypeError if the object is not such a trainer.
    """
    caller = f"{__name__}.attach"
    check_owner(caller, trainer, _MEMBERS, "a torchtitan.trainer.Trainer")
    check_models(caller, trainer.model_parts)
    loop = LoopSession(__name__, session)
    loop.open(trainer.model_parts)
    if loop.session.active:
        TitanLoop(trainer, loop).watch()
    return loop.session

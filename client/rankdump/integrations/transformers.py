"""Callback for the Trainer of Hugging Face transformers, and for trainers derived from it.

    Trainer(model, args, callbacks=[rankdump.integrations.transformers.TrainerDumpCallback()])

The model is observed from the first step of training on. An iteration is one step of the optimizer
and has the number `state.global_step`; its micro-batches are numbered if `gradient_accumulation_
steps` is above 1. An evaluation belongs to the step before it, and one before the first step is not
observed.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump.integrations._lazy_modules import make_missing_error
from rankdump.integrations._loop_session import LoopSession, shield

# The framework is not installed where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise make_missing_error(__name__, error, install="transformers") from error

__all__ = ["TrainerDumpCallback"]


class TrainerDumpCallback(TrainerCallback):
    """Dumps the steps of a Trainer with a session, by default that of the environment."""

    def __init__(self, session: Session | None = None) -> None:
        """`session` is the script's own; it is not closed at the end of training."""
        super().__init__()
        self._loop = LoopSession(__name__, session)
        self._microbatch = 0

    @shield
    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin a step of the optimizer."""
        self._microbatch = 0
        accumulates = args.gradient_accumulation_steps > 1
        self._loop.begin_step(state.global_step, (model,), accumulates=accumulates)

    @shield
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the next micro-batch of the step."""
        self._microbatch += 1
        self._loop.begin_microbatch(self._microbatch)

    @shield
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the last step, and deliver what was dumped."""
        self._loop.close()

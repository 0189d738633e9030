"""Callback for the Trainer of Lightning, from the package lightning or pytorch_lightning.

    Trainer(..., callbacks=[rankdump.integrations.lightning.LightningDumpCallback()])

The module is observed from the first training batch on. An iteration is one step of the optimizer
and has the number `trainer.global_step`; its micro-batches are numbered if
`accumulate_grad_batches` is above 1, or with manual optimization from the first step on that has
several. A validation belongs to the step before it, and Lightning's sanity check is not observed.
"""

from __future__ import annotations

from typing import Any

from rankdump._session import Session
from rankdump.integrations._lazy_modules import make_missing_error
from rankdump.integrations._loop_session import LoopSession, shield

# The framework is not installed where types are checked.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUntypedBaseClass=false

try:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback
except ImportError as error:
    raise make_missing_error(__name__, error, install="lightning") from error

__all__ = ["LightningDumpCallback"]


class LightningDumpCallback(Callback):
    """Dumps the steps of a Trainer with a session, by default that of the environment."""

    def __init__(self, session: Session | None = None) -> None:
        """`session` is the script's own; it is not closed at the end of training."""
        super().__init__()
        self._loop = LoopSession(__name__, session)
        self._step = -1
        self._microbatch = 0
        self._accumulates = False

    @shield
    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Begin a step of the optimizer, or its next micro-batch."""
        # The last step of an epoch may have fewer batches than other steps.
        if trainer.global_step == self._step:
            self._accumulates = True
            self._microbatch += 1
            self._loop.begin_microbatch(self._microbatch)
            return
        self._step, self._microbatch = trainer.global_step, 0
        accumulates = self._accumulates or trainer.accumulate_grad_batches > 1
        self._loop.begin_step(self._step, (pl_module,), accumulates=accumulates)

    @shield
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the last step, and deliver what was dumped."""
        self._step, self._accumulates = -1, False
        self._loop.close()

"""Sessions in frameworks that own the training loop: one line in the script, no calls of `step`.

    Trainer(..., callbacks=[rankdump.integrations.transformers.TrainerDumpCallback()])
    Trainer(..., callbacks=[rankdump.integrations.lightning.LightningDumpCallback()])
    rankdump.integrations.fabric.attach(fabric, model)
    rankdump.integrations.accelerate.attach(accelerator, model)
    rankdump.integrations.deepspeed.attach(engine)
    rankdump.integrations.torchtitan.attach(trainer)

An iteration is a step of the optimizer, counted from 0; the micro-batches of a step are numbered
from 0. Each framework is imported only by the module with its name. Without a configuration nothing
is dumped, and one line in the log says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rankdump.integrations._lazy_modules import make_module_loader

__all__ = ["accelerate", "deepspeed", "fabric", "lightning", "torchtitan", "transformers"]

if TYPE_CHECKING:
    from rankdump.integrations import accelerate as accelerate
    from rankdump.integrations import deepspeed as deepspeed
    from rankdump.integrations import fabric as fabric
    from rankdump.integrations import lightning as lightning
    from rankdump.integrations import torchtitan as torchtitan
    from rankdump.integrations import transformers as transformers

__getattr__ = make_module_loader(__name__, __all__)

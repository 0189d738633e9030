"""Small module in Lightning's Trainer: accumulation over two batches, validations, odd batches.

An epoch has five batches, so its last step has one batch.
"""

# The frameworks are not installed where types are checked.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false, reportAttributeAccessIssue=false
# pyright: reportArgumentType=false

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from step_journal import StepJournal, cut_batches, find_rank, make_net
from torch import Tensor, nn

import rankdump

PACKAGE = sys.argv[2]
pl = importlib.import_module(PACKAGE)


class DigitModule(pl.LightningModule):
    """Classifier; `training_step` calls the network, as most modules do."""

    def __init__(self, journal: StepJournal) -> None:
        super().__init__()
        self.net = make_net()
        self._journal = journal

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self._journal.add_loss(loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._journal.add_loss(nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class JournalCallback(pl.Callback):
    """Writes the journal from the Trainer's own events."""

    def __init__(self, journal: StepJournal) -> None:
        self._journal = journal
        self._steps = 0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._journal.add_gradients(pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *about: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self._journal.add_parameters(pl_module)


def main() -> None:
    journal = StepJournal()
    torch.manual_seed(0)
    module = DigitModule(journal)
    dump = rankdump.integrations.lightning.LightningDumpCallback()
    trainer = pl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        val_check_interval=3,
        use_distributed_sampler=False,
        accelerator="cpu",
        devices=int(sys.argv[3]),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[JournalCallback(journal), dump],
    )
    batches = cut_batches((5, 2), rank=find_rank())
    trainer.fit(module, *(torch.utils.data.DataLoader(each, batch_size=None) for each in batches))
    journal.close(steps=trainer.global_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

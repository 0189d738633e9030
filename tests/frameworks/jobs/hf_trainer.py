"""Two-layer GPT-2 in the Trainer of transformers: accumulation over two batches, evaluations."""

from __future__ import annotations

import sys
from typing import Any

import torch
from step_journal import StepJournal
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import rankdump
import rankdump.integrations.transformers

STEPS, VOCABULARY, LENGTH = 4, 64, 8


class JournalCallback(TrainerCallback):
    """Writes the journal from the Trainer's own events."""

    def __init__(self, journal: StepJournal) -> None:
        self._journal = journal

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self._journal.add_gradients(about["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        self._journal.add_parameters(about["model"])

    def on_log(self, args: Any, state: Any, control: Any, **about: Any) -> None:
        logs = about["logs"]
        for name in ("loss", "eval_loss"):
            if name in logs:
                self._journal.add_loss(torch.tensor(logs[name]))


def make_dataset(count: int) -> list[dict[str, torch.Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, LENGTH))
    return [{"input_ids": row, "labels": row} for row in tokens]


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    model, journal = GPT2LMHeadModel(config), StepJournal()
    arguments = TrainingArguments(
        output_dir=f"{sys.argv[1]}/trained",
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        eval_strategy="steps",
        eval_steps=2,
        eval_on_start=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    dump = rankdump.integrations.transformers.TrainerDumpCallback()
    trainer = Trainer(
        model,
        arguments,
        train_dataset=make_dataset(32),
        eval_dataset=make_dataset(4),
        callbacks=[dump, JournalCallback(journal)],
    )
    trainer.train()
    journal.close(steps=trainer.state.global_step)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()

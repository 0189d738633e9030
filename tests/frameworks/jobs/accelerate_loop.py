"""Loop with accelerate: `accumulate` over two batches, or plain steps; an evaluation in between.

Each rank has five batches, so the last step has one batch where two are accumulated.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from step_journal import StepJournal, cut_batches, make_net
from torch import Tensor, nn

import rankdump

ACCUMULATED = sys.argv[2] == "accumulate"


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[tuple[Tensor, Tensor]],
    evaluation: tuple[Tensor, Tensor],
    journal: StepJournal,
) -> None:
    for number, (x, target) in enumerate(batches):
        with accelerator.accumulate(model) if ACCUMULATED else nullcontext():
            loss = nn.functional.cross_entropy(model(x), target)
            accelerator.backward(loss)
            journal.add_loss(loss)
            inner = accelerator.unwrap_model(model)
            if accelerator.sync_gradients:
                journal.add_gradients(inner)
            optimizer.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                journal.add_parameters(inner)
        if number == 1:
            model.eval()
            with torch.no_grad():
                journal.add_loss(nn.functional.cross_entropy(model(evaluation[0]), evaluation[1]))
            model.train()


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2 if ACCUMULATED else 1)
    torch.manual_seed(0)
    net = make_net()
    torch.manual_seed(accelerator.process_index)
    training, evaluation = cut_batches((5 * accelerator.num_processes, 1))
    loader = torch.utils.data.DataLoader(
        [sample for x, y in training for sample in zip(x, y, strict=True)], batch_size=4
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    rankdump.integrations.accelerate.attach(accelerator, model)
    journal = StepJournal()
    train(accelerator, model, optimizer, loader, evaluation[0], journal)
    journal.close(steps=len(journal.parameters))
    accelerator.end_training()


if __name__ == "__main__":
    main()

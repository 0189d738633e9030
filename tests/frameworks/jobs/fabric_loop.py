"""Loop with Lightning Fabric: accumulation over two batches, an evaluation in between."""

from __future__ import annotations

import torch
from lightning.fabric import Fabric
from step_journal import StepJournal, cut_batches, make_net
from torch import nn

import rankdump

ACCUMULATED = 2


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    net = make_net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    session = rankdump.integrations.fabric.attach(fabric, model)
    journal = StepJournal()
    training, evaluation = cut_batches((6, 1))
    for number, (x, target) in enumerate(training):
        is_last = number % ACCUMULATED == ACCUMULATED - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(x), target) / ACCUMULATED
            fabric.backward(loss)
            journal.add_loss(loss)
        if is_last:
            journal.add_gradients(net)
            optimizer.step()
            optimizer.zero_grad()
            journal.add_parameters(net)
            model.eval()
            with torch.no_grad():
                x, target = evaluation[0]
                journal.add_loss(nn.functional.cross_entropy(model(x), target))
            model.train()
    session.close()
    journal.close(steps=len(journal.parameters))


if __name__ == "__main__":
    main()

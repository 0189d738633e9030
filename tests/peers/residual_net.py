"""Small network: a shortcut, convolution, normalisation, an in-place operator called twice."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS = 5


class Residual(nn.Module):
    """Two convolutions around a shortcut, then a classifier; one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.classify = nn.Linear(4 * 8 * 8, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the score of each class."""
        hidden = self.relu(self.norm(self.first(images)))
        hidden = self.relu(hidden + self.second(hidden))
        return self.classify(hidden.flatten(1))


def main() -> None:
    """Be one rank of the job."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(Residual())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = rankdump.attach(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        session.step(step)
        optimizer.zero_grad()
        scores = model(torch.randn(8, 1, 8, 8, generator=generator) * 2)
        nn.functional.cross_entropy(scores, torch.arange(8)).backward()
        optimizer.step()
    session.close()
    del model, optimizer
    gc.collect()  # gloo's threads, held by the model, must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

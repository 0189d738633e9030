"""Ranks of a data-parallel job that runs until the file `end` is in its folder: `control_job.py
FOLDER`, under a launcher. The file `reached` has the step that runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEP_S = 0.04
"""A change begins a second or more after it was ordered: so many tensors are dumped until then."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def main(folder: Path) -> None:
    """Train, all ranks up to the same step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    session = rankdump.attach(net)
    ended = torch.zeros(1)
    iteration = 0
    while not ended.item():
        session.step(iteration)
        model(torch.ones(3, 4)).sum().backward()
        model.zero_grad()
        time.sleep(STEP_S)
        if dist.get_rank() == 0:
            (folder / "reached").write_text(str(iteration))
        ended.fill_(float((folder / "end").exists()))
        dist.all_reduce(ended)
        iteration += 1
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

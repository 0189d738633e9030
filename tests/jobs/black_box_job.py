"""Ranks of a data-parallel job in which something goes wrong on rank 2 in iteration 37 of 60.

Run under torchrun as `black_box_job.py SCENARIO FOLDER`; each rank writes the bits of its losses to
`losses_RANK.txt` of the folder. Nothing is selected to be dumped.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS = 60
BAD_STEP = 37
BAD_RANK = 2
SLEEP_S = 300.0


class Scale(nn.Module):
    """Multiplies by a number that goes wrong."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.scale = Scale()
        self.last = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.scale(torch.tanh(self.first(x))))


def go_wrong(scenario: str, net: Net) -> None:
    """Do what the scenario says, on the bad rank in the bad step."""
    if scenario == "nan":
        net.scale.factor = float("nan")
    elif scenario == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario == "raise":
        raise RuntimeError("the loader has no more samples")
    elif scenario == "sleep":
        time.sleep(SLEEP_S)


def main() -> None:
    """Train."""
    scenario, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=SLEEP_S))
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    session = rankdump.attach(net)
    with (folder / f"losses_{rank}.txt").open("w") as losses:
        for step in range(STEPS):
            session.step(step)
            if (rank, step) == (BAD_RANK, BAD_STEP):
                go_wrong(scenario, net)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            session.note(loss=loss.item())
            print(struct.pack("<f", loss.item()).hex(), file=losses, flush=True)
            if step == BAD_STEP:
                net.scale.factor = 1.0
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

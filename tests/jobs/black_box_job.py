"""Ranks of a data-parallel job in which something goes wrong in iteration 37 of 60, on the last but
one of its ranks.

Run as `black_box_job.py WORLD FOLDER SCENARIO...`; each rank writes the bits of its losses to
`SCENARIO/losses_RANK.txt` of the folder. Nothing is selected to be dumped, and the scenario `plain`
is `nan` without a configuration.
"""

from __future__ import annotations

import os
import signal
import struct
import time
from pathlib import Path

import torch
from rank_processes import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump._cli.daemon_client import fetch_agent_status

STEPS = 60
BAD_STEP = 37
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


def go_wrong(scenario: str, net: Net, session: rankdump.Session) -> None:
    """Do what the scenario says, on the bad rank in the bad step."""
    if scenario in ("nan", "plain"):
        net.scale.factor = float("nan")
    elif scenario == "grow":
        net.scale.factor = 1e4
    elif scenario == "kill":
        # What the agent has not read is lost with the process.
        wait_until_read(session)
        os.kill(os.getpid(), signal.SIGKILL)
    elif scenario == "raise":
        raise RuntimeError("the loader has no more samples")
    elif scenario == "sleep":
        time.sleep(SLEEP_S)


def wait_until_read(session: rankdump.Session) -> None:
    """Return when the agent has all steps so far, of both ranks."""
    pipeline = session._pipeline
    assert pipeline is not None
    while fetch_agent_status(pipeline._client._address).black_box.steps < 2 * BAD_STEP:
        time.sleep(0.01)


def train(scenario: str, rank: int, world: int, folder: Path) -> None:
    """Train as one rank."""
    torch.manual_seed(0)
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)
    session = rankdump.Session.from_environment({} if scenario == "plain" else os.environ)
    session.attach(net)
    try:
        run_steps(scenario, rank, world, session, net, model, optimizer, folder)
    finally:
        session.close()


def run_steps(
    scenario: str,
    rank: int,
    world: int,
    session: rankdump.Session,
    net: Net,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: Path,
) -> None:
    """Run all steps; write the bits of each loss."""
    with (folder / f"losses_{rank}.txt").open("w") as losses:
        for step in range(STEPS):
            session.step(step)
            if (rank, step) == (world - 2, BAD_STEP):
                go_wrong(scenario, net, session)
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            loss.backward()
            optimizer.step()
            session.note(loss=loss.item())
            print(struct.pack("<f", loss.item()).hex(), file=losses, flush=True)
            net.scale.factor = 1.0


if __name__ == "__main__":
    run_ranks(train)

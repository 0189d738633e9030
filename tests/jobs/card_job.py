"""Ranks of one job that train with DistributedDataParallel, once for each scenario.

card_job.py WORLD FOLDER SCENARIO...: forks WORLD gloo ranks, which run the scenarios one after the
other; the tree is FOLDER/SCENARIO/tree. In all but `base` one cause is changed.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rank_processes import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump._core.plan import DumpPlan, OutputSettings
from rankdump._core.rank_identity import RankIdentity

STEPS = 3


def run_scenario(name: str, rank: int, world: int, own: Path) -> None:
    """Train on this rank's part of the data, with a dump."""
    seed = 4 if name == "seed" else 3
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 2))
    if name == "weight":
        with torch.no_grad():
            inner.get_parameter("2.weight")[0, 0] += 1
    model = DistributedDataParallel(inner)
    if name == "drift" and rank == 1:
        with torch.no_grad():
            inner.get_parameter("0.bias")[0] += 1
    torch.manual_seed(seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 if name == "rate" else 0.1)
    plan = DumpPlan(OutputSettings(str(own / "tree")))
    identity = RankIdentity(rank, world, job_id=name)
    data = torch.Generator().manual_seed(10 + rank)
    with rankdump.Session(plan, identity=identity) as session:
        session.attach(model)
        for iteration in range(STEPS):
            session.step(iteration)
            batch = torch.randn(5, 4, generator=data)
            if name == "batch" and iteration >= 1:
                batch = batch + 1
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()


if __name__ == "__main__":
    run_ranks(run_scenario)

"""Job of a small encoder on two ranks in three versions: plain, disturbed and nan.

torchrun --nproc-per-node 2 two_versions.py FOLDER

Each is dumped twice: its modules, as the plan says, into modules/VERSION of the folder, and the
calls of torch's API into apis/VERSION.
"""

from __future__ import annotations

import gc
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump
from rankdump import migrator

STEPS = 2
BAD_RANK = 1
WIDTH = 16


class Spoiler(nn.Module):
    """Passes its input on; on one rank, in the second step, with a NaN in it."""

    active = False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.active:
            return rows * 1.0
        return torch.where(torch.arange(rows.shape[-1]) == 3, torch.nan, rows)


class Block(nn.Module):
    """Attention and a feed-forward part, with modules inside modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.first = nn.LayerNorm(WIDTH)
        narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), narrow)
        self.inner = (narrow,)
        self.spoiler = Spoiler()
        self.second = nn.LayerNorm(WIDTH)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.attention(rows, rows, rows)
        rows = self.first(rows + mixed)
        return self.second(rows + self.spoiler(self.wide(rows)))


class Encoder(nn.Module):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, WIDTH)
        self.parts = tuple(Block() for _ in range(4))
        self.blocks = nn.Sequential(*self.parts)
        self.classify = nn.Linear(WIDTH, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.classify(self.blocks(self.embed(rows)).mean(dim=1))


def train(case: str, rank: int, folder: str, *, apis: bool) -> None:
    torch.manual_seed(0)
    net = Encoder()
    if case == "disturbed":
        with torch.no_grad():
            net.parts[2].inner[0].weight += 0.001
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    os.environ["RANKDUMP_OUTPUT"] = f"{folder}/modules/{case}"
    session = None if apis else rankdump.attach(model)
    if apis:
        migrator.api_dump_init(model, f"{folder}/apis/{case}", retain_backward=True)
        migrator.api_dump_start()
    data = torch.Generator().manual_seed(100 + rank)
    for step in range(STEPS):
        if session is not None:
            session.step(step)
        net.parts[1].spoiler.active = case == "nan" and rank == BAD_RANK and step == 1
        rows = torch.randn(4, 8, 8, generator=data)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), torch.arange(4)).backward()
        optimizer.step()
    if session is not None:
        session.close()
    else:
        migrator.api_dump_stop()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for apis in (False, True):
        for case in ("plain", "disturbed", "nan"):
            train(case, dist.get_rank(), sys.argv[1], apis=apis)
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

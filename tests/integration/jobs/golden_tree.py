"""Two ranks without a launcher that write the trees of tests/golden: torch modules, arrays, APIs.

torchrun --nproc-per-node 2 golden_tree.py KIND OUTPUT; KIND is `net`, `arrays` or `apis`.
"""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS = 2


class Net(nn.Module):
    """A few modules; their input is large enough to be linked where it is dumped again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 4)
        self.second = nn.Linear(64, 4)
        self.act = nn.ReLU()
        self.out = nn.Linear(4, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.first(rows) + self.second(rows)))


def net() -> None:
    """Train for two steps."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = rankdump.attach(model)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        session.step(step)
        optimizer.zero_grad()
        model(torch.randn(16, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        dist.barrier()
    session.close()


def apis(output: str) -> None:
    """Dump the calls of torch's API in one step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    rankdump.migrator.api_dump_init(model, output_path=output)
    rankdump.migrator.api_dump_start()
    generator = torch.Generator().manual_seed(dist.get_rank())
    model(torch.randn(2, 64, generator=generator)).square().mean().backward()
    rankdump.migrator.api_dump_stop()


def arrays() -> None:
    """Dump arrays of several types, one of them with NaN and infinity, one worth packing."""
    session = rankdump.Session.from_environment()
    rank = int(os.environ["RANK"])
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, rank], np.float32)
    for step in range(STEPS):
        session.step(step)
        name = "Default/cast-Cast/Cast-op0"
        session.dump("Cast", name, "input", 0, odd)
        session.dump("Cast", name, "input", 1, np.arange(6, dtype=np.int64).reshape(2, 3))
        session.dump("Cast", name, "output", 0, odd.astype(np.float16))
        session.dump("Cast", name, "output", 1, np.full((20, 20), step, np.float64))
        session.dump("Fill", "Default/fill/Fill-op0", "output", 0, np.array(True))
    session.close()


def main() -> None:
    kind, output = sys.argv[1:]
    torch.set_num_threads(1)
    if kind == "arrays":
        arrays()
        return
    dist.init_process_group("gloo")
    if kind == "apis":
        apis(output)
    else:
        net()
    gc.collect()  # gloo's threads, held by the model, must not outlive the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Small training jobs whose trees are compared.

compared_job.py FOLDER NAME...: runs jobs one after the other, their ranks as children. A job has
the configuration FOLDER/NAME.json. `sharded` and `spoilt` are of two ranks with FSDP2, and rank 1
of `spoilt` has a NaN in iteration 1; `whole` and `gan` are of one rank.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import fork_ranks
from torch import Tensor, nn

import rankdump


class WideLinear(nn.Linear):
    """A layer whose result has NaN in one column while it is spoilt."""

    spoilt = False

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
        result = super().forward(input)
        return result.index_fill(1, torch.tensor([2]), float("nan")) if self.spoilt else result


class Block(nn.Module):
    """A residual block with a buffer, called with a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = WideLinear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("gain", torch.ones(width))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        wide = torch.relu(self.up(x))
        return x + self.down(wide) * scale * self.gain


class Net(nn.Module):
    """Returns its loss by name, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))

    def forward(
        self, x: Tensor, *, labels: Tensor, num_items_in_batch: Tensor
    ) -> dict[str, Tensor]:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = layer(hidden, scale=torch.full((8,), 0.5))
        loss = (hidden.sum(1) - labels).square().sum() / num_items_in_batch
        return {"loss": loss, "logits": hidden}


class Generator(nn.Sequential):
    """First model of the GAN."""


class Discriminator(nn.Sequential):
    """Second model of the GAN."""


def train(rank: int, world: int, sharded: bool, spoiler: int) -> None:
    """Train on each rank's part of one batch."""
    torch.manual_seed(0)
    model = Net()
    up = model.get_submodule("layers.1.up")
    assert isinstance(up, WideLinear)
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = rankdump.attach(model)
    data = torch.Generator().manual_seed(1)
    for iteration in range(2):
        session.step(iteration)
        x = torch.randn(4, 4, generator=data).chunk(world)[rank]
        labels = torch.randn(4, generator=data).chunk(world)[rank]
        up.spoilt = (rank, iteration) == (spoiler, 1)
        count = torch.tensor(4 // world)
        loss = model(x, labels=labels, num_items_in_batch=count)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session.close()


def train_gan() -> None:
    """Train two models in turns, in one session."""
    torch.manual_seed(0)
    generator = Generator(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    discriminator = Discriminator(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, discriminator)]
    session = rankdump.attach(generator)
    rankdump.attach(discriminator)
    for iteration in range(2):
        session.step(iteration)
        for optimizer in optimizers:
            optimizer.zero_grad()
            discriminator(generator(torch.randn(4, 4))).mean().backward()
            optimizer.step()
    session.close()


def run_rank(name: str, rank: int, world: int, folder: Path) -> None:
    """Run a job as one of its ranks."""
    os.environ["RANKDUMP_CONFIG"] = str(folder / f"{name}.json")
    os.environ["RANKDUMP_JOB_ID"] = name
    if name == "gan":
        train_gan()
    elif world == 1:
        train(0, 1, False, -1)
    else:
        meeting = f"file://{folder}/{name}.meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
        train(rank, world, True, 1 if name == "spoilt" else -1)
        dist.barrier()


def main() -> None:
    """Import torch once for all jobs."""
    folder = Path(sys.argv[1])

    def run_job(name: str) -> int:
        world = 2 if name in ("sharded", "spoilt") else 1
        return fork_ranks(world, lambda rank: run_rank(name, rank, world, folder))

    sys.exit(max(map(run_job, sys.argv[2:])))


if __name__ == "__main__":
    main()

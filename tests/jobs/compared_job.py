"""Small training jobs whose trees are compared: `sharded` (FSDP2), `whole`, `gan`.

Arguments: the number of ranks, the scenario, and the rank that plants a NaN in iteration 1, if any.
"""

from __future__ import annotations

import sys
import tempfile
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


def main() -> None:
    """Run the scenario, several ranks as children of this process."""
    world, name, *rest = sys.argv[1:]
    if name == "gan":
        train_gan()
        return
    spoiler = int(rest[0]) if rest else -1
    if world == "1":
        train(0, 1, name == "sharded", spoiler)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"

        def run_rank(rank: int) -> None:
            dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=int(world))
            train(rank, int(world), name == "sharded", spoiler)
            dist.barrier()

        code = fork_ranks(int(world), run_rank)
    sys.exit(code)


if __name__ == "__main__":
    main()

r"""Train a small transformer on handwritten digits with DistributedDataParallel, on CPU.

    rankdump run --config examples/data_dump.json -- torchrun --nproc-per-node 2 \
        examples/torch_ddp.py

Without `rankdump run` the session below is off, and the script trains as usual.
"""

from __future__ import annotations

import gc
from itertools import cycle, islice

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankdump

STEPS = 121
BATCH = 32


class DigitReader(nn.Module):
    """Reads an 8 x 8 digit as a sequence of 8 rows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(torch.randn(8, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=2 * width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.classify = nn.Linear(width, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the score of each digit."""
        return self.classify(self.encoder(self.embed(rows) + self.place).mean(dim=1))


def batches(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return this rank's share of the data, in a fixed order."""
    images, labels = load_digits(return_X_y=True)
    rows = torch.tensor(images, dtype=torch.float32).reshape(-1, 8, 8) / 16
    own_rows, own_labels = rows[rank::world_size], torch.tensor(labels)[rank::world_size]
    return list(zip(own_rows.split(BATCH), own_labels.split(BATCH), strict=True))


def train(rank: int, world_size: int) -> None:
    """Train for as many steps as the configuration selects from."""
    torch.manual_seed(0)
    model = DistributedDataParallel(DigitReader())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    session = rankdump.attach(model)
    for step, (rows, labels) in enumerate(islice(cycle(batches(rank, world_size)), STEPS)):
        session.step(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(rows), labels)
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    session.close()


def main() -> None:
    """Run one rank of the job."""
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    # The model holds the process group, and gloo's threads must not outlive the interpreter:
    # one that drops its last tensor then aborts the process.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A job with the workers of a data loader; the script takes how they start, and whether they stay.

Prints one line for each epoch: the loss, every bit of it.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import rankdump

EPOCHS, ROWS, BATCH = 2, 8, 2


class SquareTable(Dataset[Tensor]):
    """Rows that follow from their number."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(3.0) * index / ROWS


def main() -> None:
    """Train on batches that two workers make."""
    start, stays = sys.argv[1], sys.argv[2] == "stays"
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    session = rankdump.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(
        SquareTable(),
        batch_size=BATCH,
        num_workers=2,
        multiprocessing_context=start,
        persistent_workers=stays,
    )
    step = 0
    for _ in range(EPOCHS):
        total = 0.0
        for batch in loader:
            session.step(step)
            step += 1
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        print(f"loss {total.hex()}", flush=True)


if __name__ == "__main__":
    main()

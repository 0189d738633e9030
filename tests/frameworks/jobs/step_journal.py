"""Journal of a job: what it computed, by its own hands, in each step of its optimizer.

The lines hold digests of the bytes, so that two runs are equal only bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn


def digest(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes."""
    plain = tensor.detach().contiguous().cpu().view(torch.uint8)
    return hashlib.sha256(plain.numpy().tobytes()).hexdigest()


def find_rank() -> int:
    """Return the rank of this process, which Lightning's own launcher numbers only on its host."""
    return int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)


class StepJournal:
    """Losses, gradients and parameters by step; `close` writes `journal-RANK.json`."""

    def __init__(self) -> None:
        self.losses: list[str] = []
        self.gradients: list[dict[str, str]] = []
        self.parameters: list[dict[str, str]] = []

    def add_loss(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, or what the framework reports."""
        self.losses.append(float(loss.detach()).hex())

    def add_gradients(self, model: nn.Module) -> None:
        """Add the gradients that a step is about to use."""
        found = ((name, each.grad) for name, each in model.named_parameters())
        self.gradients.append({n: digest(g) for n, g in found if g is not None})

    def add_parameters(self, model: nn.Module) -> None:
        """Add the parameters after a step."""
        self.parameters.append({n: digest(p) for n, p in model.named_parameters()})

    def close(self, **facts: object) -> None:
        """Write the journal into the folder that the first argument of the job names."""
        path = Path(sys.argv[1]) / f"journal-{find_rank()}.json"
        path.write_text(json.dumps({**vars(self), **facts}))
        print("done", flush=True)


class TinyNet(nn.Sequential):
    """Two layers and a dropout, whose random numbers must stay those of a plain run."""


def make_net() -> nn.Module:
    """Return the model of the jobs, with weights from torch's seed."""
    return TinyNet(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))


def cut_batches(counts: tuple[int, ...], *, rank: int = 0) -> list[list[tuple[Tensor, Tensor]]]:
    """Return so many batches for each purpose, a rank's own."""
    source = torch.Generator().manual_seed(7 + rank)

    def make_batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(4, 6, generator=source)
        return x, torch.randint(3, (4,), generator=source)

    return [[make_batch() for _ in range(count)] for count in counts]

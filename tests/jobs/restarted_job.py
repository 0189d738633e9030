"""Data parallelism on gloo that crashes in its first attempt, in iteration 2 on rank 1.

torchrun --max-restarts 1 --nproc-per-node 2 restarted_job.py FOLDER
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import rankdump

ITERATIONS = 4
CRASH_ITERATION = 2


def make_batch(attempt: int, rank: int, iteration: int) -> torch.Tensor:
    """Return a batch whose values name the attempt, the rank and the iteration."""
    return torch.full((4, 8), 100.0 * attempt + 10.0 * rank + iteration)


def descend(model: torch.nn.Module) -> None:
    """Reduce all gradients at once, and update the parameters.

    An optimizer, or DistributedDataParallel, would import a third of torch in each rank.
    """
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    summed = torch.cat([each.ravel() for each in gradients])
    dist.all_reduce(summed)
    parts = summed.split([each.numel() for each in gradients])
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), parts, strict=True):
            parameter -= 1e-4 * part.view_as(parameter)
            parameter.grad = None


def main() -> None:
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # A file of its own for each attempt: torchrun's store still has addresses of the one before.
    meeting = f"file://{sys.argv[1]}/meeting{attempt}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    session = rankdump.attach(model)
    for iteration in range(ITERATIONS):
        session.step(iteration)
        loss = model(make_batch(attempt, rank, iteration)).square().mean()
        if (attempt, rank, iteration) == (0, 1, CRASH_ITERATION):
            raise RuntimeError("the job crashes here")
        loss.backward()
        descend(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

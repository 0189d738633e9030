"""A rank of a job that hangs in iteration 2, in the way that the argument names."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import rankdump

HANGING_ITERATION = 2
TIMEOUT = timedelta(seconds=float(os.environ.get("HANGING_JOB_TIMEOUT_S", "300")))


def wait_in_two_groups(rank: int, groups: list[Any]) -> None:
    """Call both groups in another order on each rank."""
    first, second = groups if rank == 0 else groups[::-1]
    dist.all_reduce(torch.ones(8), group=first)
    dist.all_reduce(torch.ones(8), group=second)


def call_different_operations(rank: int, groups: list[Any]) -> None:
    """Receive on both ranks: one waits for a broadcast, the other for a scatter."""
    if rank == 0:
        dist.broadcast(torch.ones(8), src=1, group=groups[0])
    else:
        dist.scatter(torch.ones(8), src=0, group=groups[0])


def sleep_on_one_rank(rank: int, groups: list[Any]) -> None:
    """Let rank 0 wait for rank 1, which calls nothing for long."""
    if rank == 1:
        time.sleep(TIMEOUT.total_seconds())
    dist.all_reduce(torch.ones(8), group=groups[0])


CASES = {"groups": wait_in_two_groups, "mismatch": call_different_operations}
CASES["sleep"] = sleep_on_one_rank


def main(case: str) -> None:
    """Run three iterations of a small model, the last of which hangs."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1], timeout=TIMEOUT) for _ in range(2)]
    model = torch.nn.Linear(4, 4)
    session = rankdump.attach(model)
    for step in range(HANGING_ITERATION + 1):
        session.step(step)
        model(torch.ones(2, 4)).sum().backward()
        for group in groups:
            dist.all_reduce(model.weight.grad, group=group)
        if step == HANGING_ITERATION:
            CASES[case](rank, groups)
    session.close()


if __name__ == "__main__":
    main(sys.argv[1])

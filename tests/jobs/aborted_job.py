"""Two gloo ranks, of which rank 1 ends in a way that runs no code of ours, after a collective.

Run as `python aborted_job.py WAY FOLDER`, which starts both ranks; a rank writes the names of its
calls, counted without rankdump, to FOLDER. Rank 1 ends within iteration 1; rank 0 goes on to the
next collective, where gloo raises.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rank_processes import fork_rank

import rankdump

WORLD = 2
DYING_RANK = 1
ROUNDS = 3
"""Rounds of iteration 1 that both ranks execute."""


def end_process(way: str) -> None:
    """End this process at once."""
    if way == "exit":
        os._exit(3)
    elif way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os.abort()


def run_rank(way: str, folder: Path, rank: int) -> None:
    """Execute two iterations as one of the ranks."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    session = rankdump.attach(model)
    session.step(0)
    model(torch.ones(2, 4))
    dist.barrier()
    session.step(1)
    # What the agent has not got of iteration 0 would be lost too, and be another finding.
    while session._pipeline is not None and session._pipeline._send_buffer.items.outstanding:
        time.sleep(0.01)
    done = (folder / f"calls_{rank}.txt").open("w")
    total = torch.zeros(())
    for number in range(ROUNDS):
        total = model(torch.ones(2, 4)).sum()
        dist.all_reduce(total)
        print(f"round {number}", file=done, flush=True)
    if rank == DYING_RANK:
        end_process(way)
    try:
        dist.all_reduce(total)
    except RuntimeError as error:
        print(f"raised {type(error).__name__}", file=done, flush=True)
    session.close()
    # Without destroying the group, which may wait for the member that is gone.
    os._exit(0)


def main() -> None:
    """Start both ranks and wait for them; end well if rank 1 ended as it was told."""
    way, folder = sys.argv[1], Path(sys.argv[2])
    ranks = [
        fork_rank(WORLD, number, lambda rank: run_rank(way, folder, rank))
        for number in range(WORLD)
    ]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in ranks]
    expected = {"exit": 3, "kill": -signal.SIGKILL, "abort": -signal.SIGABRT}[way]
    sys.exit(0 if codes == [0, expected] else f"the ranks ended with {codes}")


if __name__ == "__main__":
    main()

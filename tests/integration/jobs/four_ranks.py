"""Job of four ranks in two groups with one fault: sleepy, slow_dump, stuck_dump or skips.

rank_launcher.py 4 four_ranks.py CASE TIMEOUT_S FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import rankdump
from rankdump._recorder.record_builder import StagingBuffer

STEPS = 4
BAD_STEP = 2
WAIT_S = 1.5
"""How late a rank comes where it comes late on purpose."""
CULPRIT = {"sleepy": 2, "slow_dump": 1, "stuck_dump": 1, "skips": 3}


def slow_down_dumping(seconds: float) -> None:
    """Delay the staging of this rank's next tensor, as a hanging disk does."""
    keep = StagingBuffer.keep
    left = [seconds]

    def slow(self: StagingBuffer, *args: object) -> object:
        if left:
            time.sleep(left.pop())
        return keep(self, *args)  # pyright: ignore[reportArgumentType]

    StagingBuffer.keep = slow  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    case, timeout_s, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    rank = dist.get_rank()
    halves = ([0, 1], [2, 3])
    groups = [dist.new_group(half, timeout=timedelta(seconds=timeout_s)) for half in halves]
    (folder / f"address_{rank}").write_text(os.environ["RANKDUMP_AGENT"])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    session = rankdump.attach(model)
    for step in range(STEPS):
        session.step(step)
        bad = step == BAD_STEP and rank == CULPRIT[case]
        if bad and case == "slow_dump":
            slow_down_dumping(WAIT_S)
        if bad and case == "stuck_dump":
            slow_down_dumping(timeout_s + 30)
        total = model(torch.ones(2, 8)).sum().detach()
        if bad and case == "sleepy":
            time.sleep(WAIT_S)
        if bad and case == "skips":
            time.sleep(timeout_s + 60)
        dist.all_reduce(total, group=groups[rank // 2])
        dist.all_reduce(total)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

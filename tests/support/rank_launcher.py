"""Ranks that run one script: `python rank_launcher.py RANKS SCRIPT ARGUMENTS...`

In place of torchrun where that is not what is tested: torch is imported once, and torchrun and each
of its ranks take longer for that than for a small job. Ranks meet at a store of this process, as
they do under torchrun.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

# A third of torch: optimizers and DistributedDataParallel would import it in each rank.
importlib.import_module("torch._dynamo")

TIMEOUT = timedelta(seconds=300)


def run_rank(rank: int, world: int, address: int) -> None:
    """Run the script in this process, which then ends as an interpreter does."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": os.read(address, 16).decode(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    os.close(address)
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> None:
    """Fork the ranks, then open the store: a thread of it must not be there when they start."""
    world = int(sys.argv[1])
    children: dict[int, int] = {}
    for rank in range(world):
        address, told = os.pipe()
        child = os.fork()
        if not child:
            os.close(told)
            run_rank(rank, world, address)
            return
        os.close(address)
        children[child] = told
    store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT
    )
    for told in children.values():
        os.write(told, str(store.port).encode())
        os.close(told)
    sys.exit(wait_for_ranks(set(children)))


def wait_for_ranks(left: set[int]) -> int:
    """Return the worst status; where a rank fails, the others are ended, as by torchrun.

    SIGTERM ends all of them, too.
    """
    signal.signal(signal.SIGTERM, lambda *_: end_ranks(left))
    worst = 0
    while left:
        child, status = os.wait()
        left.discard(child)
        code = abs(os.waitstatus_to_exitcode(status))
        if code:
            end_ranks(left)
        worst = max(worst, code)
    return worst


def end_ranks(ranks: set[int]) -> None:
    """Send SIGTERM to processes that have not been waited for."""
    for rank in ranks:
        os.kill(rank, signal.SIGTERM)


if __name__ == "__main__":
    main()

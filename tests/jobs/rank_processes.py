"""Ranks of a job that are children of one script."""

from __future__ import annotations

import gc
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(run_scenario: Callable[[str, int, int, Path], None]) -> None:
    """Run `run_scenario(name, rank, world_size, folder)` for each name, in a child for each rank.

    The arguments of the script are world size, folder and names, once or several times; each
    scenario has a folder of its name in that one. The script ends with the worst status of a child.
    """
    jobs: list[list[str]] = []
    for word in sys.argv[1:]:
        if word.isdecimal():
            jobs.append([])
        jobs[-1].append(word)
    codes = [_run_job(run_scenario, int(each[0]), Path(each[1]), each[2:]) for each in jobs]
    sys.exit(max(codes))


def _run_job(
    run_scenario: Callable[[str, int, int, Path], None], world: int, folder: Path, names: list[str]
) -> int:
    return fork_ranks(world, lambda rank: _run_rank(run_scenario, rank, world, folder, names))


def fork_ranks(world: int, run_rank: Callable[[int], None]) -> int:
    """Run `run_rank(rank)` in a child for each rank; return the worst status of a child.

    Torch is imported once; torchrun and its ranks take longer for that than for all else.
    """
    # A third of torch: optimizers and DistributedDataParallel would import it in each rank.
    importlib.import_module("torch._dynamo")
    # Between scenarios garbage is collected, which walks all of torch otherwise.
    gc.freeze()
    codes = [
        os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for child in [fork_rank(world, rank, run_rank) for rank in range(world)]
    ]
    return max(map(abs, codes))


def fork_rank(world: int, rank: int, run_rank: Callable[[int], None]) -> int:
    """Start a rank and return its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        run_rank(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Threads of gloo now and then abort an interpreter that is finishing.
        os._exit(code)


def _run_rank(
    run_scenario: Callable[[str, int, int, Path], None],
    rank: int,
    world: int,
    folder: Path,
    names: list[str],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
    )
    for name in names:
        own = folder / name
        own.mkdir(exist_ok=True)
        run_scenario(name, rank, world, own)
        gc.collect()
    dist.barrier()

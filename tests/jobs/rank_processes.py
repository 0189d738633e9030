"""Ranks of a job that are children of one script."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def run_ranks(run_rank: Callable[[int, int, Path, list[str]], None]) -> None:
    """Run `run_rank(rank, world_size, folder, names)` in a child for each rank, with the arguments
    of the script: world size, folder, names. End the script with the worst status.
    """
    world, folder, names = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
    children: list[int] = []
    for rank in range(world):
        child = os.fork()
        if not child:
            code = 1
            try:
                run_rank(rank, world, folder, names)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                # Threads of gloo now and then abort an interpreter that is finishing.
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))

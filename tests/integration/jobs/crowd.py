"""Job of many ranks, without a framework; on request a rank kills itself once all is staged.

python crowd.py FINISH..., where FINISH is `close` or `kill`, one for each rank. The script prints
the exit codes of its ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator

import numpy as np

import rankdump

ITERATIONS = 3
OPERATORS = 20
_LENGTHS = (1, 3, 1000, 20_000, 600_000)
"""Elements of float32: the last one is more than half of a small slab, and travels in pieces."""


def tensors(rank: int, iteration: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors that a rank dumps in an iteration; no two tensors of a job are equal."""
    for number in range(OPERATORS):
        length = _LENGTHS[number % len(_LENGTHS)]
        first = (rank * ITERATIONS + iteration) * OPERATORS + number
        yield f"Default/fc-Linear/Linear-op{number}", np.arange(first, first + length, dtype="f4")


def run_rank(rank: int, world_size: int, finish: str) -> None:
    """Dump as one of the ranks."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    session = rankdump.Session.from_environment()
    for iteration in range(ITERATIONS):
        session.step(iteration)
        for name, values in tensors(rank, iteration):
            session.dump("Linear", name, "output", 0, values)
    if finish == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    session.close()


def main() -> None:
    """Fork all ranks: an interpreter for each would take longer than what they dump."""
    context = multiprocessing.get_context("fork")
    finishes = sys.argv[1:]
    ranks = [
        context.Process(target=run_rank, args=(rank, len(finishes), finish))
        for rank, finish in enumerate(finishes)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    print(json.dumps([rank.exitcode for rank in ranks]))


if __name__ == "__main__":
    main()

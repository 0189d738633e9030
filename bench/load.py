"""Rank that dumps as fast as the agent accepts, until its standard input ends.

`python -m bench.load` runs one; `loaded` runs some beside a measurement.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import numpy as np

import rankdump

from .arrays import dump, stamp
from .host import Host

LARGE, SMALL = 8, 200
"""Tensors of 1 MiB and of 1 KiB in an iteration."""
_END_TIMEOUT_S = 120.0


@contextmanager
def loaded(host: Host, ranks: int) -> Generator[None, None, None]:
    """Run that many ranks, each a process of its own, for as long as the block takes."""
    # A small buffer, so that they stop soon; they wait for the agent either way.
    environment = os.environ | host.environment("load", {"buffer_bytes": 32 << 20})
    with ExitStack() as stack:
        for rank in range(ranks):
            stack.enter_context(_rank(environment, rank, ranks))
        yield


@contextmanager
def _rank(environment: dict[str, str], rank: int, ranks: int) -> Generator[None, None, None]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}
    command = [sys.executable, "-m", "bench.load"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment | place)
    with process:
        try:
            yield
            if process.poll() is not None:
                raise RuntimeError(f"rank {rank} ended early, with {process.returncode}")
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


def main() -> None:
    """Dump iteration after iteration until standard input ends."""
    over = threading.Event()
    threading.Thread(target=_wait_for_end, args=(over,), daemon=True).start()
    numbers = np.random.default_rng(int(os.environ["RANK"]))
    # Few different values: packing has work to do, and memory holds what is left of them.
    large = numbers.integers(0, 16, (LARGE, 1 << 18)).astype(np.float32)
    small = numbers.integers(0, 16, (SMALL, 1 << 8)).astype(np.float32)
    iteration = 0
    with rankdump.Session.from_environment() as session:
        while session.active and not over.is_set():
            session.step(iteration)
            for kind, tensors in (("Large", large), ("Small", small)):
                stamp(tensors, iteration)
                dump(session, tensors, kind)
            iteration += 1


def _wait_for_end(over: threading.Event) -> None:
    sys.stdin.read()
    over.set()


if __name__ == "__main__":
    main()

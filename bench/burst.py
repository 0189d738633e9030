"""Ranks that dump small tensors at the same time, each a process of its own.

`python -m bench.burst` runs one: it opens its session, dumps on request, and prints when all is
acknowledged.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import rankdump

from .arrays import activations, dump, stamp
from .host import Host
from .timing import seconds

TENSORS = 1_000
"""Tensors in an iteration, each of another operator."""
ELEMENTS = 256
"""1 KiB of float32."""
ITERATIONS = 40
"""Some seconds: the first names and the end of a session take 0.15 s."""


def burst_s(host: Host, name: str, ranks: int) -> float:
    """Return the seconds from the first tensor until those of all ranks are acknowledged."""
    plan = host.environment(name, support_device=list(range(ranks)))
    with ExitStack() as stack:
        started = [stack.enter_context(_rank(plan, rank, ranks)) for rank in range(ranks)]
        for rank in started:
            _hear(rank)

        def run() -> None:
            for rank in started:
                assert rank.stdin is not None
                rank.stdin.close()
            for rank in started:
                _hear(rank)

        return seconds(run)


def _rank(plan: dict[str, str], rank: int, ranks: int) -> subprocess.Popen[bytes]:
    place = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    return subprocess.Popen(
        [sys.executable, "-m", "bench.burst"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | plan | place,
    )


def _hear(rank: subprocess.Popen[bytes]) -> None:
    assert rank.stdout is not None
    if not rank.stdout.readline():
        raise RuntimeError(f"a rank ended early, with {rank.wait()}")


def main() -> None:
    """Run one rank."""
    tensors = activations(TENSORS, ELEMENTS)
    with rankdump.Session.from_environment() as session:
        print(flush=True)
        sys.stdin.read()
        for iteration in range(ITERATIONS):
            session.step(iteration)
            stamp(tensors, iteration)
            dump(session, tensors)
    print(flush=True)


if __name__ == "__main__":
    main()

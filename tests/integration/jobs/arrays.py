"""Job of one rank without a framework that dumps known arrays through a session.

python arrays.py RANK ITERATIONS [EXIT_CODE]
"""

from __future__ import annotations

import os
import sys

import numpy as np

import rankdump


def expected(rank: int, iteration: int, slot: int) -> np.ndarray:
    """Return the array that the tree has for a tensor."""
    return np.full((4, 5), rank * 100 + iteration * 10 + slot, np.float32)


def main() -> None:
    rank, iterations = int(sys.argv[1]), int(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    session = rankdump.Session.from_environment()
    for iteration in range(iterations):
        session.step(iteration)
        for slot in (0, 1):
            values = expected(rank, iteration, slot)
            session.dump("Linear", "Default/fc-Linear/Linear-op0", "input", slot, values)
    session.close()
    print(f"rank {rank} is done", flush=True)
    sys.exit(int(sys.argv[3]) if len(sys.argv) > 3 else 0)


if __name__ == "__main__":
    main()

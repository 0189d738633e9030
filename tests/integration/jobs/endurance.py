"""Job of one rank that dumps many small arrays, and prints the memory of rank and agent.

python endurance.py RECORDS AGENT_PID TREE: prints a line `rank_bytes agent_bytes` after each tenth
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

import rankdump

PER_ITERATION = 1000
TENTHS = 10
_BEHIND = 5
"""Iterations that are left in the tree: the agent may be that far behind."""
_PAGE_BYTES = 4096


def resident_bytes(pid: int | str) -> int:
    """Return the resident memory of a process without its shared memory."""
    _, resident, shared, *_ = map(int, Path(f"/proc/{pid}/statm").read_text().split())
    return (resident - shared) * _PAGE_BYTES


def main() -> None:
    records, agent_pid, tree = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    session = rankdump.Session.from_environment()
    iterations = records // PER_ITERATION
    values = np.zeros(16, np.float32)
    for iteration in range(iterations):
        session.step(iteration)
        for number in range(PER_ITERATION):
            values[0] = number
            session.dump("Linear", f"Default/fc-Linear/Linear-op{number}", "output", 0, values)
        if (iteration + 1) % (iterations // TENTHS) == 0:
            print(resident_bytes("self"), resident_bytes(agent_pid), flush=True)
        # A million files would measure the disk.
        for folder in tree.glob(f"rank_0/*/*/{iteration - _BEHIND}"):
            # The agent may be about to write there still.
            shutil.rmtree(folder, ignore_errors=True)
    session.close()


if __name__ == "__main__":
    main()

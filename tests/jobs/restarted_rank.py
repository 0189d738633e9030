"""One rank without a framework that is killed in its first process, and completes in its second.

python restarted_rank.py VALUE [KILLED_ITERATION]
"""

from __future__ import annotations

import os
import signal
import sys

import numpy as np

import rankdump

ITERATIONS = 3


def main() -> None:
    value, killed = float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1
    session = rankdump.Session.from_environment()
    for iteration in range(ITERATIONS):
        session.step(iteration)
        values = np.full((4, 5), value + iteration, np.float32)
        session.dump("Linear", "Default/fc-Linear/Linear-op0", "output", 0, values)
        if iteration == killed:
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()


if __name__ == "__main__":
    main()

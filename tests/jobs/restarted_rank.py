"""One rank without a framework that is killed in its first process, and completes in its second.

python restarted_rank.py TREE VALUE [KILLED_ITERATION]

It kills itself only when all that it has dumped is in the tree.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import rankdump

ITERATIONS = 3


def main() -> None:
    tree, value = Path(sys.argv[1]), float(sys.argv[2])
    killed = int(sys.argv[3]) if len(sys.argv) > 3 else -1
    session = rankdump.Session.from_environment()
    for iteration in range(ITERATIONS):
        session.step(iteration)
        values = np.full((4, 5), value + iteration, np.float32)
        session.dump("Linear", "Default/fc-Linear/Linear-op0", "output", 0, values)
        if iteration == killed:
            while len(list(tree.glob("rank_0/Net/0/*/Linear.*"))) <= killed:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()


if __name__ == "__main__":
    main()

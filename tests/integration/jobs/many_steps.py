"""Job of one rank without a framework with the tutorial's 121 steps of two arrays each."""

from __future__ import annotations

import numpy as np

import rankdump

STEPS = 121


def main() -> None:
    session = rankdump.Session.from_environment()
    for step in range(STEPS):
        session.step(step)
        values = np.arange(6, dtype=np.float32).reshape(2, 3) + step
        session.dump("ReLU", "Default/relu-ReLU/ReLU-op0", "input", 0, values)
        session.dump("ReLU", "Default/relu-ReLU/ReLU-op0", "output", 0, np.maximum(values, 0))
    session.close()


if __name__ == "__main__":
    main()

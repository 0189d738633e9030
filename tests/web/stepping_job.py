"""One rank of a job without a framework, which steps until a file appears.

python stepping_job.py RANK FILE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np

import rankdump

LAYERS = ("embed-Embedding/Gather", "encoder-Encoder/MatMul", "head-Linear/MatMul")


def main() -> None:
    rank, end = int(sys.argv[1]), Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    numbers = np.random.default_rng(rank)
    with rankdump.Session.from_environment() as session:
        iteration = 0
        while not end.exists():
            session.step(iteration)
            for layer in LAYERS:
                values = numbers.normal(size=(32, 48)).astype(np.float32)
                session.dump(layer.rpartition("/")[2], f"Default/{layer}-op0", "output", 0, values)
            session.note(loss=2.0 / (iteration + 1))
            iteration += 1
            time.sleep(0.1)


if __name__ == "__main__":
    main()

"""Initial weights and inputs of a network, the same for both frameworks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import rankdump

STEPS = 2
RATE = 0.05
SHAPES = {
    "conv.weight": (3, 2, 3, 3),
    "conv.bias": (3,),
    "fc1.weight": (8, 48),
    "fc1.bias": (8,),
    "fc2.weight": (4, 8),
    "fc2.bias": (4,),
}


class Run(NamedTuple):
    """What a program is asked to do."""

    out: Path
    disturbed: str
    """Name of the weight that is a thousandth larger; empty for none."""
    cells: bool
    """Dump modules or cells, as `rankdump run` says, and no calls of an API."""

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The same in every run, but for what is disturbed."""
        random = np.random.default_rng(7)
        found = {
            name: (random.standard_normal(shape) / 4).astype(np.float32)
            for name, shape in SHAPES.items()
        }
        if self.disturbed:
            found[self.disturbed] += np.float32(0.001)
        return found


def asked() -> Run:
    """Return what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--disturbed", default="")
    parser.add_argument("--cells", action="store_true")
    said = parser.parse_args()
    return Run(said.out, said.disturbed, said.cells)


def images(step: int) -> np.ndarray:
    """Return a batch."""
    return np.random.default_rng(step).standard_normal((2, 2, 4, 4)).astype(np.float32)


def begin(run: Run, net: Any) -> Callable[[int], None]:
    """Dump what is asked for; return what is to be called where a step begins."""
    if run.cells:
        return rankdump.attach(net).step
    rankdump.migrator.api_dump_init(net, output_path=str(run.out), retain_backward=True)
    rankdump.migrator.api_dump_start()
    # Where its steps begin a dump of calls finds out by itself.
    return lambda step: None


def end(run: Run) -> None:
    """Dump no more, and say that all is done."""
    if not run.cells:
        rankdump.migrator.api_dump_stop()
    print("done", flush=True)

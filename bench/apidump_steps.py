"""Step times of the encoder without and with `rankdump.migrator`, in a process of its own.

`main` runs there, so that a step without a hook runs in a process that never had one.
"""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import torch

import rankdump
from rankdump import migrator

from .encoder import SHAPES, encoder_trainer
from .peer import asked
from .training import step_times


def run(shape: str, dump_type: str, steps: int, tree: Path, agent: str) -> list[float]:
    """Return the seconds of all steps; `dump_type` is empty for no dump."""
    arguments = (shape, dump_type, str(steps), str(tree))
    variables = {"RANKDUMP_AGENT": agent}
    return asked(sys.executable, "bench.apidump_steps", *arguments, variables=variables)["step_s"]


def main(shape: str, dump_type: str, steps: str, tree: str) -> dict[str, list[float]]:
    """Train, and return the seconds of the steps; remove the dump."""
    torch.set_num_threads(1)
    trainer = encoder_trainer(SHAPES[shape])
    if not dump_type:
        return {"step_s": step_times(lambda _: trainer.step(), int(steps))}
    logging.getLogger("rankdump").setLevel(logging.WARNING)
    migrator.api_dump_init(trainer.model, tree, retain_backward=True)
    migrator.api_dump_start(dump_type=dump_type)
    times = step_times(lambda _: trainer.step(), int(steps))
    # Delivers what still waits: the next case has the machine to itself.
    migrator.api_dump_stop()
    _check(Path(tree), dump_type, int(steps))
    # The coordinator may still be busy with the rest.
    shutil.rmtree(Path(tree) / "rank0")
    return {"step_s": times}


def _check(tree: Path, dump_type: str, steps: int) -> None:
    dump = rankdump.open(tree)
    kept = dump.tensors() if dump_type == "all" else dump.statistics()
    iterations = {each.key.iteration for each in kept}
    if iterations != set(range(steps)):
        raise RuntimeError(f"{tree}: of {steps} steps only {sorted(iterations)} are there")

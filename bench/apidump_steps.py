"""Step times of the encoder without and with `rankdump.migrator`, in a process of its own.

`main` runs there, so that a step without a hook runs in a process that never had one.
"""

from __future__ import annotations

import logging
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import rankdump
from rankdump import migrator

from . import minimal_hooks
from .encoder import SHAPES, encoder_trainer
from .peer import asked
from .timing import seconds
from .training import step_times

MINIMAL_HOOKS = "minimal_hooks"
"""In place of a dump: a mode of torch that only looks at tensors."""


@dataclass(frozen=True, slots=True)
class DumpTimes:
    """What a dump took in the training process."""

    step_s: list[float]
    """Seconds of all steps."""
    init_s: float = 0.0
    """Seconds of `api_dump_init`."""
    start_s: float = 0.0
    """Seconds of `api_dump_start`."""


def run(shape: str, dump_type: str, steps: int, tree: Path, agent: str) -> DumpTimes:
    """Run so many steps; `dump_type` is empty for no dump, `agent` for one that the job starts."""
    arguments = (shape, dump_type, str(steps), str(tree))
    variables = {"RANKDUMP_AGENT": agent}
    return DumpTimes(
        **asked(sys.executable, "bench.apidump_steps", *arguments, variables=variables)
    )


def main(shape: str, dump_type: str, steps: str, tree: str) -> dict[str, object]:
    """Train, and return what `DumpTimes` holds; remove the dump."""
    torch.set_num_threads(1)
    trainer = encoder_trainer(SHAPES[shape])
    if not dump_type:
        return asdict(DumpTimes(step_times(lambda _: trainer.step(), int(steps))))
    if dump_type == MINIMAL_HOOKS:
        bare = minimal_hooks.observe_functions(trainer)
        return asdict(DumpTimes(step_times(lambda _: bare(), int(steps))))
    logging.getLogger("rankdump").setLevel(logging.WARNING)
    init_s = seconds(lambda: migrator.api_dump_init(trainer.model, tree, retain_backward=True))
    start_s = seconds(lambda: migrator.api_dump_start(dump_type=dump_type))
    step_s = step_times(lambda _: trainer.step(), int(steps))
    # Delivers what still waits: the next case has the machine to itself.
    migrator.api_dump_stop()
    _check(Path(tree), dump_type, int(steps))
    # The coordinator may still be busy with the rest.
    shutil.rmtree(Path(tree) / "rank0")
    return asdict(DumpTimes(step_s, init_s, start_s))


def _check(tree: Path, dump_type: str, steps: int) -> None:
    dump = rankdump.open(tree)
    kept = dump.tensors() if dump_type == "all" else dump.statistics()
    iterations = {each.key.iteration for each in kept}
    if iterations != set(range(steps)):
        raise RuntimeError(f"{tree}: of {steps} steps only {sorted(iterations)} are there")

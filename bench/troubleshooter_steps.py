"""Step times of the encoder without and with troubleshooter's `api_dump`.

`main` runs in a Python with troubleshooter and without rankdump; `run` starts such a Python.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from .encoder import SHAPES, encoder_trainer
from .peer import asked
from .training import WARMUP_STEPS, step_times


def run(python: str, shape: str, dump_type: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of measured steps without troubleshooter and with it; remove the dump."""
    arguments = "bench.troubleshooter_steps", shape, dump_type, str(folder)
    # The code that it brings for protobuf is older than protobuf's own parser takes.
    variables = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
    found = asked(python, *arguments, variables=variables)
    shutil.rmtree(folder)
    return found["no_hook_s"], found["troubleshooter_s"]


def main(shape: str, dump_type: str, folder: str) -> dict[str, list[float]]:
    """Train twins, one of them under troubleshooter, and return the seconds of their steps."""
    torch.set_num_threads(1)
    plain = encoder_trainer(SHAPES[shape])
    no_hook_s = step_times(lambda _: plain.step())[WARMUP_STEPS:]
    dumped_s = _observed(shape, dump_type, Path(folder))[WARMUP_STEPS:]
    return {"no_hook_s": no_hook_s, "troubleshooter_s": dumped_s}


def _observed(shape: str, dump_type: str, folder: Path) -> list[float]:
    # Loaded only now: it wraps functions of torch, which the plain twin is to use as they are.
    from troubleshooter import migrator

    trainer = encoder_trainer(SHAPES[shape])
    migrator.api_dump_init(trainer.model, output_path=str(folder), retain_backward=True)
    migrator.api_dump_start(dump_type=dump_type)
    times = step_times(lambda _: trainer.step())
    migrator.api_dump_stop()
    if not list(folder.glob("rank0/torch_api_dump_info.*")):
        raise RuntimeError(f"troubleshooter wrote nothing to {folder}")
    return times

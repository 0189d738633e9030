"""Step times of the encoder without and with msprobe, of its modules or of every call of torch's
API, with statistics or tensors.

`main` runs in a Python with msprobe and without rankdump; `run` starts such a Python.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from .encoder import SHAPES, encoder_trainer
from .peer import asked
from .training import WARMUP_STEPS, step_times

MODULES, APIS = "L0", "L1"
"""Levels, as msprobe names them."""


def run(
    python: str, shape: str, level: str, task: str, folder: Path
) -> tuple[list[float], list[float]]:
    """Return the seconds of measured steps without msprobe and with it; remove the dump.

    `task` is `statistics` or `tensor`.
    """
    found = asked(python, "bench.msprobe_steps", shape, level, task, str(folder))
    shutil.rmtree(folder)
    return found["no_hook_s"], found["msprobe_s"]


def main(shape: str, level: str, task: str, folder: str) -> dict[str, list[float]]:
    """Train two equal models, one of them under msprobe; return the seconds of their steps."""
    torch.set_num_threads(1)
    plain = encoder_trainer(SHAPES[shape])
    no_hook_s = step_times(lambda _: plain.step())[WARMUP_STEPS:]
    msprobe_s = _observed(shape, level, task, Path(folder))[WARMUP_STEPS:]
    return {"no_hook_s": no_hook_s, "msprobe_s": msprobe_s}


def _observed(shape: str, level: str, task: str, folder: Path) -> list[float]:
    # Loaded only now: it wraps functions of torch, which the plain twin is to use as they are.
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    own: dict[str, object] = {"scope": [], "list": [], "data_mode": ["all"]}
    if task == "statistics":
        own["summary_mode"] = "statistics"
    body = {
        "task": task,
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": level,
        # Its default leaves out views, such as reshape and permute, which rankdump records.
        "risk_level": "ALL",
        task: own,
    }
    config.write_text(json.dumps(body))
    debugger = PrecisionDebugger(config_path=str(config))
    trainer = encoder_trainer(SHAPES[shape])

    def step(_: int) -> None:
        debugger.start(model=trainer.model)
        trainer.step()
        debugger.stop()
        debugger.step()

    times = step_times(step)
    if not list((folder / "dump").glob("step*/*/dump.json")):
        raise RuntimeError(f"msprobe wrote nothing to {folder}")
    return times

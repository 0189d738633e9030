"""Step times of the encoder without and with msprobe, module level, statistics.

`main` runs in a Python with msprobe and without rankdump; `run` starts such a Python.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
from pathlib import Path

import torch

from .encoder import SHAPES, encoder_trainer
from .peer import asked
from .training import WARMUP_STEPS, step_times


def run(python: str, shape: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of measured steps without msprobe and with it."""
    found = asked(python, "bench.msprobe_steps", shape, str(folder))
    return found["no_hook_s"], found["msprobe_s"]


def main(shape: str, folder: str) -> dict[str, list[float]]:
    """Train two equal models, one of them under msprobe; return the seconds of their steps."""
    torch.set_num_threads(1)
    plain = encoder_trainer(SHAPES[shape])
    no_hook_s = step_times(lambda _: plain.step())[WARMUP_STEPS:]
    msprobe_s = _observed(shape, Path(folder))[WARMUP_STEPS:]
    return {"no_hook_s": no_hook_s, "msprobe_s": msprobe_s}


def _observed(shape: str, folder: Path) -> list[float]:
    # Loaded only now: it wraps functions of torch, which the plain twin is to use as they are.
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.json"
    body = {
        "task": "statistics",
        "dump_path": str(folder / "dump"),
        "rank": [],
        "step": [],
        "level": "L0",
        "statistics": {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"},
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

"""Step times of the encoder without and with msprobe, module level, statistics.

`python -m bench.msprobe_steps SHAPE FOLDER` runs in a Python that has msprobe and knows nothing
of rankdump; its last line is one JSON object. `run` asks such a Python.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from .encoder import SHAPES, encoder_trainer
from .training import WARMUP_STEPS, step_times

_TIMEOUT_S = 300.0


def run(python: str, shape: str, folder: Path) -> tuple[list[float], list[float]]:
    """Return the seconds of measured steps without msprobe and with it."""
    command = [python, "-m", "bench.msprobe_steps", shape, str(folder)]
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{python}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return found["no_hook_s"], found["msprobe_s"]


def main(shape: str, folder: Path) -> None:
    """Train twins, one of them under msprobe, and print the times."""
    torch.set_num_threads(1)
    plain = encoder_trainer(SHAPES[shape])
    no_hook_s = step_times(lambda _: plain.step())[WARMUP_STEPS:]
    msprobe_s = _observed(shape, folder)[WARMUP_STEPS:]
    print(json.dumps({"no_hook_s": no_hook_s, "msprobe_s": msprobe_s}), flush=True)


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


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

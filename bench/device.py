"""What a dump costs a job whose tensors are on an accelerator. Not part of `all`: it needs CUDA.

A tensor: the time for which `Session.dump` blocks the training thread, against `tensor.cpu()`, as
every tool calls that writes files itself, and against `numpy.save` of it. No buffer is ever full.

A step: forward, backward and update of an encoder until the device has finished, without a session,
with statistics that the host or the device computes, with a black box, and with full tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rankdump

from .encoder import SHAPES, Shape, encoder_trainer
from .host import Host, memory_folder, running_host
from .result import Result, median
from .stall import ROUND_MIB, SIZES_MIB
from .timing import seconds
from .trees import check_complete

WARMUP_ROUNDS = 2
ROUNDS = 5
WARMUP_STEPS = 4
STEPS = 8
REPETITIONS = 3
LARGE = Shape(layers=8, width=1024, heads=16, sequence=256, batch=8, vocabulary=8000)
"""About 2.4 GB of outputs and gradients in a step of 100 million parameters."""

CASES: dict[str, dict[str, Any]] = {
    "statistic": {"saved_data": "statistic"},
    "device_statistic": {"saved_data": "statistic", "stat_calc_mode": "device"},
    "blackbox": {"own": {"blackbox": True}, "iteration": "4000000000"},
    "full": {"saved_data": "tensor"},
}
SMALL_CASES = ("statistic", "device_statistic", "blackbox", "full")
LARGE_CASES = ("device_statistic", "blackbox")
"""The host reads no gigabytes in the time of a step: that would measure its disk."""


def measure() -> Result:
    """Measure tensors of several sizes, then steps of two models."""
    if not torch.cuda.is_available():
        raise SystemExit("bench device: torch sees no CUDA device here")
    torch.manual_seed(0)
    figures: dict[str, float] = {}
    ratios: dict[str, float] = {}
    with running_host() as host:
        _measure_tensors(host, figures, ratios)
        _measure_steps(host, "standard", SHAPES["standard"], SMALL_CASES, figures, ratios)
        _measure_steps(host, "large", LARGE, LARGE_CASES, figures, ratios)
    return Result(figures=figures, ratios=ratios)


def _measure_tensors(host: Host, figures: dict[str, float], ratios: dict[str, float]) -> None:
    session = host.session("tensors", {"buffer_bytes": 2 * ROUND_MIB << 20})
    flat = torch.randn(ROUND_MIB << 18, device="cuda")
    numbers = iter(range(1_000_000))
    with memory_folder() as folder:
        for size in SIZES_MIB:
            tensors = list(flat.reshape(-1, size << 18))
            run = partial(_run_round, host, session, folder, tensors)
            rounds = [run(next(numbers)) for _ in range(WARMUP_ROUNDS + ROUNDS)][WARMUP_ROUNDS:]
            dump_s, copy_s, save_s = map(median, zip(*rounds, strict=True))
            figures[f"blocked_ms_{size}mib"] = dump_s / len(tensors) * 1e3
            ratios[f"blocked_vs_cpu_copy_{size}mib"] = dump_s / copy_s
            ratios[f"blocked_vs_numpy_save_{size}mib"] = dump_s / save_s
    session.close()


def _run_round(
    host: Host, session: rankdump.Session, folder: Path, tensors: list[Any], number: int
) -> tuple[float, float, float]:
    """Return the seconds of dump, of copies to the host, and of files, for all tensors."""
    for at, tensor in enumerate(tensors):
        # Other elements in each round: equal ones are not written again.
        tensor[0] = number * 1000 + at
    session.step(number)
    torch.cuda.synchronize()
    dump_s = seconds(lambda: _dump(session, tensors))
    torch.cuda.synchronize()
    session.step(number + 1)
    host.wait_until_written("tensors", number)
    copy_s = seconds(lambda: [tensor.cpu() for tensor in tensors])
    save_s = seconds(lambda: [np.save(folder / "one", each.cpu().numpy()) for each in tensors])
    return dump_s, copy_s, save_s


def _dump(session: rankdump.Session, tensors: list[Any]) -> None:
    for at, tensor in enumerate(tensors):
        session.dump("Tensor", f"Tensor-op{at}", "output", 0, tensor)


def _measure_steps(
    host: Host,
    name: str,
    shape: Shape,
    cases: tuple[str, ...],
    figures: dict[str, float],
    ratios: dict[str, float],
) -> None:
    times: dict[str, list[float]] = defaultdict(list)
    for repetition in range(REPETITIONS):
        times["none"] += _time_case(host, "", shape, {})
        for case in cases:
            job = f"{name}-{case}-{repetition}"
            times[case] += _time_case(host, job, shape, CASES[case])
    plain_s = median(times["none"])
    for case, found in times.items():
        figures[f"{name}_{case}_step_ms"] = median(found) * 1e3
        if case != "none":
            ratios[f"{name}_{case}_vs_none"] = median(found) / plain_s


def _time_case(host: Host, job: str, shape: Shape, settings: dict[str, Any]) -> list[float]:
    """Return the seconds of steps of a fresh model, without a session if `job` is empty."""
    trainer = encoder_trainer(shape, "cuda")
    if not job:
        return _time_steps(lambda _: trainer.step())
    common = {name: value for name, value in settings.items() if name != "own"}
    session = host.session(job, settings.get("own"), **common)
    session.attach(trainer.model)

    def step(number: int) -> None:
        session.step(number)
        trainer.step()

    times = _time_steps(step)
    session.close()
    host.wait_until_indexed()
    if "iteration" not in common:
        check_complete(host.tree(job))
    host.remove_tensors(job)
    return times


def _time_steps(step: Callable[[int], object]) -> list[float]:
    def run(number: int) -> None:
        step(number)
        torch.cuda.synchronize()

    return [seconds(partial(run, number)) for number in range(WARMUP_STEPS + STEPS)][WARMUP_STEPS:]

"""What the always-on black box costs of a step, on the encoder and on the net of many small calls.

Two equal models train in turns in one process, in blocks of steps: one without a session, one whose
session has a black box and selects no tensor. The first blocks, in which the rank finds how much of
the model it can afford to measure, do not count. The ratio is the median over pairs of blocks. One
of two equal models is often some percent faster, because of where its memory lies: two new ones are
measured with their parts exchanged, and the result is the geometric mean of both ratios.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rankdump._core.plan import BlackBoxSettings

from .encoder import SHAPES, encoder_trainer
from .host import Host, running_host
from .result import Result, median

CASES = {"": ("standard", 8, 8), "many_small_": ("many_small", 16, 20)}
"""Shape, steps of a block, and pairs of blocks, by the prefix of the result."""
SETTLE_BLOCKS = 4
QUICK_PAIRS = 2
_NEVER = "4000000000"
"""Iteration that no run reaches."""


@dataclass(frozen=True, slots=True)
class RingCost:
    """What the black box of one model took."""

    step_s: float
    """Of a step without it."""
    ratio: float
    """Of a step with it to one without."""
    stride: int
    """One of so many parts of the model is measured in each step in the end."""
    ring_bytes: int
    """Memory of the ring in the agent, of one rank."""


def measure(*, quick: bool = False) -> Result:
    """Measure both models."""
    torch.set_num_threads(1)
    with running_host() as host:
        costs = {
            name: _measure_case(host, name, *case, quick=quick) for name, case in CASES.items()
        }
    figures = {"allowed_share": BlackBoxSettings().max_overhead}
    for name, cost in costs.items():
        figures[f"{name}none_step_ms"] = cost.step_s * 1e3
        figures[f"{name}stride"] = cost.stride
        figures[f"{name}ring_mb"] = cost.ring_bytes / 1e6
    return Result(
        figures=figures, ratios={f"{name}step_vs_none": cost.ratio for name, cost in costs.items()}
    )


def _measure_case(
    host: Host, name: str, shape: str, steps: int, pairs: int, *, quick: bool
) -> RingCost:
    found = [
        _measure_models(host, name, shape, steps, QUICK_PAIRS if quick else pairs, watched_at=at)
        for at in range(2)
    ]
    ratio = math.sqrt(math.prod(each.ratio for each in found))
    return replace(found[0], ratio=ratio)


def _measure_models(
    host: Host, name: str, shape: str, steps: int, pairs: int, *, watched_at: int
) -> RingCost:
    """Measure two models, of which the one made first or second has the black box."""
    models = [encoder_trainer(SHAPES[shape]) for _ in "ab"]
    watched, plain = models[watched_at], models[1 - watched_at]
    session = host.session(f"{name}blackbox{watched_at}", {"blackbox": True}, iteration=_NEVER)
    session.attach(watched.model)

    def step_watched() -> None:
        watched.step()
        session.step()

    ratios: list[float] = []
    plain_s: list[float] = []
    for block in range(SETTLE_BLOCKS + pairs):
        without_s = _time_block(plain.step, steps)
        # The session is idle meanwhile: its step began before, and would count as a long one.
        session.step()
        with_s = _time_block(step_watched, steps)
        if block >= SETTLE_BLOCKS:
            ratios.append(with_s / without_s)
            plain_s.append(without_s / steps)
    pipeline = session._pipeline  # pyright: ignore[reportPrivateUsage]
    assert pipeline is not None
    assert pipeline.black_box is not None
    stride = pipeline.black_box.stride
    ring_bytes = host.status().black_box.step_bytes
    session.close()
    return RingCost(median(plain_s), median(ratios), stride, ring_bytes)


def _time_block(step: Callable[[], None], steps: int) -> float:
    begun_s = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - begun_s

"""One training step of any model. Needs torch only: a peer's Python imports it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from .timing import seconds

# As the peers were measured: two steps to warm up, three that count.
WARMUP_STEPS = 2
MEASURED_STEPS = 3
STEPS = WARMUP_STEPS + MEASURED_STEPS
GROWTH_STEPS = 22
EARLY, LATE = slice(1, 4), slice(19, 22)
"""Around step 1 and around step 20; step 0 also describes the graph."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is trained, and what of it is dumped; `dumped` is empty for no hook at all."""

    shape: str
    dumped: str = ""
    steps: int = STEPS
    fingerprints: bool = False
    card: bool = True
    """Whether each step has a run card."""


@dataclass(slots=True)
class Trainer:
    """A model in training; `step` runs one iteration."""

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Forward, backward, update."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def step_times(step: Callable[[int], object], steps: int = STEPS) -> list[float]:
    """Run `step(number)` from 0 on; return the seconds of each."""
    return [seconds(partial(step, number)) for number in range(steps)]

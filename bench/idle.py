"""Step time with the hook attached and nothing selected, against the same model without it.

Two models with equal weights step alternately, so that other load on the machine affects both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rankdump

from .host import running_host
from .result import Result, median
from .timing import seconds
from .training import Trainer

STEP_S = 0.02
"""Least duration of a step."""
PAIRS = 250
WARMUP_PAIRS = 10


def trainer_of(batch_size: int) -> Trainer:
    """Return a trainer; equal sizes give equal models."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    batch = torch.randn(batch_size, 32, 128)

    def loss() -> Tensor:
        return model(batch).square().mean()

    return Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=1e-3))


def measure() -> Result:
    """Measure iterations that are not selected, and operators that are not."""
    torch.set_num_threads(1)
    batch_size = _batch_size()
    with running_host() as host:
        nothing = {"iteration": "1000000000"}
        unarmed = _compare(host.session("unarmed", **nothing), batch_size)
        # Hooks are in place here, and each operator is asked for and turned down.
        no_match = {"dump_mode": 1, "kernels": ["NoSuchOperator"]}
        armed = _compare(host.session("armed", **no_match), batch_size)
    return Result(
        figures={
            "plain_step_ms": unarmed.plain_s * 1e3,
            "attached_step_ms": unarmed.attached_s * 1e3,
            "no_operator_selected_step_ms": armed.attached_s * 1e3,
            "batch_size": batch_size,
        },
        ratios={
            "step_vs_no_hook": unarmed.ratio,
            "no_operator_selected_vs_no_hook": armed.ratio,
        },
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Medians over all pairs."""

    plain_s: float
    attached_s: float
    ratio: float


def _compare(session: rankdump.Session, batch_size: int) -> Comparison:
    plain, observed = trainer_of(batch_size), trainer_of(batch_size)
    session.attach(observed.model)
    iterations = iter(range(10**9))

    def attached_step() -> None:
        session.step(next(iterations))
        observed.step()

    pairs: list[tuple[float, float]] = []
    for index in range(WARMUP_PAIRS + PAIRS):
        # Whoever goes first finds the caches as the other left them: take turns.
        if index % 2:
            plain_s, attached_s = seconds(plain.step), seconds(attached_step)
        else:
            attached_s, plain_s = seconds(attached_step), seconds(plain.step)
        pairs.append((plain_s, attached_s))
    session.close()
    kept = pairs[WARMUP_PAIRS:]
    return Comparison(
        plain_s=median(plain_s for plain_s, _ in kept),
        attached_s=median(attached_s for _, attached_s in kept),
        ratio=median(attached_s / plain_s for plain_s, attached_s in kept),
    )


def _batch_size() -> int:
    """Return the smallest power of two whose step is long enough."""
    size = 4
    while True:
        trainer = trainer_of(size)
        trainer.step()
        if min(seconds(trainer.step) for _ in range(5)) >= STEP_S:
            return size
        size *= 2

"""Overhead of a governed rank against what its plan allows, for several shares of the step.

A few wide layers train on one core with full tensors, which cost several times the allowed share;
calls of hooks, which no governor can save, are a small part. After the governor has settled, steps
with and without a dump alternate in blocks: one process, one model, one session, whose dump is
switched off for the blocks without. The overhead is the median over pairs of blocks of their mean
steps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from rankdump._core.status import IterationStatus

from .host import Host, running_host
from .result import Result, median
from .training import Trainer

SHARES = (0.05, 0.2)
WIDTH = 1024
LAYERS = 2
BATCH = 512
WARMUP_STEPS = 5
SETTLE_STEPS = 80
ROUNDS = 15
DUMPED_STEPS = 16
"""A block with a dump: most cycles of a level fit into it."""
PLAIN_STEPS = 6
QUIET_STEPS = 2
"""Steps before a block without a dump, after which the agent is waited for; they are not timed."""
LEAD_STEPS = 8
"""Steps before a block with a dump, in which the agent gets as busy as it stays."""
QUICK_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class GovernedRun:
    """What one allowed share led to."""

    overhead: float
    """Time of a dumped step over that of a plain one, less one."""
    forms: Counter[str]
    """Measured iterations by the form in which their tensors were kept."""


def measure(*, quick: bool = False) -> Result:
    """Measure the overhead without a limit, then with each share."""
    torch.set_num_threads(1)
    with running_host() as host:
        free = _run(host, "free", 0.0, quick=quick)
        held = {share: _run(host, _name("held", share), share, quick=quick) for share in SHARES}
    ratios = {_name("held_vs_set", share): run.overhead / share for share, run in held.items()}
    figures = {"ungoverned_overhead": free.overhead}
    for share, run in held.items():
        figures[_name("overhead", share)] = run.overhead
        for form in ("full", "lesser", "nothing"):
            part = run.forms[form] / run.forms.total()
            figures[_name(f"{form}_iterations", share)] = part
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    return Result(figures=figures, ratios={"held_vs_set": worst, **ratios})


def _name(text: str, share: float) -> str:
    return f"{text}_{round(share * 100)}_percent"


def _run(host: Host, name: str, share: float, *, quick: bool) -> GovernedRun:
    trainer = _make_trainer()
    for _ in range(WARMUP_STEPS):
        trainer.step()
    session = host.session(name, {"max_step_overhead": share})
    session.attach(trainer.model)
    short = quick or not share
    settle = WARMUP_STEPS if short else SETTLE_STEPS
    number = 0
    ratios: list[float] = []

    def run_block(steps: int) -> float:
        nonlocal number
        begun = time.perf_counter()
        number = _train(trainer, session.step, number, steps)
        return (time.perf_counter() - begun) / steps

    run_block(settle)
    first = number
    for _ in range(QUICK_ROUNDS if short else ROUNDS):
        session.dump_stop()
        run_block(QUIET_STEPS)
        host.wait_until_packed()
        plain_s = run_block(PLAIN_STEPS)
        session.dump_start()
        run_block(LEAD_STEPS)
        ratios.append(run_block(PLAIN_STEPS if short else DUMPED_STEPS) / plain_s)
    session.close()
    forms = Counter(
        _find_form(each)
        for each in host.status().iterations
        if each.job_id == name and each.iteration > first
    )
    host.remove_tensors(name)
    return GovernedRun(median(ratios) - 1, forms)


def _make_trainer() -> Trainer:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    model, batch = nn.Sequential(*layers), torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Trainer(model, lambda: model(batch).square().mean(), optimizer)


def _train(trainer: Trainer, begin_step: Callable[[int], None], number: int, steps: int) -> int:
    for _ in range(steps):
        begin_step(number)
        trainer.step()
        number += 1
    return number


def _find_form(status: IterationStatus) -> str:
    if status.dropped:
        return "nothing"
    return "lesser" if status.degraded else "full"

"""Step time with statistics, with fingerprints beside them, without run cards, and with full
tensors, forward and backward, at module level.

Two steps warm up, three count; cases alternate, each with a fresh model and a fresh session, and
begin when nothing of the case before is left to do. Statistics are also measured with an agent that
writes no table of them. In the full-tensor case these steps fit into the buffer; the case then
continues until the buffer is full, as in a long run, and times further steps. msprobe runs in a
process of its own when the variable MSPROBE_PYTHON names a Python that has it.
"""

from __future__ import annotations

import os
from collections import defaultdict

import torch

from . import minimal_hooks, msprobe_steps
from .encoder import SHAPES, encoder_trainer
from .host import Host, running_host
from .result import Result, median
from .training import EARLY, GROWTH_STEPS, LATE, STEPS, WARMUP_STEPS, Case, step_times
from .trees import check_complete

REPETITIONS = 5
SUSTAINED_STEPS = 12
BUFFER_FULL_STEP = 8
GROWTH_REPETITIONS = 7


CASES = {
    "no_hook": Case("standard"),
    "statistic": Case("standard", "statistic"),
    "full": Case("standard", "tensor", SUSTAINED_STEPS),
    "many_small_no_hook": Case("many_small"),
    "many_small_statistic": Case("many_small", "statistic"),
    "fingerprint": Case("standard", "statistic", fingerprints=True),
    "many_small_fingerprint": Case("many_small", "statistic", fingerprints=True),
    "statistic_without_card": Case("standard", "statistic", card=False),
    "many_small_statistic_without_card": Case("many_small", "statistic", card=False),
}
MINIMAL = "many_small_minimal_hooks"
"""Result of hooks that only look at tensors: what no tool of this kind can be faster than."""
UNTABLED = ("statistic", "many_small_statistic")
"""Cases that are also run with an agent that writes no table."""
MSPROBE = {
    "msprobe": ("standard", "statistics"),
    "msprobe_full": ("standard", "tensor"),
    "many_small_msprobe": ("many_small", "statistics"),
}
"""Shape and task of msprobe, by the name of the result."""
OVERHEADS = {
    "overhead_vs_msprobe": ("statistic", "no_hook", "msprobe"),
    "full_overhead_vs_msprobe": ("full_sustained", "no_hook", "msprobe_full"),
    "many_small_overhead_vs_msprobe": (
        "many_small_statistic",
        "many_small_no_hook",
        "many_small_msprobe",
    ),
}
"""Our case, our case without a hook, and msprobe's, by the name of the ratio."""

Times = dict[str, list[float]]


def measure() -> Result:
    """Measure all cases alternately, then the first steps of a session against later ones."""
    torch.set_num_threads(1)
    python = os.environ.get("MSPROBE_PYTHON", "")
    times: Times = defaultdict(list)
    with running_host() as host, running_host(table=False) as plain:
        for repetition in range(REPETITIONS):
            for name in UNTABLED:
                taken = _steps(plain, f"{name}{repetition}", CASES[name])
                times[f"{name}_without_table"] += taken[WARMUP_STEPS:STEPS]
            for name, case in CASES.items():
                taken = _steps(host, f"{name}{repetition}", case)
                times[name] += taken[WARMUP_STEPS:STEPS]
                # None but the full-tensor case goes on that long.
                times[f"{name}_sustained"] += taken[BUFFER_FULL_STEP:]
            times[MINIMAL] += _minimal_steps()[WARMUP_STEPS:]
            if python:
                _measure_msprobe(host, python, repetition, times)
        growth = _growth(host)
    step_s = {name: median(found) for name, found in times.items() if found}
    return Result(
        figures={f"{name}_step_ms": found * 1e3 for name, found in step_s.items()},
        ratios={
            "step_vs_no_hook": step_s["statistic"] / step_s["no_hook"],
            "full_step_vs_no_hook": step_s["full_sustained"] / step_s["no_hook"],
            "full_burst_vs_no_hook": step_s["full"] / step_s["no_hook"],
            "many_small_vs_no_hook": step_s["many_small_statistic"] / step_s["many_small_no_hook"],
            f"{MINIMAL}_vs_no_hook": step_s[MINIMAL] / step_s["many_small_no_hook"],
            "fingerprint_step_vs_statistic": step_s["fingerprint"] / step_s["statistic"],
            "many_small_fingerprint_vs_statistic": step_s["many_small_fingerprint"]
            / step_s["many_small_statistic"],
            **{
                f"{name}_with_table_vs_without": step_s[name] / step_s[f"{name}_without_table"]
                for name in UNTABLED
            },
            **{
                f"{name}_with_card_vs_without": step_s[name] / step_s[f"{name}_without_card"]
                for name in UNTABLED
            },
            "step20_vs_step1": growth,
            **(_msprobe_ratios(step_s) if python else {}),
        },
    )


def _steps(host: Host, name: str, case: Case) -> list[float]:
    """Return the seconds of the steps of one fresh trainer; remove its dump."""
    trainer = encoder_trainer(SHAPES[case.shape])
    if not case.dumped:
        return step_times(lambda _: trainer.step(), case.steps)
    settings = {"fingerprints": case.fingerprints, "card": case.card}
    session = host.session(name, settings, saved_data=case.dumped)
    session.attach(trainer.model)

    def step(number: int) -> None:
        session.step(number)
        trainer.step()

    times = step_times(step, case.steps)
    # Delivers what still waits: the next case has the machine to itself.
    session.close()
    host.wait_until_indexed()
    check_complete(host.tree(name))
    host.remove_tensors(name)
    return times


def _minimal_steps() -> list[float]:
    """Return the seconds of the steps of a model with many small calls under minimal hooks."""
    step = minimal_hooks.observe_modules(encoder_trainer(SHAPES["many_small"]))
    return step_times(lambda _: step())


def _growth(host: Host) -> float:
    """Return how much longer a step takes around step 20 of a session than around step 1."""
    case = Case("growth", "statistic", GROWTH_STEPS)
    taken = [_steps(host, f"growth{repetition}", case) for repetition in range(GROWTH_REPETITIONS)]
    early, late = (median(s for times in taken for s in times[part]) for part in (EARLY, LATE))
    return late / early


def _measure_msprobe(host: Host, python: str, repetition: int, times: Times) -> None:
    for name, (shape, task) in MSPROBE.items():
        folder = host.folder / f"{name}-{repetition}"
        steps = msprobe_steps.run(python, shape, msprobe_steps.MODULES, task, folder)
        for own, taken in zip((f"{name}_no_hook", name), steps, strict=True):
            times[own] += taken


def _msprobe_ratios(step_s: dict[str, float]) -> dict[str, float]:
    """Return msprobe's steps against its own model without a hook, and our overhead against its."""
    ratios = {"step_vs_msprobe": step_s["statistic"] / step_s["msprobe"]}
    for name in MSPROBE:
        ratios[f"{name}_step_vs_no_hook"] = step_s[name] / step_s[f"{name}_no_hook"]
    for name, (ours, plain, theirs) in OVERHEADS.items():
        ratios[name] = (step_s[ours] / step_s[plain] - 1) / (
            ratios[f"{theirs}_step_vs_no_hook"] - 1
        )
    return ratios

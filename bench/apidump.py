"""Step time with `api_dump` of everything and of statistics, forward and backward, at API level.

Two steps warm up, three count; cases alternate, each with a fresh model in a fresh process. When
all tensors are dumped, later steps are timed as well: by then the buffer is full, as in a long run.
The first step, with the call that starts the dump, is timed with the agent that runs, and with one
that the job starts.
troubleshooter and msprobe run in processes of their own when the variables TROUBLESHOOTER_PYTHON
and MSPROBE_PYTHON name Pythons that have them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable

from . import apidump_steps, msprobe_steps, troubleshooter_steps
from .host import Host, running_host
from .result import Result, median
from .training import EARLY, GROWTH_STEPS, LATE, STEPS, WARMUP_STEPS, Case

REPETITIONS = 3
SUSTAINED_STEP = 8


CASES = {
    "no_hook": Case("standard"),
    "all": Case("standard", "all", 12),
    "statistics": Case("standard", "statistics"),
    "stack": Case("standard", "stack"),
    "many_small_no_hook": Case("many_small"),
    "many_small_minimal_hooks": Case("many_small", apidump_steps.MINIMAL_HOOKS),
    "many_small_all": Case("many_small", "all"),
    "many_small_statistics": Case("many_small", "statistics"),
}
GROWTH = {
    "all": Case("growth", "all", GROWTH_STEPS),
    "statistics": Case("growth", "statistics", GROWTH_STEPS),
}
PEER_CASES = ("all", "statistics", "many_small_statistics")
OURS = {"all": "all_sustained"}
"""Our case that a peer's is compared with, where it has another name."""
MSPROBE_TASKS = {"all": "tensor", "statistics": "statistics"}
PEER_VARIABLES = {"troubleshooter": "TROUBLESHOOTER_PYTHON", "msprobe": "MSPROBE_PYTHON"}

Times = dict[str, list[float]]


def measure() -> Result:
    """Measure all cases alternately, then the first steps of a dump against later ones."""
    named = {peer: os.environ.get(variable, "") for peer, variable in PEER_VARIABLES.items()}
    pythons = {peer: python for peer, python in named.items() if python}
    times: Times = defaultdict(list)
    init_s: Times = defaultdict(list)
    with running_host() as host:
        for repetition in range(REPETITIONS):
            for name, case in CASES.items():
                taken = _steps(host, f"{name}{repetition}", case)
                times[name] += taken[WARMUP_STEPS:STEPS]
                times[f"{name}_sustained"] += taken[SUSTAINED_STEP:]
            for peer, python in pythons.items():
                _measure_peer(host, peer, python, repetition, times)
            _measure_first_steps(host, repetition, times, init_s)
        growth = {
            f"{name}_step20_vs_step1": _growth(host, name, case) for name, case in GROWTH.items()
        }
    step_s = {name: median(found) for name, found in times.items() if found}
    return Result(
        figures={
            **{f"{name}_step_ms": found * 1e3 for name, found in step_s.items()},
            **{f"{name}_init_ms": median(found) * 1e3 for name, found in init_s.items()},
        },
        ratios={**_ratios(step_s), **_peer_ratios(step_s, pythons), **growth},
    )


def _ratios(step_s: dict[str, float]) -> dict[str, float]:
    plain, small = step_s["no_hook"], step_s["many_small_no_hook"]
    return {
        "all_step_vs_no_hook": step_s["all_sustained"] / plain,
        "all_burst_vs_no_hook": step_s["all"] / plain,
        "statistics_step_vs_no_hook": step_s["statistics"] / plain,
        "stack_step_vs_no_hook": step_s["stack"] / plain,
        "many_small_all_vs_no_hook": step_s["many_small_all"] / small,
        "many_small_statistics_vs_no_hook": step_s["many_small_statistics"] / small,
        "many_small_minimal_hooks_vs_no_hook": step_s["many_small_minimal_hooks"] / small,
        "own_agent_first_step_vs_running_agent": step_s["own_agent_first"] / step_s["first"],
    }


def _peer_ratios(step_s: dict[str, float], peers: Iterable[str]) -> dict[str, float]:
    """Return the peers' steps against their own model without a hook, and our overhead against
    that of the peer with the least.
    """
    ratios: dict[str, float] = {}
    for name in PEER_CASES:
        theirs = {
            f"{peer}_{name}_step_vs_no_hook": step_s[f"{peer}_{name}"]
            / step_s[f"{peer}_{name}_no_hook"]
            for peer in peers
        }
        if theirs:
            plain = step_s["many_small_no_hook" if name.startswith("many") else "no_hook"]
            ours = step_s[OURS.get(name, name)] / plain
            ratios[f"{name}_overhead_vs_best_peer"] = (ours - 1) / (min(theirs.values()) - 1)
        ratios |= theirs
    return ratios


def _steps(host: Host, name: str, case: Case) -> list[float]:
    """Return the seconds of the steps of one fresh trainer in a fresh process."""
    tree = host.tree(name)
    return apidump_steps.run(case.shape, case.dumped, case.steps, tree, host.agent).step_s


def _measure_first_steps(host: Host, repetition: int, times: Times, init_s: Times) -> None:
    for name, agent in {"first": host.agent, "own_agent_first": ""}.items():
        tree = host.tree(f"{name}{repetition}")
        taken = apidump_steps.run("standard", "statistics", 1, tree, agent)
        init_s[name].append(taken.init_s)
        times[name].append(taken.start_s + taken.step_s[0])


def _growth(host: Host, name: str, case: Case) -> float:
    """Return how much longer a step takes around step 20 of a dump than around step 1."""
    taken = [_steps(host, f"growth-{name}{turn}", case) for turn in range(REPETITIONS)]
    early, late = (median(s for times in taken for s in times[part]) for part in (EARLY, LATE))
    return late / early


def _measure_peer(host: Host, peer: str, python: str, repetition: int, times: Times) -> None:
    for name in PEER_CASES:
        case = CASES[name]
        folder = host.folder / f"{peer}-{name}-{repetition}"
        if peer == "msprobe":
            task = MSPROBE_TASKS[case.dumped]
            steps = msprobe_steps.run(python, case.shape, msprobe_steps.APIS, task, folder)
        else:
            steps = troubleshooter_steps.run(python, case.shape, case.dumped, folder)
        for own, taken in zip((f"{peer}_{name}_no_hook", f"{peer}_{name}"), steps, strict=True):
            times[own] += taken

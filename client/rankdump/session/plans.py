"""What a session may be given as its plan, and the plan it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.contract.plan import STARTED, DumpPlan

STARTED_VARIABLE = "RANKDUMP_STARTED"
"""Gives all ranks of a job one folder; without it each names its own by when it began."""


class PlanSource(Protocol):
    """Somebody else's configuration object, such as `rankdump.tf.DumpConfig`."""

    def plan(self) -> DumpPlan:
        """Return the plan it means; ConfigError says what is wrong with it."""
        ...


def plan_now(given: DumpPlan | PlanSource, environ: Mapping[str, str]) -> DumpPlan:
    """Return the plan of a session that begins now: its tree may be named by the time."""
    plan = given if isinstance(given, DumpPlan) else given.plan()
    layout = LAYOUTS.get(plan.output.layout)
    if layout is None or not layout.timed or plan.output.started:
        return plan
    started = environ.get(STARTED_VARIABLE, "")
    if not STARTED.fullmatch(started):
        started = time.strftime("%Y%m%d%H%M%S")
    return replace(plan, output=replace(plan.output, started=started))

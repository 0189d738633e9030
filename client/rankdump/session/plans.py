"""What a session may be given as its plan, and the plan it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol

from rankdump.contract.layout.layouts import LAYOUTS
from rankdump.contract.plan import STARTED, DumpPlan

STARTED_FORM = "%Y%m%d%H%M%S"
STARTED_VARIABLE = "RANKDUMP_STARTED"
"""Gives all ranks of a job one folder; without it each names its own by when it began."""


class PlanSource(Protocol):
    """Somebody else's configuration object, such as `rankdump.tf.DumpConfig`."""

    def plan(self) -> DumpPlan:
        """Return the plan it means; ConfigError says what is wrong with it."""
        ...


def plan_now(given: DumpPlan | PlanSource, environ: Mapping[str, str]) -> DumpPlan | None:
    """Return the plan of a session that begins now: its tree may be named by the time.

    None for a plan that is not enabled.
    """
    plan = given if isinstance(given, DumpPlan) else given.plan()
    if not plan.enabled:
        return None
    layout = LAYOUTS.get(plan.output.layout)
    if layout is None or not layout.timed or plan.output.started:
        return plan
    started = environ.get(STARTED_VARIABLE, "")
    if not STARTED.fullmatch(started):
        started = time.strftime(STARTED_FORM)
    return replace(plan, output=replace(plan.output, started=started))

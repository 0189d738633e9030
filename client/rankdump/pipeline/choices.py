"""What a plan decides about the way the rooms are wired. Pure."""

from __future__ import annotations

from rankdump.contract.layout.profile import DEFAULT_PROFILE, PROFILES, Profile
from rankdump.contract.layout.statistic_csv import items_of
from rankdump.contract.plan import DumpPlan
from rankdump.measure import Measure


def profile_of(plan: DumpPlan) -> Profile:
    """Return how the tree is spelt; an agent refuses a plan with an unknown profile."""
    return PROFILES.get(plan.output.profile, DEFAULT_PROFILE)


def measure_of(plan: DumpPlan) -> Measure | None:
    """Return what computes figures, where they travel in the place of the elements."""
    content = plan.content
    if content.saved != "statistic":
        return None
    items = items_of(content.statistics, profile_of(plan))
    return Measure(items=items, on_device=content.on_device, precision=content.precision)


def at_end(plan: DumpPlan) -> bool:
    """Return whether all records of an iteration wait for its end, to keep their order."""
    return plan.content.saved == "statistic" and plan.content.on_device

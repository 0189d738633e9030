"""What a plan decides about the way the rooms are wired. Pure."""

from __future__ import annotations

from rankdump.contract.layout.profile import DEFAULT_PROFILE, PROFILES, Profile
from rankdump.contract.layout.statistic_csv import items_of
from rankdump.contract.plan import DumpPlan
from rankdump.measure import MAX_WAITING, Measure
from rankdump.stage import HEAD_BYTES


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
    """Return whether all records of an iteration wait for its end, to keep their order.

    Figures are then computed and sent together, and no thread of ours runs in the middle of a step.
    """
    return plan.content.saved == "statistic"


def batch_records(plan: DumpPlan) -> int:
    """Return how many records may wait for each other: what fills the buffer has to leave it."""
    return max(1, min(MAX_WAITING, plan.delivery.buffer_bytes // (2 * HEAD_BYTES)))

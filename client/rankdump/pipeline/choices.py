"""What a plan decides about the way the rooms are wired. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rankdump.contract.exchange import RecordHead
from rankdump.contract.layout.profile import DEFAULT_PROFILE, PROFILES, Profile
from rankdump.contract.layout.statistic_csv import items_of
from rankdump.contract.plan import DumpPlan
from rankdump.contract.statistics import countable, figures
from rankdump.measure import MAX_WAITING, Measure, without_elements
from rankdump.ship import Link
from rankdump.stage import HEAD_BYTES
from rankdump.values import Staged, TensorSource


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


def wants_slab(plan: DumpPlan, address: str) -> bool:
    """Return whether to ask for shared memory: only an agent of this host has any."""
    return plan.delivery.shared_memory and address.startswith("unix:")


def goes_straight(plan: DumpPlan) -> bool:
    """Return whether a tensor's fate is known when it is read, so that it needs one copy only."""
    return plan.selection.trigger == "always"


def reduction_of(plan: DumpPlan) -> Callable[[RecordHead, TensorSource], Staged | None] | None:
    """Return what makes figures of a tensor that has no room, where the plan asks for it."""
    if plan.delivery.on_full != "statistic":
        return None
    content = plan.content
    items = items_of(content.statistics, profile_of(plan))

    def reduced(head: RecordHead, source: TensorSource) -> Staged | None:
        if not countable(head.dtype):
            return None
        data = memoryview(bytearray(source.byte_count))
        source.copy_into(data)
        texts = figures(items, head.dtype, data)
        return without_elements(replace(head, degraded=True), texts)

    return reduced


def patience_s(plan: DumpPlan, *, link: Link, busy: bool, idle_s: float) -> float:
    """Return how long a tensor may still wait for room, given since when nothing was taken."""
    delivery = plan.delivery
    if delivery.on_full != "block" or link not in (Link.UP, Link.AWAY):
        return 0.0
    holds_back = not goes_straight(plan) or at_end(plan)
    if holds_back and not busy:
        # What fills the buffer waits for the very thread that asks: nothing will make room.
        return 0.0
    return delivery.block_timeout_s - idle_s

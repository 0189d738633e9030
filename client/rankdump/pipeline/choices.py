"""What a plan decides about the way the rooms are wired. Pure."""

from __future__ import annotations

from rankdump.contract.layout.layouts import DEFAULT_LAYOUT, LAYOUTS, Layout
from rankdump.contract.layout.profile import DEFAULT_PROFILE, PROFILES, Profile
from rankdump.contract.layout.statistic_csv import items_of
from rankdump.contract.plan import DumpPlan
from rankdump.heads import Heads
from rankdump.measure import MAX_WAITING, Measure
from rankdump.ship import Link
from rankdump.stage import ROW_BYTES
from rankdump.trace import now_us


def layout_of(plan: DumpPlan) -> Layout:
    """Return the plan's tree; an agent refuses a plan with an unknown one."""
    return LAYOUTS.get(plan.output.layout, DEFAULT_LAYOUT)


def heads_of(plan: DumpPlan, rank: int) -> Heads:
    """Return what names tensors as the plan's tree does."""
    net_name, layout = plan.output.net_name, layout_of(plan)
    return Heads(rank=rank, net_name=net_name, clock_us=now_us, layout=layout)


def keeps_stacks(plan: DumpPlan) -> bool:
    """Return whether the plan's tree has a file of where calls came from."""
    return layout_of(plan).api is not None


def profile_of(plan: DumpPlan) -> Profile:
    """Return how the tree is spelt; an agent refuses a plan with an unknown profile."""
    return PROFILES.get(plan.output.profile, DEFAULT_PROFILE)


def measure_of(plan: DumpPlan) -> Measure | None:
    """Return what computes figures on this rank; None where the plan never asks for them here."""
    content = plan.content
    if not (in_place_of_elements(plan) or plan.delivery.on_full == "statistic"):
        return None
    items = items_of(content.statistics, profile_of(plan))
    on_device = content.on_device and in_place_of_elements(plan)
    exact = layout_of(plan).api is not None
    return Measure(items=items, on_device=on_device, precision=content.precision, exact=exact)


def in_place_of_elements(plan: DumpPlan) -> bool:
    """Return whether figures are all that is kept of any tensor."""
    return plan.content.saved == "statistic"


def batch_rows(plan: DumpPlan) -> int:
    """Return how many rows may wait for each other: what fills the buffer has to leave it.

    Otherwise they wait for the end of an iteration: they are then computed and sent together, and
    no thread of ours runs in the middle of a step.
    """
    return max(1, min(MAX_WAITING, rows_bytes(plan) // (2 * ROW_BYTES)))


def rows_bytes(plan: DumpPlan) -> int:
    """Return the room of rows: beside records a little, which these can never fill."""
    limit = plan.delivery.buffer_bytes
    return limit if in_place_of_elements(plan) else limit // 16


def wants_slab(plan: DumpPlan, address: str) -> bool:
    """Return whether to ask for shared memory: only an agent of this host has any."""
    return plan.delivery.shared_memory and address.startswith("unix:")


def goes_straight(plan: DumpPlan) -> bool:
    """Return whether a tensor's fate is known when it is read, so that it needs one copy only."""
    return plan.selection.trigger == "always"


def patience_s(plan: DumpPlan, *, link: Link, busy: bool, idle_s: float) -> float:
    """Return how long a tensor may still wait for room, given since when nothing was taken."""
    delivery = plan.delivery
    if delivery.on_full != "block" or link not in (Link.UP, Link.AWAY, Link.OPENING):
        return 0.0
    holds_back = not goes_straight(plan) or in_place_of_elements(plan)
    if holds_back and not busy:
        # What fills the buffer waits for the very thread that asks: nothing will make room.
        return 0.0
    return delivery.block_timeout_s - idle_s

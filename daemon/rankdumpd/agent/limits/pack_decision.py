"""Decision whether a tensor's file is packed before it is written or later, and when the files
that wait for that are urgent. Pure: no clock, no disk, no network.

Packing costs many times what writing does. So a file is written first where a rank waits, or soon
will: while a ring or the queue is more than half full. Space comes first: files that wait may never
take more than a share of the space that is left below a limit, and near it nothing waits.
"""

from __future__ import annotations

from typing import NamedTuple

from rankdumpd.agent.limits.admission import ResourceUsage, compute_floor_bytes

MAX_CALM_SHARE = 0.5
"""Share of a ring or of the queue above which the ranks are about to wait."""
MAX_WAITING_SHARE = 0.25
"""Largest share of the space left that files which wait may take: a fifth of what was left before
them."""
MAX_RETAINED_SHARE = 0.125
"""Largest share of `retain_bytes` that such files may take."""


class StorePressure(NamedTuple):
    """How near the ranks of an agent are to waiting for it."""

    ring_share: float = 0.0
    """Of the fullest ring."""
    queue_share: float = 0.0
    """Of the budget of frames in flight."""
    rank_waits: bool = False
    """Whether a frame waits for that budget."""


class PackDecision(NamedTuple):
    """Whether a file is packed later, and why, or why not."""

    is_later: bool
    reason: str


def decide_packing(
    pressure: StorePressure, usage: ResourceUsage, *, waiting_bytes: int, byte_count: int
) -> PackDecision:
    """Decide on a tensor of a plan that lets files wait; `waiting_bytes` is what waits already."""
    cause = find_pressure_cause(pressure)
    if not cause:
        return PackDecision(False, "no_pressure")
    if is_space_short(usage, waiting_bytes + byte_count):
        return PackDecision(False, "little_space")
    return PackDecision(True, cause)


def find_pressure_cause(pressure: StorePressure) -> str:
    """Return why ranks wait or soon will; empty when they do not."""
    if pressure.rank_waits:
        return "rank_waits"
    if pressure.ring_share > MAX_CALM_SHARE:
        return "ring_half_full"
    return "queue_half_full" if pressure.queue_share > MAX_CALM_SHARE else ""


def is_space_short(usage: ResourceUsage, waiting_bytes: int) -> bool:
    """Return whether that many bytes of files that wait are too many for the space left.

    Files that wait already count as used. A disk whose space is unknown has none.
    """
    policy = usage.policy
    if policy.retain_bytes and waiting_bytes > MAX_RETAINED_SHARE * policy.retain_bytes:
        return True
    return waiting_bytes > MAX_WAITING_SHARE * compute_bytes_left(usage)


def compute_bytes_left(usage: ResourceUsage) -> int:
    """Return the bytes that may still be written before a floor or a cap drops a tensor."""
    policy, space = usage.policy, usage.space
    left = [space.free_bytes - compute_floor_bytes(policy, space)]
    if policy.disk_bytes:
        left.append(policy.disk_bytes - usage.used_bytes)
    if policy.job_bytes:
        left.append(policy.job_bytes - usage.job_bytes)
    return max(0, min(left) - usage.queued_bytes)

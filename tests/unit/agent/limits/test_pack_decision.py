"""Decision whether a file is packed now or later."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankdumpd.agent.limits.admission import (
    DiskSpace,
    ResourcePolicy,
    ResourceUsage,
    StorePressure,
    compute_bytes_left,
    decide_packing,
    is_space_short,
)

MIB = 1 << 20
POLICY = ResourcePolicy(max_record_bytes=64 * MIB, keep_free_bytes=100 * MIB)
ROOMY = ResourceUsage(POLICY, DiskSpace(free_bytes=1100 * MIB, total_bytes=2000 * MIB))
FULL_RING = StorePressure(ring_share=0.51)


@pytest.mark.parametrize(
    ("pressure", "reason"),
    [
        (StorePressure(), ""),
        (StorePressure(ring_share=0.5, queue_share=0.5), ""),
        (StorePressure(ring_share=0.51), "ring_half_full"),
        (StorePressure(queue_share=0.51), "queue_half_full"),
        (StorePressure(ring_share=1.0, queue_share=1.0, rank_waits=True), "rank_waits"),
    ],
)
def test_files_are_packed_later_where_ranks_wait_or_soon_will(pressure: StorePressure, reason: str):
    decision = decide_packing(pressure, ROOMY, waiting_bytes=0, byte_count=MIB)
    assert decision == (bool(reason), reason or "no_pressure")


@pytest.mark.parametrize(
    ("waiting", "size", "is_later"),
    [(0, 1, True), (249, 1, True), (250, 1, False), (0, 250, True), (0, 251, False)],
)
def test_files_that_wait_take_a_quarter_of_the_space_left_at_most(
    waiting: int, size: int, is_later: bool
):
    """1,000 MiB are left above the floor."""
    decision = decide_packing(FULL_RING, ROOMY, waiting_bytes=waiting * MIB, byte_count=size * MIB)
    assert decision == (is_later, "ring_half_full" if is_later else "little_space")


@pytest.mark.parametrize(
    ("usage", "left"),
    [
        (ROOMY, 1000),
        (replace(ROOMY, queued_bytes=300 * MIB), 700),
        (replace(ROOMY, policy=replace(POLICY, keep_free_ratio=0.1)), 900),
        (replace(ROOMY, policy=replace(POLICY, disk_bytes=50 * MIB), used_bytes=20 * MIB), 30),
        (replace(ROOMY, policy=replace(POLICY, job_bytes=50 * MIB), job_bytes=45 * MIB), 5),
        (replace(ROOMY, policy=replace(POLICY, disk_bytes=50 * MIB), used_bytes=60 * MIB), 0),
        (replace(ROOMY, space=DiskSpace(free_bytes=50 * MIB, total_bytes=200 * MIB)), 0),
        (ResourceUsage(POLICY), 0),
    ],
    ids=["floor", "queue", "ratio", "cap", "quota", "over a cap", "below the floor", "unknown"],
)
def test_space_left_is_that_below_the_nearest_limit(usage: ResourceUsage, left: int):
    assert compute_bytes_left(usage) == left * MIB
    assert is_space_short(usage, 1 + left * MIB // 4)


def test_files_that_wait_take_an_eighth_of_what_is_retained_at_most():
    """Retention removes what is older, and does not count what waits."""
    usage = replace(ROOMY, policy=replace(POLICY, retain_bytes=800 * MIB), used_bytes=900 * MIB)
    assert not is_space_short(usage, 100 * MIB)
    assert is_space_short(usage, 100 * MIB + 1)

"""Outliers among the numbers of the ranks of a job."""

from __future__ import annotations

import pytest

from rankdump._core.black_box import RankStep
from rankdumpd.coordinator.alarms import job_alarms
from rankdumpd.coordinator.alarms.job_alarms import PeerSteps, find_outliers


@pytest.mark.parametrize(
    ("numbers", "outliers"),
    [
        ([1, 1.1, 0.9, 1, 40], [4]),
        ([1, 1.1, 0.9, 1, 9], []),
        # Three others are too few.
        ([1, 1.1, 0.9, 40], []),
        # They differ so much that none stands out.
        ([1, 30, 0.03, 900, 40_000], []),
        ([1, 1, 1, 1, float("nan")], []),
        ([1, 1, 1, 1, float("inf")], []),
        ([0, 0, 0, 0, 5], []),
        ([-1, -1, -1, -1, 50], []),
        ([1] * 9 + [50, 70], [10, 9]),
        ([1e-9] * 5 + [1.0], [5]),
        ([1] * 1000 + [11], [1000]),
    ],
)
def test_outlier_is_far_above_all_others(numbers, outliers):
    assert find_outliers(dict(enumerate(map(float, numbers)))) == outliers


def add(
    peers: PeerSteps, iteration: int, *numbers: float, first: int = 0, attempt: int = 0
) -> None:
    for rank, number in enumerate(numbers, first):
        peers.add(RankStep("j", rank, attempt, iteration, {"loss": number}))


def list_ranks(peers: PeerSteps) -> list[tuple[int, int | None]]:
    return [(alarm.iteration, alarm.cause.rank) for alarm in peers.find_alarms(7)]


def test_outlier_is_an_alarm_once_until_it_is_none():
    peers = PeerSteps("j")
    add(peers, 8, 1, 1, 1, 1, 50)
    [alarm] = peers.find_alarms(7)
    assert (alarm.key, alarm.cause.at_us) == (("j", 0, 8), 7)
    text = "loss of rank 4 is 50, far above that of 4 other ranks, whose median is 1"
    assert alarm.cause.text == text
    assert list_ranks(peers) == []
    add(peers, 16, 1, 1, 1, 1, 50)
    assert list_ranks(peers) == []
    add(peers, 24, 1, 1, 1, 1, 2)
    assert list_ranks(peers) == []
    # What arrives late of an earlier iteration changes nothing.
    add(peers, 8, 1, first=5)
    add(peers, 32, 1, 1, 1, 1, 50)
    assert list_ranks(peers) == [(32, 4)]


def test_agents_may_report_at_different_times():
    peers = PeerSteps("j")
    add(peers, 8, 1, 1, 50)
    assert list_ranks(peers) == []
    add(peers, 12, 1, 1, 50)
    add(peers, 8, 1, 1, first=3)
    assert list_ranks(peers) == [(8, 2)]


def test_next_attempt_is_compared_alone():
    peers = PeerSteps("j")
    add(peers, 8, 1, 1, 1, 1)
    add(peers, 8, 50, first=4, attempt=1)
    assert list_ranks(peers) == []
    add(peers, 8, 2, 2, 2, 2, attempt=1)
    add(peers, 8, 900, first=5)
    assert list_ranks(peers) == [(8, 4)]


def test_numbers_are_bounded(monkeypatch):
    peers = PeerSteps("j")
    for iteration in range(100):
        add(peers, iteration, 1, 1, 1, 1)
    assert len(peers._steps) == job_alarms.MAX_STEPS
    assert peers._count == 4 * job_alarms.MAX_STEPS
    monkeypatch.setattr(job_alarms, "MAX_NUMBERS", 4 * job_alarms.MAX_STEPS)
    add(peers, 100, 1, 1, 1, 1, 50)
    assert peers._count <= job_alarms.MAX_NUMBERS
    assert set(peers._changed) <= peers._steps.keys()
    monkeypatch.setattr(job_alarms, "MAX_NUMBERS", 2)
    for _ in range(2 * job_alarms.MAX_STEPS):
        add(peers, 200, 1, 1, 1, 1, 50)
    assert peers._count <= 2

"""Decisions of the black box, for every reason."""

from __future__ import annotations

import pytest

from rankdump._core.plan import BlackBoxSettings
from rankdumpd.agent.blackbox.freeze_decision import (
    LOST_GRACE_S,
    MAX_WAIT_S,
    MIN_INTERVALS,
    MIN_SILENCE_S,
    MIN_WAIT_S,
    ROW_TREE_BYTES,
    FreezeFacts,
    compute_tree_bytes,
    compute_wait_s,
    find_refusal,
    is_dead,
    is_silent,
    is_wait_over,
)

SETTINGS = BlackBoxSettings(steps=8, pause_s=60.0, max_bytes=1000 * ROW_TREE_BYTES)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"steps": 0}, "no step yet"),
        ({"steps": 0, "last_iteration": 2}, "no step since the last freeze"),
        (
            {"last_iteration": 3, "last_s": 70.0, "last_root": "/d/3"},
            "30 s ago at iteration 3: /d/3; the next freeze is possible in 30 s",
        ),
        ({"last_iteration": 7, "last_s": -9e9}, "frozen already at iteration"),
        ({"tree_bytes": 400_001}, "blackbox.max_bytes"),
        ({"tree_bytes": 1, "frozen_bytes": 1000 * ROW_TREE_BYTES}, "remove some"),
        ({"shortage": "disk_low"}, "no room (disk_low)"),
    ],
)
def test_refusal_has_a_reason(facts, words):
    assert words in find_refusal(FreezeFacts(SETTINGS, 7, **({"steps": 5} | facts)), 100.0)


@pytest.mark.parametrize(
    "facts", [{}, {"last_iteration": 3, "last_s": 40.0}, {"tree_bytes": 400_000}]
)
def test_cause_without_a_refusal_freezes(facts):
    assert not find_refusal(FreezeFacts(SETTINGS, 7, steps=5, **facts), 100.0)


def test_no_limit_of_bytes_refuses_nothing():
    facts = FreezeFacts(BlackBoxSettings(8, max_bytes=0), 7, steps=1, tree_bytes=1 << 50)
    assert not find_refusal(facts, 0.0)


@pytest.mark.parametrize(
    ("since_s", "median_s", "count", "silent"),
    [
        (MIN_SILENCE_S, 0.01, MIN_INTERVALS, False),
        (MIN_SILENCE_S + 0.1, 0.01, MIN_INTERVALS, True),
        (29.0, 10.0, MIN_INTERVALS, False),
        (31.0, 10.0, MIN_INTERVALS, True),
        (1e6, 0.01, MIN_INTERVALS - 1, False),
    ],
)
def test_silence_is_measured_by_the_median(since_s, median_s, count, silent):
    assert is_silent(since_s, median_s, count) is silent


@pytest.mark.parametrize(("since_s", "silent"), [(119.0, False), (121.0, True)])
def test_rank_that_went_on_after_a_pause_may_pause_again(since_s, silent):
    """It saves a checkpoint now and then, for up to a minute."""
    assert is_silent(since_s, 0.1, MIN_INTERVALS, longest_pause_s=60.0) is silent


def test_dead_rank_is_one_whose_process_is_gone():
    assert is_dead(0.0, is_process_gone=True)
    assert not is_dead(1e6, is_process_gone=False)
    assert not is_dead(LOST_GRACE_S, is_process_gone=None)
    assert is_dead(LOST_GRACE_S + 0.1, is_process_gone=None)


def test_wait_grows_with_the_step_within_bounds():
    waits = [compute_wait_s(SETTINGS, median_s) for median_s in (0.0, 1.0, 100.0)]
    assert waits == [MIN_WAIT_S, 4.5, MAX_WAIT_S]


@pytest.mark.parametrize(
    ("late_s", "now_s", "expected"),
    [
        ([], 0.0, True),
        ([5.0], 9.0, False),
        ([5.0], 10.0, True),  # it has sent nothing for long: it hangs
        ([5.0, 9.5], 10.0, False),
        ([29.9], 29.99, False),
        ([29.9], 30.0, True),
    ],
)
def test_freeze_waits_for_ranks_whose_steps_still_arrive(late_s, now_s, expected):
    assert is_wait_over(late_s, deadline_s=10.0, now_s=now_s) is expected


def test_tensors_in_full_count_for_the_limit_of_bytes():
    assert compute_tree_bytes(1000, 0, 0) == SETTINGS.max_bytes
    coming = compute_tree_bytes(10, 3, 1 << 20)
    assert 1 << 20 < coming < (1 << 20) + 3 * 10_000 + 10 * 1024
    facts = FreezeFacts(SETTINGS, 7, steps=5, tree_bytes=coming)
    assert "blackbox.max_bytes" in find_refusal(facts, 0.0)

"""Which collective ranks wait in, and for whom."""

from __future__ import annotations

import pytest

from rankdump._core.black_box import (
    MIN_WAIT_US,
    GroupCalls,
    RankCallCounts,
    StandingCall,
    find_standing_calls,
)

NOW_US = 100_000_000


def rank(number: int, *calls: tuple[str, int, float], is_waiting: bool = True) -> RankCallCounts:
    """Each call has its group, the count with it, and how many seconds ago it was."""
    members = {"world": (0, 1, 2), "half": (1, 2)}
    made = tuple(
        GroupCalls(group, members[group], count, "all_reduce", NOW_US - round(ago_s * 1e6))
        for group, count, ago_s in calls
    )
    return RankCallCounts(number, NOW_US, is_waiting, made)


def test_rank_that_has_called_fewer_is_the_one_that_others_wait_for():
    ranks = [rank(n, ("world", 12, 30 - n)) for n in (0, 1)] + [rank(2, ("world", 11, 31.0))]
    (call,) = find_standing_calls(ranks)
    assert call == StandingCall("world", "all_reduce", 11, (0, 1), 30_000_000, {2: 11})
    assert call.describe() == (
        "ranks 0-1 called all_reduce number 11 of group 'world' 30 s before the freeze and none "
        "after it; rank 2 has not called it: it called the 11 collectives before it"
    )


@pytest.mark.parametrize(
    ("number", "missing", "text"),
    [
        (0, {1: 0}, "rank 1 has not called it: it called no collective of the group"),
        (1, {1: 1}, "rank 1 has not called it: it called the one collective before it"),
        (5, {1: 0}, "rank 1 has not called it: it called none of the 5 collectives before it"),
        (5, {1: 3, 2: 3}, "have not called it: they called 3 of the 5 collectives before it"),
        (5, {1: 0, 2: 5}, "have not called it: they called 0 to 5 of the 5 collectives before it"),
        (5, {1: 5, 2: 5}, "ranks 1-2 have not called it: they called the 5 collectives before it"),
    ],
)
def test_description_says_what_missing_ranks_have_called(number, missing, text):
    call = StandingCall("world", "all_reduce", number, (0,), 30_000_000, missing)
    assert call.describe().endswith(text)


def test_call_of_an_earlier_group_is_over():
    """Rank 1 waits for rank 2 in the half, so rank 0 waits for both."""
    ranks = [
        rank(0, ("world", 5, 20.0)),
        rank(1, ("world", 4, 21.0), ("half", 7, 19.0)),
        rank(2, ("world", 4, 21.0), ("half", 6, 22.0), is_waiting=False),
    ]
    found = find_standing_calls(ranks)
    assert [(each.group, each.waiting, dict(each.missing)) for each in found] == [
        ("half", (1,), {2: 6}),
        ("world", (0,), {1: 4, 2: 4}),
    ]


def test_call_that_all_have_made_and_ranks_of_which_nothing_is_known():
    (call,) = find_standing_calls([rank(n, ("world", 3, 9.0)) for n in range(3)])
    assert call.describe().endswith("none after it; all its members have called it")
    (call,) = find_standing_calls([rank(0, ("world", 3, 9.0))])
    assert call.describe() == (
        "rank 0 called all_reduce number 2 of group 'world' 9 s before the freeze and none after "
        "it; nothing is known of ranks 1-2"
    )


def test_short_wait_and_ended_step_are_none():
    young = MIN_WAIT_US / 1e6 - 0.001
    assert not find_standing_calls(
        [rank(0, ("world", 3, young)), rank(1, ("world", 2, 50.0), is_waiting=False)]
    )
    assert not find_standing_calls([rank(0)])

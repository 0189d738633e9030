"""Numbers and ranks as short text."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from rankdump._core.number_ranges import missing_ranges, name_first_ranks, name_ranks


@pytest.mark.parametrize(
    ("ranks", "count", "text"),
    [
        ([3], 0, "rank 3"),
        ([2, 1, 0, 7], 0, "ranks 0-2,7"),
        (range(1024), 0, "ranks 0-1023"),
        (range(0, 40, 2), 0, "ranks 0,2,4,6,8,10,12,14 and 12 more"),
        ([0, 1], 9, "ranks 0-1 and 7 more"),
    ],
)
def test_first_ranks_are_named_and_the_rest_is_counted(
    ranks: Collection[int], count: int, text: str
):
    assert name_first_ranks(ranks, count) == text


def test_name_ranks_lists_all_of_them_once():
    assert name_ranks([0, 2, 4, 6, 8, 10, 12, 14, 16, 16]) == "ranks 0,2,4,6,8,10,12,14,16"


def test_missing_ranges_end_below_the_count():
    assert missing_ranges([1, 5, 9], 8) == "0,2-4,6-7"

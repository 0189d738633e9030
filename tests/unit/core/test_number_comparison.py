"""Numbers that are far above the usual ones."""

from __future__ import annotations

import pytest

from rankdump._core.black_box import is_far_above

USUAL = [1.0, 1.1, 0.9, 1.0]


@pytest.mark.parametrize(
    ("usual", "number", "far"),
    [
        (USUAL, 11.5, True),
        (USUAL, 9.5, False),
        (USUAL[:3], 99.0, False),
        ([*USUAL[:3], float("nan")], 99.0, False),
        ([*USUAL[:3], 0.0], 99.0, False),
        (USUAL, float("nan"), False),
        (USUAL, float("inf"), False),
        (USUAL, -5.0, False),
        # A few outliers among the usual ones hide no other.
        ([*USUAL * 4, 500.0, 700.0], 50.0, True),
        # Ten times as large, and usual for numbers that differ so much.
        ([0.1, 1.0, 10.0, 0.2, 5.0], 50.0, False),
    ],
)
def test_number_is_far_above_the_usual_ones(usual, number, far):
    assert is_far_above(usual, number, 4) is far

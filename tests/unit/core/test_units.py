"""Bytes, durations and percentages as people read them."""

from __future__ import annotations

import pytest

from rankdump._core.units import format_bytes, format_duration, format_percentage


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536 << 10, "1.50 MiB"),
        (100 << 30, "100.0 GiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_format_bytes_uses_the_largest_fitting_unit(count, text):
    """Sizes stand in the largest unit that leaves a number over one."""
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0 ms"),
        (12, "0.012 ms"),
        (8_240, "8.2 ms"),
        (680_000, "680 ms"),
        (999_900, "1,000 ms"),
        (12_040_000, "12 s"),
        (12_400_000, "12.4 s"),
        (1_836_000_000, "1,836 s"),
        (35_999_000_000, "35,999 s"),
        (45_000_000_000, "12.5 h"),
    ],
)
def test_format_duration_has_a_decimal_below_100(microseconds, text):
    """A duration has a decimal below a hundred, unless that is zero."""
    assert format_duration(microseconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (0.002, "0.2%"), (0.0999, "10%"), (0.6, "60%"), (0.996, "100%"), (1.25, "125%")],
)
def test_format_percentage_has_a_decimal_below_ten(share, text):
    """A small share is not rounded to nothing, and a large one has no decimal."""
    assert format_percentage(share) == text

"""Forecast of a plan's needs: sums, and whether they fit on a disk."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankdump._core.forecast import (
    DiskCapacity,
    DumpSize,
    ObservedDump,
    count_planned_iterations,
    forecast_dump,
)
from rankdump._core.selection import parse_iterations

EACH = DumpSize(tensors=3, files=4, folders=1, bytes_in=900, bytes_stored=500, disk_bytes=1000)
ONCE = DumpSize(files=2, folders=1, bytes_stored=10, disk_bytes=100)
SEEN = ObservedDump(1, 2, EACH, ONCE)


@pytest.mark.parametrize(
    ("text", "count"),
    [("all", None), ("0", 1), ("0|5-8", 5), ("5-8|0|6-9|6", 6), ("|", 0), ("0-9|3-4|20", 11)],
)
def test_count_planned_iterations_counts_each_once(text, count):
    iterations = parse_iterations(text)
    assert iterations is not None
    assert count_planned_iterations(iterations) == count


def test_forecast_of_ten_iterations_adds_up():
    found = forecast_dump(SEEN, 10, DiskCapacity(free_bytes=30_000, total_bytes=100_000))
    assert (found.tensors, found.files, found.bytes_in) == (30, 42, 9000)
    assert (found.bytes_stored, found.disk_bytes) == (5010, 10_100)
    assert (found.usable_bytes, found.fitting, found.fits, found.reason) == (20_000, 19, True, "")


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        (DiskCapacity(20_000, 100_000), "9.86 KiB are needed, but only 9.77 KiB may be used"),
        (DiskCapacity(5, 100_000), "9.86 KiB are needed, but only 0 B may be used"),
        (DiskCapacity(90_000, 100_000, 52, 100), "53 files and folders are needed, but the disk"),
    ],
)
def test_forecast_explains_a_shortage(room, reason):
    found = forecast_dump(SEEN, 10, room)
    assert not found.fits
    assert found.reason.startswith(reason)


def test_forecast_of_nothing_fits_on_a_full_disk():
    assert forecast_dump(
        ObservedDump(1, 1, DumpSize(), DumpSize()), 10, DiskCapacity(0, 100_000)
    ).fits
    assert forecast_dump(
        ObservedDump(1, 1, DumpSize(), DumpSize()), 10, DiskCapacity(0, 100_000, 0, 100)
    ).fits


def test_forecast_ignores_files_on_a_disk_without_inodes():
    assert forecast_dump(SEEN, 10, DiskCapacity(90_000, 100_000)).fits


@given(
    st.integers(0, 10**6),
    st.integers(1, 10**6),
    st.integers(0, 100),
    st.integers(0, 1000),
    st.floats(0, 0.99),
)
def test_forecast_fits_exactly_its_fitting_count(free, total, count, inodes, ratio):
    room = DiskCapacity(free, total, inodes, 1000, ratio)
    fitting = forecast_dump(SEEN, None, room).fitting
    assert forecast_dump(SEEN, count, room).fits == (count <= fitting)
    assert not forecast_dump(SEEN, fitting + 1, room).fits

"""Decision when the rows of finished iterations are written to the table of their tree. Pure: no
clock, no disk, no network.
"""

from __future__ import annotations

from typing import NamedTuple

WINDOW_RECORDS = 125_000
"""Records of a full window: a few megabytes of Parquet."""
DISK_FULL = "disk_full"
"""Reason that people are told: the others pass by themselves."""
WINDOW_AGE_S = 60.0
"""Longest time for which rows wait while their job goes on."""


class WaitingRows(NamedTuple):
    """What of a tree is not in its table yet."""

    records: int
    since_us: int
    """Age of the oldest manifest, since the epoch."""
    is_job_over: bool
    """Whether no rank writes to the tree any more."""
    is_disk_full: bool
    """Whether tensors are dropped because the disk has too little space."""


class WindowDecision(NamedTuple):
    """Whether rows are written now, and why, or why not."""

    is_due: bool
    reason: str


def decide_window(rows: WaitingRows, *, now_us: int, is_finishing: bool) -> WindowDecision:
    """Decide on the rows of a tree at a time since the epoch.

    `is_finishing` means that no later process of the agent would write them.

    >>> decide_window(WaitingRows(10, 0, False, False), now_us=30_000_000, is_finishing=False)
    WindowDecision(is_due=False, reason='window_open')
    """
    if rows.is_disk_full:
        return WindowDecision(False, DISK_FULL)
    if rows.records >= WINDOW_RECORDS:
        return WindowDecision(True, "window_full")
    if is_finishing or rows.is_job_over:
        return WindowDecision(True, "job_over")
    if now_us - rows.since_us >= WINDOW_AGE_S * 1e6:
        return WindowDecision(True, "window_old")
    return WindowDecision(False, "window_open")

"""Decisions of the black box: whether a cause freezes the rings of a job, whether a rank is gone or
silent, and when the wait of a freeze is over. Pure: the clock is an argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankdump._core.plan import BlackBoxSettings
from rankdump._core.units import format_bytes

ROW_TREE_BYTES = 400
"""Approximate bytes of a row in a frozen tree: its line in a table, and its record in a
manifest.
"""
TENSOR_TREE_BYTES = 8192
"""Approximate bytes of a tensor's file besides its elements: header, last block and record."""
MIN_SILENCE_S = 5.0
SILENCE_FACTOR = 3.0
PAUSE_FACTOR = 2.0
"""A rank that went on after a pause, as for a checkpoint, counts as silent only after this multiple
of that pause.
"""
MIN_INTERVALS = 8
"""Number of steps from which on their median is meaningful."""
LOST_GRACE_S = 3.0
"""Seconds within which a rank whose process cannot be watched may reconnect."""
GATHER_S = 1.0
"""Seconds for which a freeze gathers causes from other ranks, even if all ranks have ended."""
REACH_WAIT_S = 4.0
"""Longest time in seconds that a freeze waits for the coordinator to say which agents it has
reached.
"""
MIN_WAIT_S = 3.0
MAX_WAIT_S = 10.0
"""Longest time in seconds that a freeze waits for further steps; the shortest is MIN_WAIT_S."""
LATE_STEP_S = 4.0
MAX_LATENESS_S = 20.0
"""Seconds added to the longest wait for a rank whose steps still arrive, each within LATE_STEP_S of
the last one: on a busy host the steps of one rank arrive seconds after those of another.
"""


@dataclass(frozen=True, slots=True)
class FreezeFacts:
    """Facts that the decision on a cause depends on."""

    settings: BlackBoxSettings
    iteration: int
    """Iteration in which the cause was found."""
    steps: int = 0
    """Number of steps in all rings of the job."""
    tree_bytes: int = 0
    """Approximate bytes of these steps in a frozen tree."""
    last_iteration: int | None = None
    """Iteration of the latest freeze of the job; None if there was none."""
    last_s: float = 0.0
    """Time at which the latest freeze began, in seconds on the clock of the decision."""
    last_root: str = ""
    """Root of the tree of the latest freeze."""
    frozen_bytes: int = 0
    """Bytes of all frozen trees beside the tree of the job."""
    shortage: str = ""
    """Drop reason because of which the disk has no room; empty when it has room."""


def compute_tree_bytes(rows: int, tensors: int, tensor_bytes: int) -> int:
    """Return the approximate bytes of rows and full tensors in a frozen tree; `tensor_bytes` is the
    size of all elements.
    """
    return rows * ROW_TREE_BYTES + tensors * TENSOR_TREE_BYTES + tensor_bytes


def find_refusal(facts: FreezeFacts, now_s: float) -> str:
    """Return why a cause does not freeze its job, which has no freeze under way; empty when it
    does.
    """
    return _find_repetition(facts, now_s) or _find_lack(facts) or _find_shortage(facts)


def _find_repetition(facts: FreezeFacts, now_s: float) -> str:
    if facts.last_iteration is None:
        return ""
    before = f"at iteration {facts.last_iteration}: {facts.last_root}"
    if facts.last_iteration == facts.iteration:
        return f"it was frozen already {before}"
    left_s = facts.last_s + facts.settings.pause_s - now_s
    if left_s <= 0:
        return ""
    ago_s = max(0.0, now_s - facts.last_s)
    return (
        f"it was frozen {ago_s:.0f} s ago {before}; the next freeze is possible in "
        f"{max(1.0, left_s):.0f} s (blackbox.pause_s)"
    )


def _find_lack(facts: FreezeFacts) -> str:
    if facts.steps:
        return ""
    since = "yet" if facts.last_iteration is None else "since the last freeze"
    return f"its ranks have sent no step {since}"


def _find_shortage(facts: FreezeFacts) -> str:
    coming, most = facts.tree_bytes, facts.settings.max_bytes
    if most and facts.frozen_bytes + coming > most:
        return (
            f"frozen trees take {format_bytes(facts.frozen_bytes)}, about {format_bytes(coming)} "
            f"would be added, and {format_bytes(most)} are allowed (blackbox.max_bytes): remove "
            "some of them, or allow more"
        )
    return f"the disk of its tree has no room ({facts.shortage})" if facts.shortage else ""


def is_silent(
    since_s: float, median_s: float, interval_count: int, longest_pause_s: float = 0.0
) -> bool:
    """Return whether a rank has made no progress for too long.

    `since_s` is the time since its last progress, `longest_pause_s` the longest earlier time
    without progress, and `median_s` the median duration of `interval_count` steps.
    """
    if interval_count < MIN_INTERVALS:
        return False
    usual_s = max(SILENCE_FACTOR * median_s, PAUSE_FACTOR * longest_pause_s)
    return since_s > max(MIN_SILENCE_S, usual_s)


def is_dead(since_s: float, *, is_process_gone: bool | None) -> bool:
    """Return whether a rank whose stream ended without a session end is gone.

    `is_process_gone` is None if the process of the rank cannot be watched.
    """
    return since_s > LOST_GRACE_S if is_process_gone is None else is_process_gone


def compute_wait_s(settings: BlackBoxSettings, median_s: float) -> float:
    """Return how many seconds a freeze waits for further steps of ranks with this
    median step time.
    """
    return min(MAX_WAIT_S, max(MIN_WAIT_S, 1.5 * (settings.post_steps + 1) * median_s))


def is_wait_over(late_s: Sequence[float], deadline_s: float, now_s: float) -> bool:
    """Return whether the wait of a freeze is over; `late_s` contains the last arrival of each late
    rank.
    """
    if not late_s or now_s >= deadline_s + MAX_LATENESS_S:
        return True
    return now_s >= deadline_s and now_s - max(late_s) > LATE_STEP_S

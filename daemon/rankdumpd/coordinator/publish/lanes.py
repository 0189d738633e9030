"""Puts what overlaps on one stream into lanes of their own, as a trace viewer needs it. Pure.

Within a lane slices follow each other; of operators, which call operators, one may also lie
within the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.publish.blocks import rows

_MAX_NESTED = 16
"""Lanes of nested slices per track; what fits into none of them is drawn over others."""


def apart(track: Column, start_us: Column, end_us: Column) -> Column:
    """Return a lane for each slice, the lowest of its track where it overlaps no other."""
    lanes = np.zeros(len(track), "i4")
    of, used = -1, 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for at, number, start, end in _by_start(track, start_us, end_us):
        if number != of:
            of, free, busy, used = number, [], [], 0
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(used)
            used += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        lanes[at] = lane
    return lanes


def nested(track: Column, start_us: Column, end_us: Column) -> Column:
    """Return a lane for each slice, the lowest of its track where it nests."""
    lanes = np.zeros(len(track), "i4")
    of = -1
    ends: list[list[int]] = [[]]
    for at, number, start, end in _by_start(track, start_us, end_us):
        if number != of:
            of = number
            ends = [[]]
        lanes[at] = lane = _fitting(ends, start, end)
        ends[lane].append(end)
    return lanes


def _fitting(ends: list[list[int]], start: int, end: int) -> int:
    for lane, around in enumerate(ends):
        while around and around[-1] <= start:
            around.pop()
        if not around or end <= around[-1]:
            return lane
    if len(ends) < _MAX_NESTED:
        ends.append([])
    return len(ends) - 1


def _by_start(track: Column, start_us: Column, end_us: Column) -> Iterator[tuple[int, ...]]:
    """Yield number, track, start and end of each slice; one that holds another goes first."""
    order = np.lexsort((-end_us, start_us, track))
    return rows(order, track[order], start_us[order], end_us[order])

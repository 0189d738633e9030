"""Differences between clocks, computed from the times at which members leave a collective, and the
correction of event times. Pure.

In a collective that combines or exchanges the data of all members, no member leaves before the last
one has arrived, and then all leave at about the same moment. So the end times of its members show
how far their clocks differ at that place of the program. A clock that is set in the middle of an
iteration is noticed at the next collective.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rankdump._core.events import EventColumn, EventKind
from rankdumpd.coordinator.merge.call_order import (
    CallMatch,
    CallOrder,
    map_members_to_calls,
    mark_changes,
)
from rankdumpd.coordinator.merge.event_table import EventTable

_SYNCHRONIZING_KINDS = (
    EventKind.ALL_REDUCE,
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.ALL_TO_ALL,
    EventKind.BARRIER,
)
"""Kinds of collectives that no member leaves before all have arrived."""
_WINDOW = 5
_NOISE_FACTOR = 3
"""A difference between clocks counts if it exceeds the median step between exits by this factor."""
_MIN_DIFFERENCE_US = 100
"""Difference in microseconds up to which clocks count as equal, because members leave a collective
with such differences anyway.
"""
_FEW_EXITS_US = 100_000
"""Threshold in microseconds that is used if there are too few exits for a median step."""


@dataclass(frozen=True, slots=True, eq=False)
class ClockCorrection:
    """Microseconds to add to the times of a clock, by place in the order of the calls."""

    places: EventColumn
    """Places of the calls at which the clock was compared, in rising order."""
    levels: EventColumn
    """Correction that applies from the end of each of these calls on."""

    def find_levels(self, places: EventColumn) -> EventColumn:
        """Return the corrections at these places; the first level also applies before its place."""
        found = np.searchsorted(self.places, places, side="right") - 1
        return self.levels[np.maximum(found, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class _GroupExits:
    """Times at which the clocks of a group left its collectives, given by the first member of each
    clock.
    """

    place: EventColumn
    clock: EventColumn
    end_us: EventColumn


def find_clock_corrections(
    table: EventTable, match: CallMatch, order: CallOrder, clocks: Mapping[int, str]
) -> dict[str, ClockCorrection]:
    """Return the corrections of the clocks that differ from the others.

    The median of the clocks in the group with the most exits defines the time. Clocks outside this
    group are compared in further groups with clocks whose correction is already known.
    """
    names = sorted({name_rank_clock(rank, clocks) for rank in table.ranks})
    groups = _collect_exits(table, match, order, _number_clocks(table, clocks, names))
    known: dict[int, ClockCorrection] = {}
    for exits in _order_by_connection(groups, known):
        usable, residual = _compute_residuals(exits, known)
        for clock in np.unique(exits.clock[usable]).tolist():
            own = usable & (exits.clock == clock)
            known[clock] = ClockCorrection(exits.place[own], _compute_levels(residual[own]))
    return {names[clock]: found for clock, found in sorted(known.items()) if found.levels.any()}


def _compute_residuals(
    exits: _GroupExits, known: Mapping[int, ClockCorrection]
) -> tuple[EventColumn, EventColumn]:
    """Return which exits measure a clock that is not known yet, and how far that clock is off.

    The reference is given by the known clocks of the group; by all its clocks if none is known.
    """
    new = np.array([clock not in known for clock in exits.clock.tolist()])
    corrections = np.zeros(len(exits.end_us), "i8")
    for clock in np.unique(exits.clock[~new]).tolist():
        own = exits.clock == clock
        corrections[own] = known[clock].find_levels(exits.place[own])
    measured = new if new.all() else ~new
    ends = exits.end_us + corrections
    places, middles = _compute_middles(exits.place[measured], ends[measured])
    found = np.searchsorted(places, exits.place).clip(0, len(places) - 1)
    return new & (places[found] == exits.place), middles[found] - exits.end_us


def name_rank_clock(rank: int, clocks: Mapping[int, str]) -> str:
    """Return the name of the clock that a rank reads; a name of its own if no report tells the
    clock.
    """
    return clocks.get(rank, f"rank {rank}")


def find_comparable_calls(table: EventTable, match: CallMatch) -> EventColumn:
    """Return for each call whether all its members leave it at the same time."""
    blocking = table.members["end_position"] == table.members["position"]
    kinds = np.isin(table.members["kind"], _SYNCHRONIZING_KINDS)
    if not len(match):
        return np.zeros(0, dtype=bool)
    return np.logical_and.reduceat((blocking & kinds)[match.members], match.bounds[:-1])


def _number_clocks(table: EventTable, clocks: Mapping[int, str], names: list[str]) -> EventColumn:
    """Return the number of the clock that each member reads."""
    number = {name: at for at, name in enumerate(names)}
    counts = [own.stop - own.start for own in table.member_ranks.values()]
    return np.repeat([number[name_rank_clock(rank, clocks)] for rank in table.member_ranks], counts)


def _collect_exits(
    table: EventTable, match: CallMatch, order: CallOrder, clocks: EventColumn
) -> list[_GroupExits]:
    """Return the exits of every group whose members have several clocks."""
    calls = np.repeat(np.arange(len(match)), np.diff(match.bounds))
    together = find_comparable_calls(table, match)[calls]
    members, place = match.members[together], order.index[calls[together]]
    group, clock = table.members["group"][members], clocks[members]
    end_us = table["end_us"][table.members["row"][members]]
    by_group = np.lexsort((clock, place, group))
    group, place, clock, end_us = (each[by_group] for each in (group, place, clock, end_us))
    starts = _find_run_starts(place, clock)
    if not len(starts):
        return []
    end_us = np.minimum.reduceat(end_us, starts)
    group, place, clock = group[starts], place[starts], clock[starts]
    firsts = _find_run_starts(place)
    several = np.repeat(
        np.diff(np.append(firsts, len(place))) > 1, np.diff(np.append(firsts, len(place)))
    )
    group, place, clock, end_us = (each[several] for each in (group, place, clock, end_us))
    edges = np.append(_find_run_starts(group), len(group)).tolist()
    spans = [slice(low, high) for low, high in itertools.pairwise(edges)]
    return [_GroupExits(place[span], clock[span], end_us[span]) for span in spans]


def _find_run_starts(*keys: EventColumn) -> EventColumn:
    return np.flatnonzero(mark_changes(keys))


def _order_by_connection(
    groups: list[_GroupExits], known: Mapping[int, ClockCorrection]
) -> Iterable[_GroupExits]:
    """Yield groups with unknown clocks, each after the groups that connect its clocks to known
    ones.
    """
    clocks = [np.unique(exits.clock).tolist() for exits in groups]
    of_clock: dict[int, list[int]] = {}
    for group, own in enumerate(clocks):
        for clock in own:
            of_clock.setdefault(clock, []).append(group)
    visited: set[int] = set()
    for seed in sorted(range(len(groups)), key=lambda group: -len(groups[group].place)):
        queue = [] if seed in visited else [(0, seed)]
        while queue:
            group = heapq.heappop(queue)[1]
            if group in visited:
                continue
            visited.add(group)
            fresh = [clock for clock in clocks[group] if clock not in known]
            if fresh:
                yield groups[group]
            for clock in clocks[group]:
                for other in of_clock.pop(clock, ()):
                    heapq.heappush(queue, (-len(groups[other].place), other))


def _compute_middles(places: EventColumn, ends: EventColumn) -> tuple[EventColumn, EventColumn]:
    """Return each place once, with the median of its end times; of two middle ones the later one.

    The median and not the mean is used, because a clock that was set must not affect the others.
    """
    order = np.lexsort((ends, places))
    places, ends = places[order], ends[order]
    starts = _find_run_starts(places)
    counts = np.diff(np.append(starts, len(places)))
    return places[starts], ends[starts + counts // 2]


def _compute_levels(residual: EventColumn) -> EventColumn:
    """Return the correction from each exit on: constant, with a step where the change exceeds the
    noise.
    """
    edge = np.pad(residual, _WINDOW // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(edge, _WINDOW)
    smooth = np.sort(windows, axis=1)[:, _WINDOW // 2]
    noise = _FEW_EXITS_US
    if len(residual) >= _WINDOW:
        noise = max(_MIN_DIFFERENCE_US, _NOISE_FACTOR * int(np.median(np.abs(np.diff(residual)))))
    levels: list[int] = []
    level = 0
    for value in smooth.tolist():
        level = value if abs(value - level) > noise else level
        levels.append(level)
    return np.array(levels, "i8")


def correct_times(
    table: EventTable,
    match: CallMatch,
    order: CallOrder,
    corrections: Mapping[str, ClockCorrection],
    clocks: Mapping[int, str],
) -> EventTable:
    """Return the table with corrected times."""
    columns = dict(table.columns)
    for field in ("start_us", "end_us", "time_us"):
        columns[field] = columns[field].copy()
    calls = map_members_to_calls(match)
    places, together = order.index[calls], find_comparable_calls(table, match)[calls]
    for rank, rows in table.ranks.items():
        correction = corrections.get(name_rank_clock(rank, clocks))
        if correction is None:
            continue
        own = table.member_ranks[rank]
        exits = np.flatnonzero(together[own])
        compared = exits[np.isin(places[own][exits], correction.places)]
        exits = compared if len(compared) else exits
        own_rows = table.members["row"][own][exits] - rows.start
        part = {field: column[rows] for field, column in columns.items()}
        _correct_rank_times(part, own_rows, correction.find_levels(places[own][exits]))
        np.maximum.accumulate(part["start_us"], out=part["time_us"])
    return replace(table, columns=columns)


def _correct_rank_times(
    part: dict[str, EventColumn], exits: EventColumn, levels: EventColumn
) -> None:
    """Correct the times of a rank in place; each of `levels` applies from the end of
    its exit on.
    """
    if not len(exits):
        return
    start_us, end_us = part["start_us"], part["end_us"]
    before = _compute_start_corrections(start_us, end_us, exits, levels)
    last = np.searchsorted(part["position"], part["end_position"], side="right") - 1
    after = before[last]
    after[exits] = levels
    # If the clock was set during an event, the correction that fits the end of the event is used.
    following = np.append(before[1:], before[-1])
    torn = np.flatnonzero((following != before) & (last == np.arange(len(last))))
    torn = torn[~np.isin(torn, exits)]
    ends = end_us[torn] + before[torn]
    limit = np.append(start_us, start_us[-1:])[torn + 1] + following[torn]
    wrong = (ends < start_us[torn] + before[torn]) | (ends > limit)
    after[torn[wrong]] = following[torn[wrong]]
    start_us += before
    end_us += after


def _compute_start_corrections(
    start_us: EventColumn, end_us: EventColumn, exits: EventColumn, levels: EventColumn
) -> EventColumn:
    """Return the correction of each start time; between two exits the correction changes where the
    clock jumped.
    """
    changes = np.flatnonzero(np.diff(levels))
    found = np.full(len(start_us), levels[0])
    for at in changes.tolist():
        low, high = int(exits[at]), int(exits[at + 1])
        stamps = np.concatenate(
            (end_us[low : low + 1], start_us[low + 1 : high + 1], end_us[high : high + 1])
        )
        jump = int(levels[at]) - int(levels[at + 1])
        step = int(np.argmin(np.abs(np.diff(stamps) - jump)))
        found[low + 1 + step :] = levels[at + 1]
    return found

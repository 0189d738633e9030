"""Clock differences, found by when members leave a collective together, and the correction of event
times. Pure.

Nobody leaves a collective that combines or exchanges what all members bring before the last
member has come, and then all leave at about the same moment. So the ends of its members tell how
far their clocks are apart at that place of the program: a clock that is set in the middle of an
iteration is seen from the next collective on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rankdump._core.events import EventColumn, EventKind
from rankdumpd.coordinator.merge.call_order import CallMatch, CallOrder, map_members_to_calls
from rankdumpd.coordinator.merge.event_table import EventTable

_SYNCHRONIZING_KINDS = (
    EventKind.ALL_REDUCE,
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.ALL_TO_ALL,
    EventKind.BARRIER,
)
"""Kinds that no member leaves before all have come."""
_WINDOW = 5
_NOISE_FACTOR = 3
"""How many usual steps from one exit to the next a difference has to be before it counts."""
_MIN_DIFFERENCE_US = 100
"""What never counts: so far apart members leave a collective anyway."""
_FEW_EXITS_US = 100_000
"""What counts when there are too few exits to know how they usually differ."""


@dataclass(frozen=True, slots=True, eq=False)
class ClockCorrection:
    """What is added to the times of a clock, from one place among the calls to the next."""

    places: EventColumn
    """Of the calls at which the clock was compared, rising."""
    levels: EventColumn
    """Microseconds, from the end of each of those calls on."""

    def levels_at(self, places: EventColumn) -> EventColumn:
        """Return what holds at some places; before the first it is what the first one says."""
        found = np.searchsorted(self.places, places, side="right") - 1
        return self.levels[np.maximum(found, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class _GroupExits:
    """When the clocks in a group left its collectives: the first member that reads each."""

    place: EventColumn
    clock: EventColumn
    end_us: EventColumn


def find_clock_corrections(
    table: EventTable, match: CallMatch, sequence: CallOrder, clocks: Mapping[int, str]
) -> dict[str, ClockCorrection]:
    """Return what is to be added to the clocks that differ from the others; none that do not.

    The group with the most exits says what the time is, by the middle one of its clocks. Further
    groups tell the clocks that are not in it, by those of their clocks that are known already.
    """
    names = sorted({name_rank_clock(rank, clocks) for rank in table.ranks})
    groups = _collect_exits(table, match, sequence, _clock_numbers(table, clocks, names))
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
    """Return which exits tell something of a clock that is not known yet, and how far it is off.

    Those of the known clocks measure it; where none is known, all measure each other.
    """
    new = np.array([clock not in known for clock in exits.clock.tolist()])
    corrections = np.zeros(len(exits.end_us), "i8")
    for clock in np.unique(exits.clock[~new]).tolist():
        own = exits.clock == clock
        corrections[own] = known[clock].levels_at(exits.place[own])
    measured = new if new.all() else ~new
    ends = exits.end_us + corrections
    places, middles = _compute_middles(exits.place[measured], ends[measured])
    found = np.searchsorted(places, exits.place).clip(0, len(places) - 1)
    return new & (places[found] == exits.place), middles[found] - exits.end_us


def name_rank_clock(rank: int, clocks: Mapping[int, str]) -> str:
    """Return the clock that a rank reads: one of its own when nothing is known of it."""
    return clocks.get(rank, f"rank {rank}")


def find_comparable_calls(table: EventTable, match: CallMatch) -> EventColumn:
    """Return the calls that all members leave together."""
    blocking = table.members["end_position"] == table.members["position"]
    kinds = np.isin(table.members["kind"], _SYNCHRONIZING_KINDS)
    if not len(match):
        return np.zeros(0, dtype=bool)
    return np.logical_and.reduceat((blocking & kinds)[match.members], match.bounds[:-1])


def _clock_numbers(table: EventTable, clocks: Mapping[int, str], names: list[str]) -> EventColumn:
    """Return the number of the clock that each member reads."""
    number = {name: at for at, name in enumerate(names)}
    counts = [own.stop - own.start for own in table.member_ranks.values()]
    return np.repeat([number[name_rank_clock(rank, clocks)] for rank in table.member_ranks], counts)


def _collect_exits(
    table: EventTable, match: CallMatch, sequence: CallOrder, clocks: EventColumn
) -> list[_GroupExits]:
    """Return the exits of every group that has several clocks in it."""
    calls = np.repeat(np.arange(len(match)), np.diff(match.bounds))
    together = find_comparable_calls(table, match)[calls]
    members, place = match.members[together], sequence.index[calls[together]]
    group, clock = table.members["group"][members], clocks[members]
    end_us = table["end_us"][table.members["row"][members]]
    order = np.lexsort((clock, place, group))
    group, place, clock, end_us = (each[order] for each in (group, place, clock, end_us))
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
    """Return where an element differs from the one before."""
    changes = np.ones(len(keys[0]), dtype=bool)
    if len(changes):
        changes[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(changes)


def _order_by_connection(
    groups: list[_GroupExits], known: Mapping[int, ClockCorrection]
) -> Iterable[_GroupExits]:
    """Yield groups with clocks that are not known yet, after those that connect them."""
    clocks = [np.unique(exits.clock).tolist() for exits in groups]
    of_clock: dict[int, list[int]] = {}
    for group, own in enumerate(clocks):
        for clock in own:
            of_clock.setdefault(clock, []).append(group)
    begun: set[int] = set()
    for seed in sorted(range(len(groups)), key=lambda group: -len(groups[group].place)):
        waiting = [] if seed in begun else [(0, seed)]
        while waiting:
            group = heapq.heappop(waiting)[1]
            if group in begun:
                continue
            begun.add(group)
            fresh = [clock for clock in clocks[group] if clock not in known]
            if fresh:
                yield groups[group]
            for clock in clocks[group]:
                for other in of_clock.pop(clock, ()):
                    heapq.heappush(waiting, (-len(groups[other].place), other))


def _compute_middles(places: EventColumn, ends: EventColumn) -> tuple[EventColumn, EventColumn]:
    """Return the places once, and the middle end of each; of two the later one.

    A time of one of the clocks, and not a mean: a clock that was set must not move the others.
    """
    order = np.lexsort((ends, places))
    places, ends = places[order], ends[order]
    starts = _find_run_starts(places)
    counts = np.diff(np.append(starts, len(places)))
    return places[starts], ends[starts + counts // 2]


def _compute_levels(residual: EventColumn) -> EventColumn:
    """Return the correction from each exit on: steps where it leaves its noise, else level."""
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
    sequence: CallOrder,
    corrections: Mapping[str, ClockCorrection],
    clocks: Mapping[int, str],
) -> EventTable:
    """Return the table with corrected times."""
    columns = dict(table.columns)
    for field in ("start_us", "end_us", "time_us"):
        columns[field] = columns[field].copy()
    calls = map_members_to_calls(match)
    places, together = sequence.index[calls], find_comparable_calls(table, match)[calls]
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
        _correct_rank_times(part, own_rows, correction.levels_at(places[own][exits]))
        np.maximum.accumulate(part["start_us"], out=part["time_us"])
    return replace(table, columns=columns)


def _correct_rank_times(
    part: dict[str, EventColumn], exits: EventColumn, levels: EventColumn
) -> None:
    """Correct the times of a rank in place; `levels` hold from those rows' ends on."""
    if not len(exits):
        return
    start_us, end_us = part["start_us"], part["end_us"]
    before = _compute_start_corrections(start_us, end_us, exits, levels)
    last = np.searchsorted(part["position"], part["end_position"], side="right") - 1
    after = before[last]
    after[exits] = levels
    # An event that the clock was set in: of both sides the one on which its end is right.
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
    """Return what to add to each start: between two exits the step is where the clock jumped."""
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

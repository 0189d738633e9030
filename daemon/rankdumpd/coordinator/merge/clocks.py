"""Finds how far clocks are apart, by when members leave a collective together. Pure.

Nobody leaves a collective that combines or exchanges what all members bring before the last of
them has come, and then they leave at about the same moment. So the ends of its members tell how
far their clocks are apart, at that place of the program: a clock that is set in the middle of an
iteration is seen from the next collective on.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table

_TOGETHER = (
    EventKind.ALL_REDUCE,
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.ALL_TO_ALL,
    EventKind.BARRIER,
)
"""Kinds that no member leaves before all have come."""
_WINDOW = 5
_NOISE = 3
"""How many usual steps from one exit to the next a difference has to be before it counts."""
_LEAST_US = 100
"""What never counts: so far apart members leave a collective anyway."""
_FEW_EXITS_US = 100_000
"""What counts when there are too few exits to know how they usually differ."""


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What is added to the times of a clock, from one place among the calls to the next."""

    places: Column
    """Of the calls at which the clock was compared, rising."""
    levels: Column
    """Microseconds, from the end of each of those calls on."""

    def at(self, places: Column) -> Column:
        """Return what holds at some places; before the first it is what the first one says."""
        found = np.searchsorted(self.places, places, side="right") - 1
        return self.levels[np.maximum(found, 0)]


@dataclass(frozen=True, slots=True, eq=False)
class _Exits:
    """When the clocks in a group left its collectives: the first member that reads each."""

    place: Column
    clock: Column
    end_us: Column


def corrections(
    table: Table, match: Match, sequence: CallOrder, clocks: Mapping[int, str]
) -> dict[str, Correction]:
    """Return what is to be added to the clocks that differ from the others; none that do not.

    The group with the most exits says what the time is, by the middle one of its clocks. Further
    groups tell the clocks that are not in it, by those of their clocks that are known already.
    """
    names = sorted({clock_of(rank, clocks) for rank in table.ranks})
    groups = _exits(table, match, sequence, _clock_numbers(table, clocks, names))
    known: dict[int, Correction] = {}
    for exits in _by_connection(groups, known):
        usable, residual = _residuals(exits, known)
        for clock in np.unique(exits.clock[usable]).tolist():
            own = usable & (exits.clock == clock)
            known[clock] = Correction(exits.place[own], _levels(residual[own]))
    return {names[clock]: found for clock, found in sorted(known.items()) if found.levels.any()}


def _residuals(exits: _Exits, known: Mapping[int, Correction]) -> tuple[Column, Column]:
    """Return which exits tell something of a clock that is not known yet, and how far it is off.

    Those of the known clocks measure it; where none is known, all measure each other.
    """
    new = np.array([clock not in known for clock in exits.clock.tolist()])
    corrections = np.zeros(len(exits.end_us), "i8")
    for clock in np.unique(exits.clock[~new]).tolist():
        own = exits.clock == clock
        corrections[own] = known[clock].at(exits.place[own])
    measured = new if new.all() else ~new
    ends = exits.end_us + corrections
    places, middles = _middles(exits.place[measured], ends[measured])
    found = np.searchsorted(places, exits.place).clip(0, len(places) - 1)
    return new & (places[found] == exits.place), middles[found] - exits.end_us


def clock_of(rank: int, clocks: Mapping[int, str]) -> str:
    """Return the clock that a rank reads: one of its own when nothing is known of it."""
    return clocks.get(rank, f"rank {rank}")


def comparable(table: Table, match: Match) -> Column:
    """Return the calls that all members leave together."""
    blocking = table.members["end_position"] == table.members["position"]
    kinds = np.isin(table.members["kind"], _TOGETHER)
    if not len(match):
        return np.zeros(0, dtype=bool)
    return np.logical_and.reduceat((blocking & kinds)[match.members], match.bounds[:-1])


def _clock_numbers(table: Table, clocks: Mapping[int, str], names: list[str]) -> Column:
    """Return the number of the clock that each member reads."""
    number = {name: at for at, name in enumerate(names)}
    counts = [own.stop - own.start for own in table.member_ranks.values()]
    return np.repeat([number[clock_of(rank, clocks)] for rank in table.member_ranks], counts)


def _exits(table: Table, match: Match, sequence: CallOrder, clocks: Column) -> list[_Exits]:
    """Return the exits of every group that has several clocks in it."""
    calls = np.repeat(np.arange(len(match)), np.diff(match.bounds))
    together = comparable(table, match)[calls]
    members, place = match.members[together], sequence.index[calls[together]]
    group, clock = table.members["group"][members], clocks[members]
    end_us = table["end_us"][table.members["row"][members]]
    order = np.lexsort((clock, place, group))
    group, place, clock, end_us = (each[order] for each in (group, place, clock, end_us))
    starts = _starts(place, clock)
    if not len(starts):
        return []
    end_us = np.minimum.reduceat(end_us, starts)
    group, place, clock = group[starts], place[starts], clock[starts]
    firsts = _starts(place)
    several = np.repeat(
        np.diff(np.append(firsts, len(place))) > 1, np.diff(np.append(firsts, len(place)))
    )
    group, place, clock, end_us = (each[several] for each in (group, place, clock, end_us))
    edges = np.append(_starts(group), len(group)).tolist()
    spans = [slice(low, high) for low, high in itertools.pairwise(edges)]
    return [_Exits(place[span], clock[span], end_us[span]) for span in spans]


def _starts(*keys: Column) -> Column:
    """Return where an element differs from the one before."""
    changes = np.ones(len(keys[0]), dtype=bool)
    if len(changes):
        changes[1:] = np.logical_or.reduce([key[1:] != key[:-1] for key in keys])
    return np.flatnonzero(changes)


def _by_connection(groups: list[_Exits], known: Mapping[int, Correction]) -> Iterable[_Exits]:
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


def _middles(places: Column, ends: Column) -> tuple[Column, Column]:
    """Return the places once, and the middle end of each; of two the later one.

    A time of one of the clocks, and not a mean: a clock that was set must not move the others.
    """
    order = np.lexsort((ends, places))
    places, ends = places[order], ends[order]
    starts = _starts(places)
    counts = np.diff(np.append(starts, len(places)))
    return places[starts], ends[starts + counts // 2]


def _levels(residual: Column) -> Column:
    """Return the correction from each exit on: steps where it leaves its noise, else level."""
    edge = np.pad(residual, _WINDOW // 2, mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(edge, _WINDOW)
    smooth = np.sort(windows, axis=1)[:, _WINDOW // 2]
    noise = _FEW_EXITS_US
    if len(residual) >= _WINDOW:
        noise = max(_LEAST_US, _NOISE * int(np.median(np.abs(np.diff(residual)))))
    levels: list[int] = []
    level = 0
    for value in smooth.tolist():
        level = value if abs(value - level) > noise else level
        levels.append(level)
    return np.array(levels, "i8")

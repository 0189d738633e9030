"""Corrects the times of a rank by what its clock was found to be off. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.merge.clocks import Correction, clock_of, comparable
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder, calls_of_members
from rankdumpd.coordinator.merge.table import Table


def shifted(
    table: Table,
    match: Match,
    sequence: CallOrder,
    corrections: Mapping[str, Correction],
    clocks: Mapping[int, str],
) -> Table:
    """Return the table with corrected times."""
    columns = dict(table.columns)
    for field in ("start_us", "end_us", "time_us"):
        columns[field] = columns[field].copy()
    calls = calls_of_members(match)
    places, together = sequence.index[calls], comparable(table, match)[calls]
    for rank, rows in table.ranks.items():
        correction = corrections.get(clock_of(rank, clocks))
        if correction is None:
            continue
        own = table.member_ranks[rank]
        exits = np.flatnonzero(together[own])
        compared = exits[np.isin(places[own][exits], correction.places)]
        exits = compared if len(compared) else exits
        own_rows = table.members["row"][own][exits] - rows.start
        part = {field: column[rows] for field, column in columns.items()}
        _shift(part, own_rows, correction.at(places[own][exits]))
        np.maximum.accumulate(part["start_us"], out=part["time_us"])
    return replace(table, columns=columns)


def _shift(part: dict[str, Column], exits: Column, levels: Column) -> None:
    """Correct the times of a rank in place; `levels` hold from those rows' ends on."""
    if not len(exits):
        return
    start_us, end_us = part["start_us"], part["end_us"]
    before = _before_each_start(start_us, end_us, exits, levels)
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


def _before_each_start(start_us: Column, end_us: Column, exits: Column, levels: Column) -> Column:
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

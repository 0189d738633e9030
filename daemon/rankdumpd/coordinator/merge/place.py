"""Puts every operator among the ordered collectives and messages, in columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankdump.contract.events import OPEN, Column, EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.runs import Runs, merged_runs
from rankdumpd.coordinator.merge.sequence import CallOrder, calls_of_members
from rankdumpd.coordinator.merge.table import NEVER, Table
from rankdumpd.coordinator.values import Calls

_LINE = ("graph", "name", "start_us", "end_us", "stream", "position")
_EDGE = 1 << 62
"""Times beyond it are one: there has to be room for the number of a call."""


def placed(table: Table, match: Match, sequence: CallOrder) -> dict[str, Column]:
    """Return the columns of the merged order, one element per line."""
    runs, row_of = _runs(table, match, sequence)
    count = len(runs.keys)
    columns = {field: np.empty(count, table[field].dtype) for field in _LINE}
    columns |= {"call": np.empty(count, "i4"), "rank": np.empty(count, "u4")}
    # The calls are the run before those of the ranks.
    rank_of_run = np.array([0, *table.ranks], "u4")
    rank_of_call = table.members["rank"][match.first[sequence.order]]
    low = 0
    for elements, order, run in merged_runs(runs):
        lines = slice(low, low + len(elements))
        rows = row_of[elements]
        for field in _LINE:
            # Read along the runs and sorted then: memory is not walked at random.
            columns[field][lines] = table[field][rows][order]
        element = elements[order]
        called = np.flatnonzero(run == 0)
        columns["call"][lines] = -1
        columns["call"][lines][called] = element[called]
        columns["rank"][lines] = rank_of_run[run]
        columns["rank"][lines][called] = rank_of_call[element[called]]
        low = lines.stop
    return columns


def _runs(table: Table, match: Match, sequence: CallOrder) -> tuple[Runs, Column]:
    """Return what to sort, the calls before the operators of each rank; and the row of each.

    The key is the time plus the number of calls that stand before. It sorts by that number and
    then by time: what stands before a call is not younger than it, nor older what stands after.
    """
    height = len(match) + len(table["kind"]) - len(table.members["row"])
    keys, row_of = np.empty(height, "i8"), np.empty(height, "i8")
    bounds = [0, len(match)]
    keys[: len(match)] = np.clip(sequence.time_us, -_EDGE, _EDGE) + np.arange(1, len(match) + 1)
    row_of[: len(match)] = table.members["row"][match.first[sequence.order]]
    index = sequence.index[calls_of_members(match)]
    # Before the first call there is none, and after the last one nothing has to wait.
    ages = np.concatenate(([np.iinfo("i8").min], sequence.time_us, [np.iinfo("i8").max]))
    for rank, rows in table.ranks.items():
        operators = np.flatnonzero(table["kind"][rows] == int(EventKind.OPERATOR))
        before, time_us = _bounded(table, rank, index, ages)
        run = slice(bounds[-1], bounds[-1] + len(operators))
        np.clip(time_us, -_EDGE, _EDGE, out=time_us)
        time_us += before
        keys[run] = time_us[operators]
        row_of[run] = operators + rows.start
        bounds.append(run.stop)
    return Runs(keys, np.array(bounds)), row_of


def _bounded(table: Table, rank: int, index: Column, ages: Column) -> tuple[Column, Column]:
    """Return for each row of a rank how many calls stand before it, and its time.

    The last of them is the last call complete before it on its rank, or a later one that is
    older by time: every call that the row must precede has at least the row's time.
    """
    rows, own = table.ranks[rank], table.member_ranks[rank]
    ends = table.members["end_position"][own]
    by_end = np.argsort(ends, kind="stable")
    before = np.append(0, np.maximum.accumulate(index[own][by_end]) + 1)
    position = table["position"][rows]
    starts = np.searchsorted(position, ends[by_end], side="right")
    lengths = np.diff(np.concatenate(([0], starts, [len(position)])))
    time_us = np.maximum(table["time_us"][rows], np.repeat(ages[before], lengths))
    young = np.flatnonzero(time_us > np.repeat(ages[before + 1], lengths))
    before = np.repeat(before, lengths)
    before[young] = np.searchsorted(ages[1:-1], time_us[young], side="left")
    return before, time_us


def ordered_calls(
    table: Table, match: Match, sequence: CallOrder, missing: Mapping[int, tuple[int, ...]]
) -> Calls:
    """Return the calls and their members in the order found."""
    sizes = np.diff(match.bounds)[sequence.order]
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype("i8")
    starts = match.bounds[:-1][sequence.order]
    members = match.members[np.repeat(starts - bounds[:-1], sizes) + np.arange(len(match.members))]
    said = {field: column[members] for field, column in table.members.items()}
    rows = said["row"]
    said |= {
        field: table[field][rows] for field in ("graph", "name", "start_us", "end_us", "stream")
    }
    said["end_position"][said["end_position"] == NEVER] = OPEN
    first = bounds[:-1]
    columns = {field: said[field][first] for field in _FIRST}
    some = bool(len(match))
    for field, extreme in (("start_us", np.minimum), ("end_us", np.maximum)):
        columns[field] = extreme.reduceat(said[field], first) if some else said[field]
    return Calls(
        columns=columns,
        bounds=bounds,
        members={field: said[field] for field in _MEMBER},
        missing={int(sequence.index[call]): ranks for call, ranks in missing.items()},
    )


_FIRST = ("graph", "name", "kind", "group", "sequence", "element_count", "dtype", "peer")
_MEMBER = (
    "rank",
    "start_us",
    "end_us",
    "position",
    "end_position",
    "stream",
    "stall_us",
    "peer",
)

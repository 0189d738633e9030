"""Puts every operator among the ordered collectives and messages, in columns. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.values import Calls


def placed(table: Table, match: Match, sequence: CallOrder) -> dict[str, Column]:
    """Return the columns of the merged order, one element per line."""
    rows = np.flatnonzero(table["kind"] == int(EventKind.OPERATOR))
    slot, time_us = _slots(table, match, sequence)
    slot, time_us = slot[rows], time_us[rows]
    # The rows come rank by rank in program order, and the sort is stable: so ties are settled.
    order = np.lexsort((time_us, slot))
    rows, slot = rows[order], slot[order]
    calls = np.arange(len(match))
    operator_lines = np.arange(len(rows)) + slot + 1
    call_lines = calls + np.searchsorted(slot, calls, side="left")

    first = match.first_rows[sequence.order]
    row_of_line = np.empty(len(rows) + len(calls), dtype="i8")
    row_of_line[operator_lines], row_of_line[call_lines] = rows, first
    call_of_line = np.full(len(row_of_line), -1, dtype="i8")
    call_of_line[call_lines] = calls
    fields = ("graph", "name", "rank", "start_us", "end_us", "stream", "position")
    return {"call": call_of_line, **{field: table[field][row_of_line] for field in fields}}


def _slots(table: Table, match: Match, sequence: CallOrder) -> tuple[Column, Column]:
    """Return for each row the last call that stands before it, or -1; and the row's time.

    That is the last call complete before it on its rank, or a later one that is older by time:
    every call the row must precede has at least the row's time.
    """
    slot = np.full(len(table["position"]), -1, dtype="i8")
    time_us: Column = np.array(table["time_us"])
    if not len(match):
        return slot, time_us
    index_of_row = np.full(len(slot), -1, dtype="i8")
    index_of_row[match.rows] = np.repeat(sequence.index, np.diff(match.bounds))
    for span in table.ranks.values():
        index = index_of_row[span]
        own = np.flatnonzero(index >= 0)
        ends = table["end_position"][span][own]
        by_end = np.argsort(ends, kind="stable")
        latest = np.maximum.accumulate(np.concatenate(([-1], index[own][by_end])))
        slot[span] = latest[np.searchsorted(ends[by_end], table["position"][span], side="left")]
    bound = slot >= 0
    time_us[bound] = np.maximum(time_us[bound], sequence.time_us[slot[bound]])
    older = np.searchsorted(sequence.time_us, time_us, side="left") - 1
    return np.maximum(slot, older), time_us


def ordered_calls(
    table: Table, match: Match, sequence: CallOrder, missing: Mapping[int, tuple[int, ...]]
) -> Calls:
    """Return the calls and their members in the order found."""
    sizes = np.diff(match.bounds)[sequence.order]
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype("i8")
    starts = match.bounds[:-1][sequence.order]
    rows = match.rows[np.repeat(starts - bounds[:-1], sizes) + np.arange(len(match.rows))]
    first = rows[bounds[:-1]]
    fields = ("graph", "name", "kind", "group", "sequence")
    columns = {field: table[field][first] for field in fields}
    start_us, end_us = table["start_us"][rows], table["end_us"][rows]
    some = bool(len(match))
    columns["start_us"] = np.minimum.reduceat(start_us, bounds[:-1]) if some else start_us
    columns["end_us"] = np.maximum.reduceat(end_us, bounds[:-1]) if some else end_us
    return Calls(
        columns=columns,
        bounds=bounds,
        members={field: table[field][rows] for field in _MEMBER},
        missing={int(sequence.index[call]): ranks for call, ranks in missing.items()},
    )


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

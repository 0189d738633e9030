"""Merge of one iteration: operators are placed among the ordered calls, and all findings are
collected. Pure: no clock, no I/O.

The order follows these rules; where they leave it open, time decides:

1. the operators of a rank are in the order in which they started;
2. a collective or message comes after all events that its members started before it, and
   before all events that they started after it was complete; events that start in between may
   be on either side. Of two collectives on one rank, the first one comes first only if it was
   complete before the second one started. No event has to follow a call that is not complete;
3. a send comes before its receive;
4. the rest is ordered by `start_us`, corrected by the exits from collectives
   (`clock_correction`) and never falling on a rank. The time of a collective is the start of the
   last event that a member started before the collective was complete.

Rule 4 is exact: where the time of an entry is the latest among itself and all entries that must
precede it, the entries are sorted by that time; operators with the same time by (rank, position).

A rank may have ended before it ended its session: findings say where in its program it ended, and
in which calls it did not take part. Where its last events may be missing, nothing is stated about
the calls after them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankdump._core.events import (
    OPEN_END_POSITION,
    UNSEEN_REASON_TEXTS,
    CallOutcome,
    EventColumn,
    EventColumns,
    EventKind,
    Finding,
    FindingKind,
)
from rankdump._core.number_ranges import name_first_ranks
from rankdumpd.coordinator.fleet_views import GlobalOrder, IterationView, OrderedCalls
from rankdumpd.coordinator.merge.absence_findings import (
    CallAbsences,
    build_absence_findings,
    build_call_finding,
    build_cycle_findings,
    build_deadlock_findings,
    build_gap_findings,
    describe_call,
    find_event_gaps,
    find_missing_members,
    list_ended_ranks,
)
from rankdumpd.coordinator.merge.call_order import (
    CallMatch,
    CallOrder,
    map_members_to_calls,
    match_calls,
    order_calls,
)
from rankdumpd.coordinator.merge.clock_correction import correct_times, find_clock_corrections
from rankdumpd.coordinator.merge.difference_findings import (
    build_difference_findings,
    build_program_findings,
)
from rankdumpd.coordinator.merge.event_table import NEVER_ENDED, EventTable, build_event_table

_STRETCH_ELEMENTS = 1 << 17
"""Approximate number of elements that are sorted together. The rows that they refer to then stay in
the processor's cache, so the cost of an element does not depend on the number of runs.
"""
_SAMPLES = 64
"""Number of elements of a stretch that are sampled to find where it ends."""


@dataclass(frozen=True, slots=True, eq=False)
class SortedRuns:
    """Several runs of rising keys, one after the other."""

    keys: EventColumn
    bounds: EventColumn
    """Run i has the elements `bounds[i]` to `bounds[i + 1]`."""


def merge_runs(runs: SortedRuns) -> Iterator[tuple[EventColumn, EventColumn, EventColumn]]:
    """Yield all elements sorted by their keys; elements with equal keys are in the order of their
    runs.

    Each item is a stretch of the result: its elements run by run, the order that sorts them, and
    the run of each element in that order.
    """
    cuts = _find_cuts(runs)
    for low, high in itertools.pairwise(cuts):
        lengths = high - low
        starts = np.cumsum(lengths) - lengths
        total = int(lengths.sum())
        elements = np.repeat(low - starts, lengths) + np.arange(total)
        order = _sort_stable(runs.keys[elements])
        yield elements, order, np.repeat(np.arange(len(lengths)), lengths)[order]


def _find_cuts(runs: SortedRuns) -> list[EventColumn]:
    """Return for each stretch the position in each run where it begins, and where the last one
    ends.
    """
    spacing = _STRETCH_ELEMENTS // _SAMPLES
    samples = np.sort(runs.keys[::spacing])
    pivots = samples[_SAMPLES::_SAMPLES]
    cuts = np.empty((len(pivots) + 2, len(runs.bounds) - 1), "i8")
    cuts[0], cuts[-1] = runs.bounds[:-1], runs.bounds[1:]
    for run, (low, high) in enumerate(zip(runs.bounds[:-1], runs.bounds[1:], strict=True)):
        cuts[1:-1, run] = low + np.searchsorted(runs.keys[low:high], pivots, side="left")
    return list(cuts)


def _sort_stable(keys: EventColumn) -> EventColumn:
    """Return the order that sorts the keys and keeps equal keys in place."""
    if not len(keys):
        return np.empty(0, "i8")
    low, high = int(keys.min()), int(keys.max())
    bits = (len(keys) - 1).bit_length()
    if (high - low) >> (63 - bits):
        return np.argsort(keys, kind="stable")
    # `sort` is faster than `argsort`, so each key has its place in its low bits. The stable
    # algorithm is used because it profits from runs.
    packed = ((keys - low) << bits) | np.arange(len(keys))
    packed.sort(kind="stable")
    return packed & ((1 << bits) - 1)


_LINE_FIELDS = ("graph", "name", "start_us", "end_us", "stream", "position")
_MAX_TIME_US = 1 << 62
"""Times are limited to this number of microseconds, so that the number of a call can be added."""


def place_operators(
    table: EventTable, match: CallMatch, order: CallOrder
) -> dict[str, EventColumn]:
    """Return the columns of the merged order, one element per line."""
    runs, row_of = _build_runs(table, match, order)
    count = len(runs.keys)
    columns = {field: np.empty(count, table[field].dtype) for field in _LINE_FIELDS}
    columns |= {"call": np.empty(count, "i4"), "rank": np.empty(count, "u4")}
    # Run 0 has the calls; every other run has the operators of one rank.
    rank_of_run = np.array([0, *table.ranks], "u4")
    rank_of_call = table.members["rank"][match.first[order.calls]]
    low = 0
    for elements, by_key, run in merge_runs(runs):
        lines = slice(low, low + len(elements))
        rows = row_of[elements]
        for field in _LINE_FIELDS:
            # Read run by run and sorted afterwards, which avoids random access to memory.
            columns[field][lines] = table[field][rows][by_key]
        element = elements[by_key]
        called = np.flatnonzero(run == 0)
        columns["call"][lines] = -1
        columns["call"][lines][called] = element[called]
        columns["rank"][lines] = rank_of_run[run]
        columns["rank"][lines][called] = rank_of_call[element[called]]
        low = lines.stop
    return columns


def _build_runs(
    table: EventTable, match: CallMatch, order: CallOrder
) -> tuple[SortedRuns, EventColumn]:
    """Return the runs to sort, first the calls, then the operators of each rank, and the rows of
    all.

    A key is the time plus the number of calls that come before. Sorting by it sorts by this number
    and then by time, because entries before a call are never younger than the call, and entries
    after it never older.
    """
    height = len(match) + len(table["kind"]) - len(table.members["row"])
    keys, row_of = np.empty(height, "i8"), np.empty(height, "i8")
    bounds = [0, len(match)]
    keys[: len(match)] = np.clip(order.time_us, -_MAX_TIME_US, _MAX_TIME_US) + np.arange(
        1, len(match) + 1
    )
    row_of[: len(match)] = table.members["row"][match.first[order.calls]]
    index = order.index[map_members_to_calls(match)]
    # Limits for rows before the first call and after the last one.
    ages = np.concatenate(([np.iinfo("i8").min], order.time_us, [np.iinfo("i8").max]))
    for rank, rows in table.ranks.items():
        operators = np.flatnonzero(table["kind"][rows] == int(EventKind.OPERATOR))
        before, time_us = _bound_rows(table, rank, index, ages)
        run = slice(bounds[-1], bounds[-1] + len(operators))
        np.clip(time_us, -_MAX_TIME_US, _MAX_TIME_US, out=time_us)
        time_us += before
        keys[run] = time_us[operators]
        row_of[run] = operators + rows.start
        bounds.append(run.stop)
    return SortedRuns(keys, np.array(bounds)), row_of


def _bound_rows(
    table: EventTable, rank: int, index: EventColumn, ages: EventColumn
) -> tuple[EventColumn, EventColumn]:
    """Return for each row of a rank how many calls come before it, and its time.

    The last of these calls is the last one that was complete before the row on its rank, or a later
    call that is older by time. No call that the row must precede can be older than the row.
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


def collect_ordered_calls(
    table: EventTable, match: CallMatch, order: CallOrder, missing: Mapping[int, tuple[int, ...]]
) -> OrderedCalls:
    """Return the calls with their members, from first to last."""
    sizes = np.diff(match.bounds)[order.calls]
    bounds = np.concatenate(([0], np.cumsum(sizes))).astype("i8")
    starts = match.bounds[:-1][order.calls]
    members = match.members[np.repeat(starts - bounds[:-1], sizes) + np.arange(len(match.members))]
    fields = {field: column[members] for field, column in table.members.items()}
    rows = fields["row"]
    fields |= {
        field: table[field][rows] for field in ("graph", "name", "start_us", "end_us", "stream")
    }
    fields["end_position"][fields["end_position"] == NEVER_ENDED] = OPEN_END_POSITION
    first = bounds[:-1]
    columns = {field: fields[field][first] for field in _CALL_FIELDS}
    some = bool(len(match))
    for field, extreme in (("start_us", np.minimum), ("end_us", np.maximum)):
        columns[field] = extreme.reduceat(fields[field], first) if some else fields[field]
    return OrderedCalls(
        columns=columns,
        bounds=bounds,
        members={field: fields[field] for field in _MEMBER_FIELDS},
        missing={int(order.index[call]): ranks for call, ranks in missing.items()},
    )


_CALL_FIELDS = ("graph", "name", "kind", "group", "sequence", "element_count", "dtype", "peer")
_MEMBER_FIELDS = (
    "rank",
    "start_us",
    "end_us",
    "position",
    "end_position",
    "stream",
    "stall_us",
    "peer",
)


def merge_iteration(view: IterationView) -> GlobalOrder:
    """Return the order of one iteration; ranks that the plan excludes never count as missing."""
    table = build_event_table(view.events)
    match = match_calls(table)
    order = order_calls(table, match)
    corrections = find_clock_corrections(table, match, order, view.clocks)
    if corrections:
        table = correct_times(table, match, order, corrections, view.clocks)
        order = order_calls(table, match)
    gaps = find_event_gaps(table, view)
    missing = find_missing_members(table, match, order, gaps, view.excluded)
    absence = CallAbsences.analyze(table, match, missing)
    findings = (
        *_build_conflict_findings(table),
        *build_unseen_findings(view.events),
        *build_gap_findings(gaps),
        *build_difference_findings(table, match, order),
        *build_ended_findings(table, match, absence, view),
        *build_absence_findings(table, match, absence, view),
        *build_deadlock_findings(table, match, absence),
        *build_cycle_findings(table, match, order),
        *build_program_findings(table, gaps, view),
    )
    return GlobalOrder(
        iteration=view.iteration,
        names=table.names,
        groups=table.groups,
        columns=place_operators(table, match, order),
        calls=collect_ordered_calls(table, match, order, missing),
        findings=tuple(_add_iteration(finding, view) for finding in findings),
        skews={clock: int(correction.levels[-1]) for clock, correction in corrections.items()},
        attempt=view.attempt,
    )


def _build_conflict_findings(table: EventTable) -> Iterator[Finding]:
    for rank, positions in table.conflicts.items():
        first, *others = positions
        more = f" and {len(others)} more positions" if others else ""
        yield Finding(
            kind=FindingKind.CONFLICT,
            iteration=0,
            text=f"rank {rank} reported two different events at position {first}{more}",
            ranks=(rank,),
            position=first,
        )


def _add_iteration(finding: Finding, view: IterationView) -> Finding:
    return replace(
        finding,
        iteration=view.iteration,
        text=f"iteration {view.iteration}: {finding.text}",
        provisional=view.provisional,
        attempt=view.attempt,
    )


_RanksByCase = dict[tuple[str, str, int], list[int]]
"""Ranks by group, reason and number of collectives."""


def build_unseen_findings(events: Mapping[int, Sequence[EventColumns]]) -> Iterator[Finding]:
    """Yield a finding for each group, reason and number of collectives that were not observed."""
    for (group, reason, count), ranks in sorted(_collect_cases(events).items()):
        where = f" of group {group!r}" if group else ""
        number = f"{count} " if count else ""
        one = count == 1
        why = UNSEEN_REASON_TEXTS.get(reason, f"the reason is {reason!r}")
        yield Finding(
            kind=FindingKind.COLLECTIVES_NOT_SEEN,
            iteration=0,
            text=f"{number}collective{'' if one else 's'}{where} on {name_first_ranks(ranks)} "
            f"{'is' if one else 'are'} not in the order: {why}",
            ranks=tuple(ranks),
            group=group,
        )


def _collect_cases(events: Mapping[int, Sequence[EventColumns]]) -> _RanksByCase:
    cases: _RanksByCase = {}
    for rank in sorted(events):
        counts: Counter[tuple[str, str]] = Counter()
        for each in (each for batch in events[rank] for each in batch.unseen):
            counts[each.group, each.reason] += each.count
        for (group, reason), count in counts.items():
            cases.setdefault((group, reason, count), []).append(rank)
    return cases


def build_ended_findings(
    table: EventTable, match: CallMatch, absence: CallAbsences, view: IterationView
) -> Iterator[Finding]:
    """Yield a finding for each rank that ended within the iteration or is missing because of that,
    unless another iteration has a finding about its end. The rank that ended first comes first.
    """
    missed = collect_missed_calls(absence, view)
    ended = [
        rank
        for rank in list_ended_ranks(view)
        if rank not in view.ends_reported_elsewhere
        and (rank in table.ranks or rank in missed or _is_expected(table, view, rank))
    ]
    for rank in sorted(ended, key=lambda rank: (_find_last_time(table, rank), rank)):
        calls = missed.get(rank, ())
        first = find_first_missed(calls, absence) if calls else None
        described = None if first is None else describe_call(table, match, first)
        where, last = _describe_end(table, match, rank)
        if view.lost[rank]:
            text = f"the process of rank {rank} ended {where}, without ending its session"
        else:
            text = (
                f"the session of rank {rank} was lost {where} or later: its last events may be "
                "missing, and no absence is reported behind those that arrived"
            )
        if described is not None:
            others = f" and {len(calls) - 1} more after it" if len(calls) > 1 else ""
            failed = "" if first is None else _describe_failure(table, match, first)
            text += f"; it never arrived at {described.text}{others}{failed}"
        yield build_call_finding(FindingKind.ENDED_RANK, text, described, ranks=(rank,), last=last)


def collect_missed_calls(absence: CallAbsences, view: IterationView) -> Mapping[int, Sequence[int]]:
    """Return the calls at which each ended rank did not arrive, in their order."""
    ended = set(list_ended_ranks(view))
    missed: dict[int, list[int]] = {}
    for call, ranks in absence.missing.items():
        for rank in ended.intersection(ranks):
            missed.setdefault(rank, []).append(call)
    return missed


def find_first_missed(calls: Sequence[int], absence: CallAbsences) -> int:
    """Return the call that a rank would have executed first among the calls that it missed.

    If another member that misses a call waits in a second one, it would execute the second call
    first, and so would this rank. Arrival times do not show this order, because members of the
    later call may arrive first.
    """
    for call in calls:
        before = {absence.waiting.get(rank, call) for rank in absence.missing[call]} - {call}
        if before.isdisjoint(calls):
            return call
    return calls[0]


def _is_expected(table: EventTable, view: IterationView, rank: int) -> bool:
    """Return whether a rank whose last events are not known is a member of any group."""
    return not view.lost[rank] and any(rank in group.ranks for group in table.groups)


def _find_last_time(table: EventTable, rank: int) -> int:
    """Return the start of a rank's last event; 0 for a rank without events."""
    return int(table["time_us"][table.ranks[rank].stop - 1]) if rank in table.ranks else 0


def _describe_end(table: EventTable, match: CallMatch, rank: int) -> tuple[str, tuple[str, int]]:
    """Return where in its program a rank ended, with the name and position of its last event."""
    if rank not in table.ranks:
        return "before this iteration", ("", -1)
    row = table.ranks[rank].stop - 1
    name, position = table.name(row), int(table["position"][row])
    within = "within" if table["end_position"][row] == NEVER_ENDED else "after"
    if int(table["kind"][row]) == int(EventKind.OPERATOR):
        return f"{within} {name!r} at position {position}", (name, position)
    member = table.member_ranks[rank].stop - 1
    call = int(map_members_to_calls(match)[member])
    if table.members["outcome"][member] == CallOutcome.FAILED:
        within = "after the failure of"
    return f"{within} {describe_call(table, match, call).text}", (name, position)


def _describe_failure(table: EventTable, match: CallMatch, call: int) -> str:
    """Return the end of a sentence with the members on which a call failed; empty if it failed on
    none.
    """
    members = match.list_members(call)
    failed = [m for m in members if table.members["outcome"][m] == CallOutcome.FAILED]
    if not failed:
        return ""
    return f", which failed on {name_first_ranks(table.members['rank'][failed].tolist())}"

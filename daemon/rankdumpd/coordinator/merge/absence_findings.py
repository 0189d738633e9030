"""Findings about members that did not take part: lost events, missing members of collectives and
messages, and cycles of calls that wait for each other; and the texts that describe calls and ranks
in findings. Pure. Where events were lost, no absence is reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump._core.events import (
    CallOutcome,
    EventColumn,
    EventKind,
    Finding,
    FindingKind,
    ProcessGroup,
)
from rankdump._core.number_ranges import name_first_ranks
from rankdumpd.coordinator.fleet_views import DEADLOCK_TEXT, IterationView
from rankdumpd.coordinator.merge.call_order import CallMatch, CallOrder, map_members_to_calls
from rankdumpd.coordinator.merge.event_table import NEVER_ENDED, EventTable

PositionRange = tuple[int, int]
"""First and last of several consecutive positions."""


@dataclass(frozen=True, slots=True)
class EventGaps:
    """Positions in the program of each rank whose events were lost."""

    holes: Mapping[int, tuple[PositionRange, ...]]
    """Position ranges of each rank that has lost events, in rising order."""
    open_ranks: frozenset[int] = frozenset()
    """Ranks whose last events may be missing as well."""

    def has_hole_between(self, rank: int, low: int, high: int) -> bool:
        """Return whether a rank has lost events between two of its positions."""
        return any(first < high and last > low for first, last in self.holes.get(rank, ()))


def list_ended_ranks(view: IterationView) -> list[int]:
    """Return the ranks that ended before they had finished the iteration."""
    return sorted(
        view.lost.keys() - view.spans.keys() - view.excluded - view.ranks_in_later_iteration
    )


def is_unfinished(view: IterationView, rank: int) -> bool:
    """Return whether a rank may still execute a part of the iteration."""
    if rank in view.spans or rank in view.ranks_in_later_iteration:
        return False
    return view.provisional or rank in view.late or view.late_count > len(view.late)


def find_event_gaps(table: EventTable, view: IterationView) -> EventGaps:
    """Return the lost positions of each rank.

    If a rank has not reported which positions belong to the iteration, the positions that are
    missing between its events count as lost; while the iteration runs, their events may still
    arrive.
    """
    holes: dict[int, tuple[PositionRange, ...]] = {}
    for rank in sorted({*table.ranks, *view.spans}):
        span = view.spans.get(rank, (0, 0))
        over = not view.provisional or view.lost.get(rank, False)
        if span != (0, 0) or (rank in table.ranks and over):
            positions = table["position"][table.ranks.get(rank, slice(0, 0))]
            found = _find_holes(positions, span)
            if found:
                holes[rank] = found
    open_ranks = {rank for rank, is_known in view.lost.items() if not is_known}
    return EventGaps(holes, frozenset(open_ranks - view.spans.keys() - view.excluded))


def _find_holes(positions: EventColumn, span: PositionRange) -> tuple[PositionRange, ...]:
    if span != (0, 0):
        low = np.searchsorted(positions, np.array(span[0], positions.dtype), side="left")
        high = np.searchsorted(positions, np.array(span[1], positions.dtype), side="right")
        positions = positions[low:high]
    if not len(positions):
        return (span,) if span != (0, 0) and span[0] <= span[1] else ()
    ends = (int(positions[0]), int(positions[-1]))
    first, last = span if span != (0, 0) else ends
    if last - first + 1 == len(positions):
        return ()
    before = np.flatnonzero(np.diff(positions) > 1)
    lows, highs = positions[before].tolist(), positions[before + 1].tolist()
    inner = [(low + 1, high - 1) for low, high in zip(lows, highs, strict=True)]
    head = [(first, ends[0] - 1)] if first < ends[0] else []
    tail = [(ends[1] + 1, last)] if last > ends[1] else []
    return (*head, *inner, *tail)


def build_gap_findings(gaps: EventGaps) -> Iterator[Finding]:
    """Yield a finding for each rank that has lost events, with their number and position range."""
    for rank, holes in gaps.holes.items():
        count = sum(last - first + 1 for first, last in holes)
        first, last = holes[0][0], holes[-1][1]
        events = f"{count} events" if count != 1 else "1 event"
        where = f"between positions {first} and {last}" if last > first else f"at position {first}"
        split = f", in {len(holes)} gaps" if len(holes) > 1 else ""
        yield Finding(
            kind=FindingKind.GAP,
            iteration=0,
            text=f"{events} of rank {rank} {'was' if count == 1 else 'were'} lost "
            f"{where} of its program{split}: no absence is reported where they were",
            ranks=(rank,),
            position=first,
        )


@dataclass(frozen=True, slots=True)
class CallDescription:
    """Description of a call as a text and as the fields of a finding."""

    text: str
    """Text with the call's number, its group and its ranks."""
    group: ProcessGroup
    sequence: int
    name: str
    position: int
    """Position of the call in the program of the lowest rank that took part."""


def describe_call(table: EventTable, match: CallMatch, call: int) -> CallDescription:
    """Return the description of a call."""
    members = match.list_members(call)
    fields = ("kind", "group", "sequence", "row", "rank", "peer", "position")
    first = {field: int(table.members[field][members[0]]) for field in fields}
    kind, group = EventKind(first["kind"]), table.groups[first["group"]]
    rank, peer, number = first["rank"], first["peer"], first["sequence"]
    name = table.name(first["row"])
    if kind is EventKind.SEND:
        whose = f" from rank {rank} to rank {peer}"
    elif kind is EventKind.RECV:
        whose = f" from rank {peer} on rank {rank}"
    else:
        whose = f" ({name_first_ranks(group.ranks or table.members['rank'][members].tolist())})"
    text = f"{kind.name.lower()} {name!r} number {number} of group {group.name!r}{whose}"
    return CallDescription(text, group, number, name, first["position"])


def build_call_finding(
    kind: FindingKind,
    text: str,
    call: CallDescription | None,
    *,
    ranks: tuple[int, ...],
    last: tuple[str, int] | None = None,
) -> Finding:
    """Return a finding about a call, or about no particular call.

    `last` names another operator and position than those of the call. `merge_iteration` sets the
    iteration of all findings, and whether they are provisional.
    """
    name, position = last or ((call.name, call.position) if call else ("", -1))
    return Finding(
        kind=kind,
        iteration=0,
        text=text,
        ranks=ranks,
        group=call.group.name if call else "",
        sequence=call.sequence if call else -1,
        name=name,
        position=position,
    )


MissingMembers = Mapping[int, tuple[int, ...]]
"""Missing ranks of each call that has any."""


def find_waiting_ranks(table: EventTable, match: CallMatch) -> dict[int, int]:
    """Return the call that each rank waits in, which is the rank's last event if it is not
    complete.
    """
    calls = map_members_to_calls(match)
    waiting: dict[int, int] = {}
    for rank, own in table.member_ranks.items():
        last = own.stop - 1
        if own.stop == own.start or table.members["end_position"][last] != NEVER_ENDED:
            continue
        if table.members["row"][last] == table.ranks[rank].stop - 1:
            waiting[rank] = int(calls[last])
    return waiting


def find_standing_cycles(
    missing: MissingMembers, waiting: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Return cycles of calls, each without a rank that waits in the next call of the cycle."""
    after = {
        call: {waiting[rank] for rank in ranks if rank in waiting}
        for call, ranks in missing.items()
        if call in waiting.values()
    }
    cycles: list[tuple[int, ...]] = []
    while _prune_dead_ends(after):
        path: dict[int, None] = {}
        call = min(after)
        while call not in path:
            path[call] = None
            call = min(after[call])
        steps = list(path)
        cycles.append(tuple(steps[steps.index(call) :]))
        for each in cycles[-1]:
            del after[each]
    return cycles


def _prune_dead_ends(after: dict[int, set[int]]) -> bool:
    """Remove all calls that do not lead to a cycle; return whether any call is left."""
    while True:
        for followers in after.values():
            followers.intersection_update(after)
        ends = [call for call, followers in after.items() if not followers]
        for call in ends:
            del after[call]
        if not ends:
            return bool(after)


def build_cycle_findings(
    table: EventTable, match: CallMatch, order: CallOrder
) -> Iterator[Finding]:
    """Yield a finding for each cycle of calls that have ended, with the call that comes first in
    the order.
    """
    for cycle in order.cycles:
        yield _build_cycle_finding(table, match, order, cycle)


def _build_cycle_finding(
    table: EventTable, match: CallMatch, order: CallOrder, cycle: tuple[int, ...]
) -> Finding:
    steps = "; then ".join(describe_call(table, match, call).text for call in (*cycle, cycle[0]))
    first = describe_call(table, match, min(cycle, key=order.index.__getitem__))
    members = [member for call in cycle for member in match.list_members(call)]
    return build_call_finding(
        FindingKind.CYCLE,
        f"ranks wait for each other in a circle: {steps}; "
        f"the oldest goes first in the order: {first.text}",
        first,
        ranks=tuple(sorted(set(table.members["rank"][members].tolist()))),
    )


_SILENT_RANK = -1


@dataclass(frozen=True, slots=True)
class CallAbsences:
    """Missing members of calls, the calls that these members wait in, and the cycles among those
    calls.
    """

    missing: MissingMembers
    waiting: Mapping[int, int]
    """The call that each rank waits in."""
    cycles: Sequence[tuple[int, ...]]
    """Cycles of calls that wait for each other and cannot continue."""

    @staticmethod
    def analyze(table: EventTable, match: CallMatch, missing: MissingMembers) -> CallAbsences:
        """Return the missing members with the calls that they wait in, and the cycles of these
        calls.
        """
        waiting = find_waiting_ranks(table, match)
        return CallAbsences(missing, waiting, find_standing_cycles(missing, waiting))

    def iter_missing(self) -> Iterator[tuple[int, int]]:
        """Yield each call with each of its missing ranks, unless a cycle explains the absence."""
        cycle_of = {call: cycle for cycle in self.cycles for call in cycle}
        for call, ranks in self.missing.items():
            for rank in ranks:
                if call not in cycle_of or self.waiting.get(rank) not in cycle_of[call]:
                    yield call, rank


def find_missing_members(
    table: EventTable,
    match: CallMatch,
    order: CallOrder,
    gaps: EventGaps,
    excluded: frozenset[int],
) -> MissingMembers:
    """Return the missing ranks of each call that has any, in the order of the calls."""
    group = table.members["group"][match.first]
    sizes = np.array([len(set(each.ranks) - excluded) for each in table.groups], dtype="i8")
    alone = ~match.collective & (match.send_of < 0)
    alone[match.send_of[match.send_of >= 0]] = False
    suspect = alone | (match.collective & (np.diff(match.bounds) != sizes[group]))
    suspect &= ~_find_complete_calls(table, match)
    missing: dict[int, tuple[int, ...]] = {}
    for call in order.calls[suspect[order.calls]].tolist():
        members = match.list_members(call)
        if alone[call]:
            gone = {int(table.members["peer"][members[0]])}
        else:
            gone = set(table.groups[int(group[call])].ranks)
            gone.difference_update(table.members["rank"][members].tolist())
        known = [
            rank for rank in gone - excluded if not _may_be_lost(table, gaps, rank, members[0])
        ]
        if known:
            missing[call] = tuple(sorted(known))
    return missing


_JOINT_KINDS = (
    EventKind.ALL_REDUCE,
    EventKind.ALL_GATHER,
    EventKind.REDUCE_SCATTER,
    EventKind.BARRIER,
)
"""Kinds of collectives that no member can complete before every member has entered them."""


def _find_complete_calls(table: EventTable, match: CallMatch) -> EventColumn:
    """Return for each call whether all its members are known to have entered it.

    A call that raised an error, or that only returned to the host, says nothing about its other
    members.
    """
    if not len(match):
        return np.empty(0, dtype=bool)
    complete = (table.members["outcome"] == CallOutcome.COMPLETE) & np.isin(
        table.members["kind"], _JOINT_KINDS
    )
    return np.logical_or.reduceat(complete[match.members], match.bounds[:-1])


def _may_be_lost(table: EventTable, gaps: EventGaps, rank: int, member: int) -> bool:
    """Return whether the lost events of a rank may include its part in the call of `member`.

    Sequence numbers rise along a program, so the rank's part is between its calls with the next
    lower and the next higher number.
    """
    if rank not in gaps.holes and rank not in gaps.open_ranks:
        return False
    own = table.member_ranks.get(rank, slice(0, 0))
    part = {field: table.members[field][own] for field in _MEMBER_FIELDS}
    here = {field: int(table.members[field][member]) for field in _MEMBER_FIELDS}
    same = part["group"] == here["group"]
    other_end = EventKind(here["kind"]).other_end
    if here["peer"] >= 0 and other_end:
        there = int(table.members["rank"][member])
        same &= (part["kind"] == other_end) & (part["peer"] == there)
    else:
        same &= ~np.isin(part["kind"], (EventKind.SEND, EventKind.RECV))
    below = part["position"][same & (part["sequence"] < here["sequence"])]
    above = part["position"][same & (part["sequence"] > here["sequence"])]
    if rank in gaps.open_ranks and not len(above):
        return True
    low = int(below.max()) if len(below) else -1
    return gaps.has_hole_between(rank, low, int(above.min()) if len(above) else NEVER_ENDED)


_MEMBER_FIELDS = ("group", "sequence", "kind", "peer", "position")


def build_absence_findings(
    table: EventTable, match: CallMatch, absence: CallAbsences, view: IterationView
) -> Iterator[Finding]:
    """Yield a finding for each missing rank and group, with the first call and the number of
    others.

    Ranks that have ended get findings of their own (`build_ended_findings`).
    """
    calls: dict[tuple[int, int, bool], list[int]] = {}
    ended = set(list_ended_ranks(view))
    for call, rank in absence.iter_missing():
        if rank in ended:
            continue
        group = int(table.members["group"][match.first[call]])
        key = (rank, group, bool(match.collective[call]))
        calls.setdefault(key if rank in table.ranks else (rank, _SILENT_RANK, True), []).append(
            call
        )
    for (rank, group, collective), missed in calls.items():
        described = describe_call(table, match, missed[0])
        more = f" and {len(missed) - 1} more after it" if len(missed) > 1 else ""
        if group == _SILENT_RANK:
            text = f"{_describe_silence(rank, view)} but is expected in {described.text}{more}"
            yield build_call_finding(FindingKind.SILENT_RANK, text, described, ranks=(rank,))
        else:
            last, did = _describe_last_operator(table, rank)
            if rank in absence.waiting:
                did += (
                    f", and it waits in {describe_call(table, match, absence.waiting[rank]).text}"
                )
            elif rank in view.raised:
                did += f", and an error ended it in iteration {view.raised[rank]}"
            kind, text = _describe_absence(
                rank, described.text + more, collective=collective, view=view
            )
            yield build_call_finding(kind, f"{text}; {did}", described, ranks=(rank,), last=last)


def _describe_silence(rank: int, view: IterationView) -> str:
    if rank in view.raised:
        return f"rank {rank} ended with an error in iteration {view.raised[rank]}"
    return f"rank {rank} reported nothing{' so far' if view.provisional else ''}"


def _describe_absence(
    rank: int, call: str, *, collective: bool, view: IterationView
) -> tuple[FindingKind, str]:
    """Return the finding kind and text for a missing rank that executed other operators."""
    if view.provisional:
        arrived, end = "has not arrived so far at", "has no counterpart so far"
    elif is_unfinished(view, rank):
        # The deadline has passed, and whether the rank arrived later is not known.
        arrived, end = "had not arrived in time at", "had no counterpart in time"
    else:
        arrived, end = "never arrived at", "has no counterpart"
    if collective:
        return FindingKind.MISSING_MEMBER, f"rank {rank} {arrived} {call}"
    return FindingKind.LONE_MESSAGE, f"{call} {end} on rank {rank}"


def _describe_last_operator(table: EventTable, rank: int) -> tuple[tuple[str, int], str]:
    """Return name and position of a rank's last operator, and a sentence about it."""
    span = table.ranks[rank]
    operators: EventColumn = np.flatnonzero(table["kind"][span] == int(EventKind.OPERATOR))
    if not len(operators):
        return ("", -1), "it executed no operator"
    row = span.start + int(operators[-1])
    name, position = table.name(row), int(table["position"][row])
    return (name, position), f"its last operator is {name!r} at position {position}"


_SHOWN_PATH_PARTS = 2


def build_deadlock_findings(
    table: EventTable, match: CallMatch, absence: CallAbsences
) -> Iterator[Finding]:
    """Yield a finding for each cycle of calls that cannot end."""
    for cycle in absence.cycles:
        after = (*cycle[1:], cycle[0])
        late = [
            _find_late_ranks(absence, call, following)
            for call, following in zip(cycle, after, strict=True)
        ]
        waiting = [late[-1], *late[:-1]]
        # The sentence begins with the lowest rank, so that its text stays the same.
        start = min(range(len(cycle)), key=lambda at: waiting[at])
        order = [*range(start, len(cycle)), *range(start)]
        steps = [_describe_wait(table, match, cycle[at], waiting[at]) for at in order]
        waited_for = ", which ".join(
            f"{verb} for {name_first_ranks(late[at])}"
            for at, verb in zip(order, steps, strict=True)
        )
        first = describe_call(table, match, cycle[start])
        ranks = tuple(sorted({rank for each in waiting for rank in each}))
        who = name_first_ranks(waiting[start])
        text = f"{DEADLOCK_TEXT}{who} {waited_for}; none of them can continue"
        yield build_call_finding(FindingKind.CYCLE, text, first, ranks=ranks)


def _find_late_ranks(absence: CallAbsences, call: int, following: int) -> tuple[int, ...]:
    """Return the ranks that are missing in a call and wait in the following one."""
    return tuple(r for r in absence.missing[call] if absence.waiting.get(r) == following)


def _describe_wait(table: EventTable, match: CallMatch, call: int, ranks: tuple[int, ...]) -> str:
    """Return the predicate of a sentence about the wait of these ranks in a call."""
    members = match.list_members(call)
    own = [at for at in members if int(table.members["rank"][at]) in ranks]
    sources = (table.names[int(table.members["source"][at])] for at in own)
    lines = dict.fromkeys(map(shorten_source, sources))
    described = describe_call(table, match, call)
    kind = EventKind(int(table.members["kind"][members[0]])).name.lower()
    where = ", ".join(filter(None, (f"{kind} number {described.sequence}", *lines)))
    return f"wait{'s' * (len(ranks) == 1)} in group {described.group.name!r} ({where})"


def shorten_source(source: str) -> str:
    """Return a `file:line` with only the last parts of its path.

    >>> shorten_source("/home/me/jobs/train.py:24")
    'jobs/train.py:24'
    """
    return "/".join(source.split("/")[-_SHOWN_PATH_PARTS:])

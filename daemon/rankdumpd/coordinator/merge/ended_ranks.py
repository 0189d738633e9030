"""Findings about ranks that ended before they ended their session: where in their program, and what
they did not take part in. Pure. Where the last events of such a rank may be missing, nothing is
stated about the calls behind them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rankdump._core.collective_calls import describe_ranks
from rankdump._core.events import CallOutcome, EventKind, Finding, FindingKind
from rankdumpd.coordinator.fleet_views import IterationView
from rankdumpd.coordinator.merge.absence_findings import (
    CallAbsences,
    CallDescription,
    describe_call,
    list_ended_ranks,
)
from rankdumpd.coordinator.merge.call_order import CallMatch, map_members_to_calls
from rankdumpd.coordinator.merge.event_table import NEVER_ENDED, EventTable


def build_ended_findings(
    table: EventTable, match: CallMatch, absence: CallAbsences, view: IterationView
) -> Iterator[Finding]:
    """Yield a finding for each rank that ended within the iteration or is missing because of it.

    The rank that ended first comes first.
    """
    missed = collect_missed_calls(absence, view)
    ended = [
        rank
        for rank in list_ended_ranks(view)
        if rank in table.ranks or rank in missed or _is_expected(table, view, rank)
    ]
    for rank in sorted(ended, key=lambda rank: (_find_last_time(table, rank), rank)):
        calls = missed.get(rank, ())
        first = find_first_missed(calls, absence) if calls else None
        described = None if first is None else describe_call(table, match, first)
        where, name, position = _describe_end(table, match, rank)
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
        yield _make_finding(rank, text, described, (name, position))


def collect_missed_calls(absence: CallAbsences, view: IterationView) -> Mapping[int, Sequence[int]]:
    """Return the calls that each rank that ended did not arrive at, in their order."""
    ended = set(list_ended_ranks(view))
    missed: dict[int, list[int]] = {}
    for call, ranks in absence.missing.items():
        for rank in ended.intersection(ranks):
            missed.setdefault(rank, []).append(call)
    return missed


def find_first_missed(calls: Sequence[int], absence: CallAbsences) -> int:
    """Return the first of a rank's missed calls that it would have executed.

    A call comes behind another one in which a member waits that it misses as well: that member
    executes both, in the same order. Times of arrival do not tell it, as members of the later call
    may arrive there first.
    """
    for call in calls:
        before = {absence.waiting.get(rank, call) for rank in absence.missing[call]} - {call}
        if before.isdisjoint(calls):
            return call
    return calls[0]


def _is_expected(table: EventTable, view: IterationView, rank: int) -> bool:
    """Return whether others called a rank of which it is not known what it did last."""
    return not view.lost[rank] and any(rank in group.ranks for group in table.groups)


def _find_last_time(table: EventTable, rank: int) -> int:
    """Return the start of the last event of a rank; 0 for one that ended before."""
    return int(table["time_us"][table.ranks[rank].stop - 1]) if rank in table.ranks else 0


def _describe_end(table: EventTable, match: CallMatch, rank: int) -> tuple[str, str, int]:
    """Return where a rank ended, with name and position of its last event."""
    if rank not in table.ranks:
        return "before this iteration", "", -1
    row = table.ranks[rank].stop - 1
    name, position = table.name(row), int(table["position"][row])
    within = "within" if table["end_position"][row] == NEVER_ENDED else "after"
    if int(table["kind"][row]) == int(EventKind.OPERATOR):
        return f"{within} {name!r} at position {position}", name, position
    member = table.member_ranks[rank].stop - 1
    call = int(map_members_to_calls(match)[member])
    if table.members["outcome"][member] == CallOutcome.FAILED:
        within = "after the failure of"
    return f"{within} {describe_call(table, match, call).text}", name, position


def _describe_failure(table: EventTable, match: CallMatch, call: int) -> str:
    """Return on which members a call failed, as the end of a sentence; empty for none."""
    members = match.list_members(call)
    failed = [m for m in members if table.members["outcome"][m] == CallOutcome.FAILED]
    if not failed:
        return ""
    return f", which failed on {describe_ranks(table.members['rank'][failed].tolist())}"


def _make_finding(
    rank: int, text: str, missed: CallDescription | None, last: tuple[str, int]
) -> Finding:
    name, position = last
    return Finding(
        kind=FindingKind.ENDED_RANK,
        iteration=0,
        text=text,
        ranks=(rank,),
        group="" if missed is None else missed.group.name,
        sequence=-1 if missed is None else missed.sequence,
        name=name,
        position=position,
    )

"""Finds who should have taken part in a collective or message and did not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.gaps import Gaps, unfinished
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import NEVER, Table
from rankdumpd.coordinator.merge.waits import Missing, standing_circles, waiting_ranks
from rankdumpd.coordinator.merge.wording import call_finding, call_words
from rankdumpd.coordinator.values import IterationView

_SILENT = -1


@dataclass(frozen=True, slots=True)
class Absence:
    """Who is missing, and what holds them up."""

    missing: Missing
    waiting: Mapping[int, int]
    """The call that a rank waits in."""
    circles: Sequence[tuple[int, ...]]
    """Calls that wait for each other and go on waiting."""

    @staticmethod
    def of(table: Table, match: Match, missing: Missing) -> Absence:
        """Return what holds the missing up."""
        waiting = waiting_ranks(table, match)
        return Absence(missing, waiting, standing_circles(missing, waiting))

    def claims(self) -> Iterator[tuple[int, int]]:
        """Yield each call with each rank that it misses, unless a circle already says so."""
        circle_of = {call: circle for circle in self.circles for call in circle}
        for call, ranks in self.missing.items():
            for rank in ranks:
                if call not in circle_of or self.waiting.get(rank) not in circle_of[call]:
                    yield call, rank


def missing_members(
    table: Table, match: Match, sequence: CallOrder, gaps: Gaps, excluded: frozenset[int]
) -> Missing:
    """Return the missing ranks of each call that misses any, in the order of the calls."""
    group = table.members["group"][match.first]
    sizes = np.array([len(set(each.ranks) - excluded) for each in table.groups], dtype="i8")
    alone = ~match.collective & (match.send_of < 0)
    alone[match.send_of[match.send_of >= 0]] = False
    suspect = alone | (match.collective & (np.diff(match.bounds) != sizes[group]))
    missing: dict[int, tuple[int, ...]] = {}
    for call in sequence.order[suspect[sequence.order]].tolist():
        members = match.of(call)
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


def _may_be_lost(table: Table, gaps: Gaps, rank: int, member: int) -> bool:
    """Return whether what a rank lost may be its part in the call of that member of another.

    Numbers rise along a program: its part stands between the calls of its neighbouring numbers.
    """
    if rank not in gaps.holes:
        return False
    own = table.member_ranks.get(rank, slice(0, 0))
    part = {field: table.members[field][own] for field in _COUNTED}
    here = {field: int(table.members[field][member]) for field in _COUNTED}
    same = part["group"] == here["group"]
    if here["peer"] >= 0 and here["kind"] in _OTHER_END:
        there = int(table.members["rank"][member])
        same &= (part["kind"] == _OTHER_END[here["kind"]]) & (part["peer"] == there)
    else:
        same &= ~np.isin(part["kind"], list(_OTHER_END))
    below = part["position"][same & (part["sequence"] < here["sequence"])]
    above = part["position"][same & (part["sequence"] > here["sequence"])]
    low = int(below.max()) if len(below) else -1
    return gaps.between(rank, low, int(above.min()) if len(above) else NEVER)


_COUNTED = ("group", "sequence", "kind", "peer", "position")
_OTHER_END = {
    int(EventKind.SEND): int(EventKind.RECV),
    int(EventKind.RECV): int(EventKind.SEND),
}


def absence_findings(
    table: Table, match: Match, absence: Absence, view: IterationView
) -> Iterator[Finding]:
    """Say who is missing: once for each rank and group, with the first call and how many more."""
    calls: dict[tuple[int, int, bool], list[int]] = {}
    for call, rank in absence.claims():
        group = int(table.members["group"][match.first[call]])
        key = (rank, group, bool(match.collective[call]))
        calls.setdefault(key if rank in table.ranks else (rank, _SILENT, True), []).append(call)
    for (rank, group, collective), missed in calls.items():
        words = call_words(table, match, missed[0])
        more = f" and {len(missed) - 1} more after it" if len(missed) > 1 else ""
        if group == _SILENT:
            far = " so far" if view.provisional else ""
            text = f"rank {rank} reported nothing{far} but belongs to {words.text}{more}"
            yield call_finding(FindingKind.SILENT_RANK, text, words, ranks=(rank,))
        else:
            last, did = _last_operator(table, rank)
            if rank in absence.waiting:
                did += f", and it waits in {call_words(table, match, absence.waiting[rank]).text}"
            kind, text = _claim(rank, words.text + more, collective=collective, view=view)
            yield call_finding(kind, f"{text}; {did}", words, ranks=(rank,), last=last)


def _claim(
    rank: int, call: str, *, collective: bool, view: IterationView
) -> tuple[FindingKind, str]:
    """Say that a rank which executed other things is missing."""
    if view.provisional:
        arrived, end = "has not arrived so far at", "has no other end so far"
    elif unfinished(view, rank):
        # It was not waited for any longer: what came of it later nobody knows.
        arrived, end = "had not arrived in time at", "had no other end in time"
    else:
        arrived, end = "never arrived at", "has no other end"
    if collective:
        return FindingKind.MISSING_MEMBER, f"rank {rank} {arrived} {call}"
    return FindingKind.LONE_MESSAGE, f"{call} {end} on rank {rank}"


def _last_operator(table: Table, rank: int) -> tuple[tuple[str, int], str]:
    """Return name and position of the last operator of a rank, and a sentence about it."""
    span = table.ranks[rank]
    operators: Column = np.flatnonzero(table["kind"][span] == int(EventKind.OPERATOR))
    if not len(operators):
        return ("", -1), "it executed no operator"
    row = span.start + int(operators[-1])
    name, position = table.name(row), int(table["position"][row])
    return (name, position), f"its last operator is {name!r} at position {position}"

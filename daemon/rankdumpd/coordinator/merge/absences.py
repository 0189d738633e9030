"""Finds who should have taken part in a collective or message and did not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.gaps import Gaps
from rankdumpd.coordinator.merge.match import Match
from rankdumpd.coordinator.merge.sequence import CallOrder
from rankdumpd.coordinator.merge.table import NEVER, Table
from rankdumpd.coordinator.merge.wording import CallWords, call_finding, call_words
from rankdumpd.coordinator.values import IterationView

Missing = Mapping[int, tuple[int, ...]]
_SILENT = -1


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
    table: Table, match: Match, missing: Missing, view: IterationView
) -> Iterator[Finding]:
    """Say who is missing: once for each rank and group, with the first call and how many more."""
    calls: dict[tuple[int, int, bool], list[int]] = {}
    for call, ranks in missing.items():
        group = int(table.members["group"][match.of(call)[0]])
        for rank in ranks:
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
            yield _absence(table, rank, words, more, collective=collective, view=view)


def _absence(
    table: Table, rank: int, words: CallWords, more: str, *, collective: bool, view: IterationView
) -> Finding:
    """Say that a rank which executed other things is missing."""
    last, did = _last_operator(table, rank)
    unfinished = rank in view.late or (view.late_count > len(view.late) and rank not in view.spans)
    if view.provisional:
        arrived, end = "has not arrived so far at", "has no other end so far"
    elif unfinished:
        # It was not waited for any longer: what came of it later nobody knows.
        arrived, end = "had not arrived in time at", "had no other end in time"
    else:
        arrived, end = "never arrived at", "has no other end"
    if collective:
        text = f"rank {rank} {arrived} {words.text}{more}; {did}"
        kind = FindingKind.MISSING_MEMBER
    else:
        text = f"{words.text}{more} {end} on rank {rank}; {did}"
        kind = FindingKind.LONE_MESSAGE
    return call_finding(kind, text, words, ranks=(rank,), last=last)


def _last_operator(table: Table, rank: int) -> tuple[tuple[str, int], str]:
    """Return name and position of the last operator of a rank, and a sentence about it."""
    span = table.ranks[rank]
    operators: Column = np.flatnonzero(table["kind"][span] == int(EventKind.OPERATOR))
    if not len(operators):
        return ("", -1), "it executed no operator"
    row = span.start + int(operators[-1])
    name, position = table.name(row), int(table["position"][row])
    return (name, position), f"its last operator is {name!r} at position {position}"

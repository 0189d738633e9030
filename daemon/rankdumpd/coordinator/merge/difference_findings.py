"""Findings about disagreement: members of one call that report another operation, size or element
type, and ranks that run the same program with other operators. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rankdump._core.events import EventColumn, EventKind, Finding, FindingKind
from rankdump._core.number_ranges import name_first_ranks
from rankdumpd.coordinator.fleet_views import IterationView
from rankdumpd.coordinator.merge.absence_findings import (
    EventGaps,
    build_call_finding,
    describe_call,
    is_unfinished,
)
from rankdumpd.coordinator.merge.call_order import CallMatch, CallOrder, mark_changes
from rankdumpd.coordinator.merge.event_table import EventTable

_UNEVEN_KINDS = (EventKind.GATHER, EventKind.SCATTER, EventKind.ALL_TO_ALL)
"""Kinds of collectives whose members may have different numbers of elements."""
_RanksByValue = dict[str, list[int]]
"""Ranks by the value that they reported."""
_Difference = tuple[FindingKind, int, tuple[int, ...]]
"""Kind of the disagreement, group, and the ranks that differ."""


def build_difference_findings(
    table: EventTable, match: CallMatch, order: CallOrder
) -> Iterator[Finding]:
    """Yield findings about members that disagree on kind, element count or element type.

    There is one finding for each group and set of differing ranks, with the first call and the
    number of others.
    """
    suspect = _find_suspects(table, match)
    calls: dict[_Difference, list[tuple[int, _RanksByValue]]] = {}
    for call in order.calls[suspect[order.calls]].tolist():
        members = match.list_members(call)
        if match.send_of[call] >= 0:
            members = match.list_members(int(match.send_of[call])) + members
        group = int(table.members["group"][members[0]])
        collective = bool(match.collective[call])
        for kind, sides in _iter_disagreements(table, members, collective=collective):
            calls.setdefault((kind, group, _find_minority(sides)), []).append((call, sides))
    for (kind, _, ranks), differing in calls.items():
        call, sides = differing[0]
        described = describe_call(table, match, call)
        values = ", ".join(f"{value} on {name_first_ranks(side)}" for value, side in sides.items())
        more = (
            f"; the same ranks differ in {len(differing) - 1} more calls"
            if len(differing) > 1
            else ""
        )
        text = f"members of {described.text} disagree: {values}{more}"
        yield build_call_finding(kind, text, described, ranks=ranks)


def _find_suspects(table: EventTable, match: CallMatch) -> EventColumn:
    """Return for each call whether its members may disagree; a cheap test, because most members
    agree.
    """
    suspect = np.zeros(len(match), dtype=bool)
    if not len(match):
        return suspect
    starts = match.bounds[:-1]
    first = match.first
    for field in ("kind", "element_count", "dtype"):
        values = table.members[field][match.members]
        differs = np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
        if field == "element_count":
            differs &= ~np.isin(table.members["kind"][first], _UNEVEN_KINDS)
        suspect |= differs
        if field != "kind":
            ends = table.members[field][first]
            suspect |= (match.send_of >= 0) & (ends != ends[match.send_of])
    return suspect


def _iter_disagreements(
    table: EventTable, members: list[int], *, collective: bool
) -> Iterator[tuple[FindingKind, _RanksByValue]]:
    """Yield the disagreements of members; a member without a value disagrees with none."""
    values = {field: table.members[field][members].tolist() for field in _COMPARED_FIELDS}
    kinds = [EventKind(kind) for kind in values["kind"]]
    types: list[int] = values["dtype"]
    dtypes = [table.names[index] for index in types]
    if collective and len(set(kinds)) > 1:
        # If the operations differ, their sizes need not agree.
        operations = _group_ranks_by_value([kind.name.lower() for kind in kinds], values["rank"])
        yield FindingKind.OPERATION_MISMATCH, operations
        return
    if kinds[0] not in _UNEVEN_KINDS:
        each = zip(values["element_count"], dtypes, strict=True)
        sizes = [f"{count} elements" if count or dtype else "" for count, dtype in each]
        sides = _group_ranks_by_value(sizes, values["rank"])
        if len(sides) > 1:
            yield FindingKind.SIZE_MISMATCH, sides
    sides = _group_ranks_by_value(dtypes, values["rank"])
    if len(sides) > 1:
        yield FindingKind.DTYPE_MISMATCH, sides


_COMPARED_FIELDS = ("kind", "element_count", "dtype", "rank")


def _group_ranks_by_value(values: Sequence[str], ranks: Sequence[int]) -> _RanksByValue:
    sides: _RanksByValue = {}
    for value, rank in zip(values, ranks, strict=True):
        if value:
            sides.setdefault(value, []).append(rank)
    return sides


def _find_minority(sides: _RanksByValue) -> tuple[int, ...]:
    """Return the ranks that differ from the largest side; if sides are equal, from the
    first one.
    """
    most = max(sides.values(), key=len)
    return tuple(sorted(rank for side in sides.values() if side is not most for rank in side))


def find_meeting_ranks(table: EventTable) -> list[list[int]]:
    """Return groups of ranks that meet in collectives, directly or through other ranks.

    Ranks that exchange messages, directly or through others, are stages of one pipeline and run
    different programs; so a process group that has two of them is ignored.
    """
    members = table.members
    message = members["peer"] >= 0
    stages = _DisjointSets(table.ranks)
    for rank, peer in _list_unique_pairs(members["rank"][message], members["peer"][message]):
        stages.join(rank, peer)
    met: dict[int, list[int]] = {}
    for group, rank in _list_unique_pairs(members["group"][~message], members["rank"][~message]):
        met.setdefault(group, []).append(rank)
    meetings = _DisjointSets(table.ranks)
    for ranks in met.values():
        if len({stages.root(rank) for rank in ranks}) == len(ranks):
            for rank in ranks[1:]:
                meetings.join(ranks[0], rank)
    found: dict[int, list[int]] = {}
    for rank in table.ranks:
        found.setdefault(meetings.root(rank), []).append(rank)
    return [ranks for ranks in found.values() if len(ranks) > 1]


def _list_unique_pairs(first: EventColumn, second: EventColumn) -> list[tuple[int, int]]:
    """Return each pair of values once, sorted."""
    order = np.lexsort((second, first))
    first, second = first[order], second[order]
    new = mark_changes((first, second))
    return list(zip(first[new].tolist(), second[new].tolist(), strict=True))


class _DisjointSets:
    """Disjoint sets of numbers (union-find)."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self._parents = {number: number for number in numbers}

    def root(self, number: int) -> int:
        """Return the representative of the set that has a number."""
        parents = self._parents
        parent = parents.setdefault(number, number)
        while parent != parents[parent]:
            parent = parents[parent]
        parents[number] = parent
        return parent

    def join(self, one: int, other: int) -> None:
        """Join the sets that have these two numbers."""
        self._parents[self.root(one)] = self.root(other)


@dataclass(frozen=True, slots=True, eq=False)
class _RankProgram:
    """Operators and calls that one rank has executed."""

    rank: int
    calls: bytes
    """Kind, element count and element type of every collective and message, in order."""
    operators: dict[int, EventColumn]
    """Rows of the operators of each graph, in order."""
    names: tuple[tuple[int, bytes], ...]
    """Names of the operators of each graph, as bytes that can be compared."""
    finished: bool


def build_program_findings(
    table: EventTable, gaps: EventGaps, view: IterationView
) -> Iterator[Finding]:
    """Yield findings about ranks whose operators differ from those of most ranks with the same
    program.

    Ranks run the same program if they meet in collectives and all their collectives and messages
    agree. Ranks that lost events are not compared. A rank that has not finished the iteration, or
    ended before that, is compared as far as it got.
    """
    for ranks in find_meeting_ranks(table):
        programs = [_build_program(table, view, rank) for rank in ranks if rank not in gaps.holes]
        for alike in _group_agreeing_programs(programs):
            yield from _build_group_findings(table, alike)


def _build_program(table: EventTable, view: IterationView, rank: int) -> _RankProgram:
    rows, own = table.ranks[rank], table.member_ranks[rank]
    fields = [table.members[field][own] for field in ("kind", "element_count", "dtype")]
    calls = np.column_stack([column.astype("u8") for column in fields]).tobytes()
    operators = rows.start + np.flatnonzero(table["kind"][rows] == int(EventKind.OPERATOR))
    graph = table["graph"][operators]
    by_graph = {}
    if len(graph) and graph.min() == graph.max():
        by_graph = {int(graph[0]): operators}
    elif len(graph):
        by_graph = {each: operators[graph == each] for each in np.unique(graph).tolist()}
    names = tuple((each, table["name"][at].tobytes()) for each, at in by_graph.items())
    ended = rank in view.lost and rank not in view.spans
    finished = not ended and not is_unfinished(view, rank)
    return _RankProgram(rank, calls, by_graph, names, finished)


def _group_agreeing_programs(programs: list[_RankProgram]) -> Iterator[list[_RankProgram]]:
    """Yield groups of programs with equal calls; an unfinished program joins a group if it fits
    only one.
    """
    classes: dict[bytes, list[_RankProgram]] = {}
    for program in programs:
        if program.finished:
            classes.setdefault(program.calls, []).append(program)
    whole = list(classes)
    for program in programs:
        if not program.finished:
            fitting = [calls for calls in whole if calls.startswith(program.calls)]
            if len(fitting) <= 1:
                classes.setdefault(fitting[0] if fitting else program.calls, []).append(program)
    for alike in classes.values():
        if len(alike) > 1:
            yield sorted(alike, key=lambda program: program.rank)


def _build_group_findings(table: EventTable, alike: list[_RankProgram]) -> Iterator[Finding]:
    """Yield a finding for each difference from the program of most ranks."""
    ways: dict[tuple[tuple[int, bytes], ...], list[_RankProgram]] = {}
    for program in alike:
        ways.setdefault(program.names, []).append(program)
    # Of equally large sides the first one counts; an unfinished program is no reference for
    # finished ones.
    most = max(ways.values(), key=lambda way: (sum(each.finished for each in way), len(way)))
    findings: dict[tuple[int, int, str], list[_RankProgram]] = {}
    for way in ways.values():
        for program in way if way is not most else ():
            difference = _find_first_difference(table, most[0], program)
            if difference is not None:
                findings.setdefault(difference, []).append(program)
    for (graph, place, name), programs in findings.items():
        yield _build_program_finding(table, most, programs, (graph, place, name))


def _find_first_difference(
    table: EventTable, usual: _RankProgram, program: _RankProgram
) -> tuple[int, int, str] | None:
    """Return graph, place and name of the first operator that differs; an empty name if the program
    has ended there.
    """
    for graph in sorted({*usual.operators, *program.operators}):
        empty = np.empty(0, "i8")
        rows = program.operators.get(graph, empty)
        usual_names = table["name"][usual.operators.get(graph, empty)]
        names = table["name"][rows]
        both = min(len(names), len(usual_names))
        differs = np.flatnonzero(names[:both] != usual_names[:both])
        at = int(differs[0]) if len(differs) else both
        if at < len(names) and (at < len(usual_names) or usual.finished):
            return graph, at, table.name(int(rows[at]))
        if at < len(usual_names) and program.finished:
            return graph, at, ""
    return None


def _build_program_finding(
    table: EventTable,
    most: list[_RankProgram],
    programs: list[_RankProgram],
    where: tuple[int, int, str],
) -> Finding:
    graph, place, name = where
    who = name_first_ranks([p.rank for p in programs])
    whom = name_first_ranks([p.rank for p in most])
    others = most[0].operators.get(graph, np.empty(0, "i8"))
    usual = table.name(int(others[place])) if place < len(others) else ""
    position = -1
    if name:
        position = int(table["position"][programs[0].operators[graph][place]])
    own = f"{name!r} at position {position}" if name else "nothing more"
    their = f"{usual!r}" if usual else "nothing more"
    return Finding(
        kind=FindingKind.SEQUENCE_DIFFERENCE,
        iteration=0,
        text=f"{who} executed {own} as operator {place} of graph {graph}, but {whom}, whose "
        f"collectives and messages are the same, executed {their}",
        ranks=tuple(program.rank for program in programs),
        name=name or usual,
        position=position,
    )

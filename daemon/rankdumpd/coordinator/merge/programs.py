"""Finds ranks that run the same program and disagree on its operators. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import Column, EventKind
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.merge.gaps import Gaps, unfinished
from rankdumpd.coordinator.merge.meetings import meeting_ranks
from rankdumpd.coordinator.merge.table import Table
from rankdumpd.coordinator.merge.wording import ranks_words
from rankdumpd.coordinator.values import IterationView


@dataclass(frozen=True, slots=True, eq=False)
class _Program:
    """What a rank executed."""

    rank: int
    calls: bytes
    """Kind, element count and element type of every collective and message, in order."""
    operators: dict[int, Column]
    """Rows of the operators of each graph, in order."""
    names: tuple[tuple[int, bytes], ...]
    """Their names, to be compared."""
    finished: bool


def program_findings(table: Table, gaps: Gaps, view: IterationView) -> Iterator[Finding]:
    """Say which ranks execute other operators than most of those that run the same program.

    The same program run ranks that meet in collectives, and all of whose collectives and messages
    agree. A rank that lost events says nothing here, and one that has not finished has to agree
    as far as it got.
    """
    for ranks in meeting_ranks(table):
        programs = [_program(table, view, rank) for rank in ranks if rank not in gaps.holes]
        for alike in _agreeing(programs):
            yield from _differing(table, alike)


def _program(table: Table, view: IterationView, rank: int) -> _Program:
    rows, own = table.ranks[rank], table.member_ranks[rank]
    said = [table.members[field][own] for field in ("kind", "element_count", "dtype")]
    calls = np.column_stack([column.astype("u8") for column in said]).tobytes()
    operators = rows.start + np.flatnonzero(table["kind"][rows] == int(EventKind.OPERATOR))
    graph = table["graph"][operators]
    by_graph = {}
    if len(graph) and graph.min() == graph.max():
        by_graph = {int(graph[0]): operators}
    elif len(graph):
        by_graph = {each: operators[graph == each] for each in np.unique(graph).tolist()}
    names = tuple((each, table["name"][at].tobytes()) for each, at in by_graph.items())
    return _Program(rank, calls, by_graph, names, not unfinished(view, rank))


def _agreeing(programs: list[_Program]) -> Iterator[list[_Program]]:
    """Yield those whose calls agree; who has not finished joins the only one it may become."""
    classes: dict[bytes, list[_Program]] = {}
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


def _differing(table: Table, alike: list[_Program]) -> Iterator[Finding]:
    """Say who differs from most, once for each way to differ."""
    ways: dict[tuple[tuple[int, bytes], ...], list[_Program]] = {}
    for program in alike:
        ways.setdefault(program.names, []).append(program)
    # Of equally many the first; who has not finished is measured, and measures nobody that has.
    most = max(ways.values(), key=lambda way: (sum(each.finished for each in way), len(way)))
    findings: dict[tuple[int, int, str], list[_Program]] = {}
    for way in ways.values():
        for program in way if way is not most else ():
            difference = _first_difference(table, most[0], program)
            if difference is not None:
                findings.setdefault(difference, []).append(program)
    for (graph, place, name), programs in findings.items():
        yield _finding(table, most, programs, (graph, place, name))


def _first_difference(
    table: Table, usual: _Program, program: _Program
) -> tuple[int, int, str] | None:
    """Return graph and place of the first operator that differs, and its name; empty at an end."""
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


def _finding(
    table: Table, most: list[_Program], programs: list[_Program], where: tuple[int, int, str]
) -> Finding:
    graph, place, name = where
    who, whom = ranks_words([p.rank for p in programs]), ranks_words([p.rank for p in most])
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
        text=f"{who} executed {own} as operator {place} of graph {graph}, where {whom}, whose "
        f"collectives and messages are the same, executed {their}",
        ranks=tuple(program.rank for program in programs),
        name=name or usual,
        position=position,
    )

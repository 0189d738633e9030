"""The tables of one step of two ranks. Reads tensors; holds as many pairs as it has threads."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_name import LAYER, Direction
from rankdump.diff.api_tables import (
    ApiTable,
    ApiTables,
    as_list,
    figures_titles,
    sides,
    values_titles,
)
from rankdump.diff.flow import match
from rankdump.diff.values import Tolerances
from rankdump.migrator.comparing.found import RankDump
from rankdump.migrator.comparing.numbers import NO_PARTNER, Numbers, differences, numbers
from rankdump.migrator.comparing.rows import Held, Pair, pairs
from rankdump.migrator.comparing.steps import Step
from rankdump.reader import load_file

_UNREADABLE = "unreadable"
_MOST_THREADS = 8


@dataclass(frozen=True, slots=True)
class Side:
    """One rank of one dump."""

    dump: RankDump
    held: Held
    """What of it is compared."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How two ranks are compared."""

    tolerances: Tolerances
    ignore_unmatched: bool
    ignore_backward: bool
    by: str = "elements"
    """`elements`, `figures`, or `nothing` when there are neither: only calls are paired then."""


def step_tables(
    parts: Sequence[tuple[Step, Step]], a: Side, b: Side, settings: Settings, rank: int
) -> tuple[ApiTables, list[str]]:
    """Return the tables of a step, and what could not be read.

    `parts`: the calls of the step, and those that repeat some of them, which pair by themselves.
    """
    names = sides(a.dump.framework, b.dump.framework)
    mapped: list[tuple[str, str]] = []
    found: dict[Direction, list[Pair]] = {"forward": [], "backward": []}
    for one, other in parts:
        spans = match(one.calls, other.calls)
        mapped.extend((_lines(one, span.a), _lines(other, span.b)) for span in spans)
        for direction, rows in found.items():
            rows.extend(pairs(spans, (one, a.held), (other, b.held), direction))
    if settings.ignore_backward:
        found["backward"] = []
    made: dict[Direction, ApiTable | None] = {}
    problems: list[str] = []
    for direction, rows in found.items():
        table, damaged = _table(names, rows, a, b, settings)
        made[direction] = table
        problems.extend(damaged)
    mapping = ApiTable(names, tuple(mapped))
    return ApiTables(mapping, made["forward"], made["backward"], rank), problems


def _lines(step: Step, calls: range) -> str:
    return "\n".join(step.names[at] for at in calls)


def _table(
    names: tuple[str, str], rows: Sequence[Pair], a: Side, b: Side, settings: Settings
) -> tuple[ApiTable | None, list[str]]:
    """Return the table of one direction, None where nothing is compared; and what is damaged."""
    if settings.ignore_unmatched:
        rows = [pair for pair in rows if pair[0] and pair[1]]
    if not rows or settings.by == "nothing":
        return None, []
    if settings.by == "figures":
        return ApiTable(figures_titles(names), tuple(map(_figures_row, rows))), []

    def row(pair: Pair) -> _Row:
        return _values_row(pair, a, b, settings.tolerances)

    shown = [pair for pair in rows if not any(each and each.call.kind == LAYER for each in pair)]
    threads = min(_MOST_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="rankdump-compare") as pool:
        found = list(pool.map(row, shown))
    table = ApiTable(values_titles(names), tuple(each.cells for each in found))
    return table, [problem for each in found for problem in each.problems]


def _figures_row(pair: Pair) -> tuple[str, ...]:
    missing = (math.nan, math.nan, math.nan)
    shapes = (as_list(each.shape) if each else "" for each in pair)
    return (
        *_names(pair),
        *shapes,
        differences(*(each.figures if each else missing for each in pair)),
    )


@dataclass(frozen=True, slots=True)
class _Row:
    cells: tuple[str, ...]
    problems: tuple[str, ...] = ()


def _values_row(pair: Pair, a: Side, b: Side, tolerances: Tolerances) -> _Row:
    names, shapes = _names(pair), tuple(str(each.shape) if each else "" for each in pair)
    if pair[0] is None or pair[1] is None:
        return _Row((*names, *shapes, *NO_PARTNER.cells))
    try:
        arrays = load_file(a.dump.files[names[0]]), load_file(b.dump.files[names[1]])
    except DamagedError as error:
        return _Row((*names, *shapes, *Numbers(_UNREADABLE).cells), (str(error),))
    shapes = tuple(str(array.shape) for array in arrays)
    return _Row((*names, *shapes, *numbers(*arrays, tolerances).cells))


def _names(pair: Pair) -> tuple[str, ...]:
    return tuple(each.name if each else "" for each in pair)

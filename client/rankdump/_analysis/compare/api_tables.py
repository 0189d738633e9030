"""The three tables of an API comparison and their CSV files, as troubleshooter writes them:

ts_api_mapping_{step}.csv, ts_api_forward_compare_{step}.csv, ts_api_backward_compare_{step}.csv

Every field is quoted, lines end with LF, and the file ends with an empty line (troubleshooter
1.0.17, `api_dump_compare`). The file names of a rank other than 0 have `rank{N}_` before the step.
`build_api_tables` makes the tables from a report of rankdump: its numbers are rounded, and means
are over all elements.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    ComparisonReport,
    ComparisonRow,
    DumpedTensor,
    PairOutcome,
    TensorVerdict,
)
from rankdump._analysis.reader.statistic_tables import is_layer_mark
from rankdump._layout.api_tree import ApiFileNames, join_tensor_name, parse_call_name, parse_place
from rankdump.errors import ExhaustedError

_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_STEMS = ("ts_api_mapping", "ts_api_forward_compare", "ts_api_backward_compare")
_SHAPE_TITLES = ("shape of orig", "shape of target")
_VALUE_TITLES = ("result of allclose", "ratio of allclose", "cosine similarity", "mean & max diffs")
_STATISTIC_TITLES = ("max, min, mean diffs",)
_STATISTIC_NAMES = ("max", "min", "avg")
SHAPES_DIFFER = "Shape is inconsistent"
"""Text that the tables have as a result if shapes differ."""
FRAMEWORK_TITLES: Mapping[str, str] = {
    "mindtorch": "mindtorch",
    "mindspore": "mindspore",
    "torch": "pytorch",
}
"""Titles of frameworks by the prefix of their files; the first match applies."""
_TITLE_BY_FOLDER = {ApiFileNames(name).folder: shown for name, shown in FRAMEWORK_TITLES.items()}


@dataclass(frozen=True, slots=True)
class ApiTable:
    """One table."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ApiTableSet:
    """Tables of one step on one rank."""

    mapping: ApiTable
    forward: ApiTable | None = None
    """Table of forward calls; None if there is nothing to compare, and then no file is written."""
    backward: ApiTable | None = None
    rank: int = 0


def make_side_titles(origin: str, target: str) -> tuple[str, str]:
    """Return the first two column titles; the framework is left out where it is unknown."""
    sides = {"ORIGIN NET": origin, "TARGET NET": target}
    first, second = (f"{side} ({name})" if name else side for side, name in sides.items())
    return first, second


def list_value_titles(names: tuple[str, str]) -> tuple[str, ...]:
    """Return the column titles of a table that compares elements."""
    return (*names, *_SHAPE_TITLES, *_VALUE_TITLES)


def list_statistic_titles(names: tuple[str, str]) -> tuple[str, ...]:
    """Return the column titles of a table that compares statistics."""
    return (*names, *_SHAPE_TITLES, *_STATISTIC_TITLES)


def write_api_tables(tables: Sequence[ApiTableSet], folder: Path, step: int) -> list[Path]:
    """Write the files of all ranks of a step; return their paths.

    Files of an earlier comparison are replaced or removed. ExhaustedError when a file cannot be
    written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for found in tables:
            rank = f"rank{found.rank}_" if found.rank else ""
            each = (found.mapping, found.forward, found.backward)
            for stem, table in zip(_FILE_STEMS, each, strict=True):
                path = folder / f"{stem}_{rank}{step}.csv"
                if table is None:
                    path.unlink(missing_ok=True)
                else:
                    opened = os.open(path, _CREATE_FLAGS, 0o600)
                    with os.fdopen(opened, "w", encoding="utf-8", newline="") as file:
                        file.write(format_csv(table))
                    written.append(path)
    except OSError as error:
        raise ExhaustedError(f"{error.filename or folder}: {error.strerror}") from None
    return written


def format_csv(table: ApiTable) -> str:
    """Return the text of a CSV file."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(table.titles)
    writer.writerows(table.rows)
    return text.getvalue() + "\n"


def build_api_tables(report: ComparisonReport) -> Mapping[int, tuple[ApiTableSet, ...]]:
    """Return the tables of each iteration, for each rank, with API names where the calls have them.

    Constants are in no table, because they belong to no iteration.
    """
    found: defaultdict[int, defaultdict[int, list[ComparisonRow]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in report.rows:
        if row.iteration != CONSTANTS_ITERATION:
            found[row.iteration][row.rank].append(row)
    return {
        iteration: tuple(_build_table_set(rank, ranks[rank]) for rank in sorted(ranks))
        for iteration, ranks in sorted(found.items())
    }


def _build_table_set(rank: int, rows: Sequence[ComparisonRow]) -> ApiTableSet:
    names = make_side_titles(
        _find_framework(row.pair.a for row in rows), _find_framework(row.pair.b for row in rows)
    )
    forward = [row for row in rows if not row.backward]
    backward = [row for row in rows if row.backward]
    calls = dict.fromkeys(
        (row.position, _format_call_stem(row.name_a), _format_call_stem(row.name_b))
        for row in forward
    )
    make = _build_value_table if any(_has_elements(row) for row in rows) else _build_statistic_table
    return ApiTableSet(
        ApiTable(names, tuple((a, b) for _, a, b in calls)),
        make(names, forward) if forward else None,
        make(names, backward) if backward else None,
        rank,
    )


def _build_value_table(names: tuple[str, str], rows: Sequence[ComparisonRow]) -> ApiTable:
    lines = tuple(
        (*_format_tensor_names(row), *_format_shapes(row, str), *_format_outcome(row.outcome))
        for row in rows
        if not is_layer_mark(row.name)
    )
    return ApiTable(list_value_titles(names), lines)


def _build_statistic_table(names: tuple[str, str], rows: Sequence[ComparisonRow]) -> ApiTable:
    def format_differences(row: ComparisonRow) -> str:
        return ", ".join(
            f"{row.outcome.statistic_differences.get(name, math.nan):.5f}"
            for name in _STATISTIC_NAMES
        )

    lines = tuple(
        (
            *_format_tensor_names(row),
            *_format_shapes(row, format_shape_list),
            format_differences(row),
        )
        for row in rows
    )
    return ApiTable(list_statistic_titles(names), lines)


def format_shape_list(shape: tuple[int, ...]) -> str:
    """Return a shape in the form that tables of statistics use: `[2, 3]`."""
    return str(list(shape))


def _format_outcome(outcome: PairOutcome) -> tuple[str, str, str, str]:
    verdict, measures = outcome.verdict, outcome.measures
    if verdict is TensorVerdict.SHAPE:
        result = SHAPES_DIFFER
    elif verdict in (TensorVerdict.UNREADABLE, TensorVerdict.UNKNOWN):
        result = verdict.value
    else:
        result = str(verdict.agrees)
    if measures is not None:
        share, cosine = measures.close_share, measures.cosine
        mean, most = measures.mean_absolute, measures.max_absolute
    elif verdict.agrees:
        share, cosine, mean, most = 1.0, 1.0, 0.0, 0.0
    else:
        share, cosine, mean, most = 0.0, math.nan, math.nan, math.nan
    return result, f"{share:.2%}", f"{cosine:.5f}", f"{mean:.5f}, {most:.5f}"


def _format_tensor_names(row: ComparisonRow) -> tuple[str, str]:
    return _format_tensor_name(row.name_a, row.pair.a), _format_tensor_name(row.name_b, row.pair.b)


def _format_tensor_name(name: str, tensor: DumpedTensor | None) -> str:
    """Return the name of a tensor; for API calls, its name in the info file."""
    if tensor is None:
        return ""
    place = parse_place(tensor.argument) if parse_call_name(name) is not None else None
    return join_tensor_name(name, place) if place is not None else f"{name}_{tensor.slot_name}"


def _format_call_stem(name: str) -> str:
    call = parse_call_name(name)
    return call.stem if call is not None else name


def _format_shapes(
    row: ComparisonRow, format_shape: Callable[[tuple[int, ...]], str]
) -> tuple[str, str]:
    a, b = (side.shape if side is not None else None for side in (row.pair.a, row.pair.b))
    return format_shape(a) if a is not None else "", format_shape(b) if b is not None else ""


def _has_elements(row: ComparisonRow) -> bool:
    """Return whether the elements of both tensors were available."""
    return row.outcome.measures is not None or all(
        side is not None and side.entry is not None for side in (row.pair.a, row.pair.b)
    )


def _find_framework(tensors: Iterable[DumpedTensor | None]) -> str:
    """Return the framework of a side, which the folder of its tensors names."""
    for tensor in tensors:
        if tensor is not None and tensor.entry is not None:
            return _TITLE_BY_FOLDER.get(tensor.entry.path.parent.name, "")
    return ""

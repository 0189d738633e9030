"""Comparison tables of one step of two ranks, with the numbers that troubleshooter 1.0.17 prints,
and their form as text. It reads tensors, and holds one pair in memory for each thread.

Mean and maximum are computed over the unequal elements only, in the type of the elements, and
numbers are truncated, not rounded. `rankdump diff` has its own measures in `_analysis.compare`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump._analysis.compare.api_tables import (
    SHAPES_DIFFER,
    ApiTable,
    ApiTableSet,
    format_shape_list,
    list_statistic_titles,
    list_value_titles,
    make_side_titles,
)
from rankdump._analysis.compare.report import ElementTolerances
from rankdump._analysis.reader.tensor_loader import load_file
from rankdump._compat.api_pairs import pair_api_calls
from rankdump._compat.dump_files import ApiRankDump
from rankdump._compat.tensor_pairs import ApiDumpStep, TensorPair, TensorsByCall, pair_tensors
from rankdump._layout.api_tree import LAYER_KIND, CallDirection
from rankdump.errors import CorruptedError

_DECIMAL_PLACES = 5
_SHARE_DECIMAL_PLACES = 4
_MAX_ZERO_NORM = float(np.finfo(float).eps)


@dataclass(frozen=True, slots=True)
class ElementDifferences:
    """Result of the comparison of two tensors."""

    result: str = str(False)
    close_share: float = 0.0
    """Share of close elements, from 0 to 1."""
    cosine: float = math.nan
    mean_difference: float = math.nan
    max_difference: float = math.nan

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The last four cells of the row of two tensors."""
        return (
            self.result,
            f"{truncate_number(self.close_share, _SHARE_DECIMAL_PLACES):.2%}",
            _format_number(self.cosine),
            f"{_format_number(self.mean_difference)}, {_format_number(self.max_difference)}",
        )


NO_PARTNER_DIFFERENCES = ElementDifferences()
_NO_DIFFERENCES = ElementDifferences(str(True), 1.0, 1.0, 0.0, 0.0)


def compare_elements(
    a: npt.NDArray[Any], b: npt.NDArray[Any], tolerances: ElementTolerances
) -> ElementDifferences:
    """Return the differences of two tensors; the relative tolerance applies to `b`."""
    if a.shape != b.shape:
        return ElementDifferences(SHAPES_DIFFER)
    a, b = _convert_to_float(a), _convert_to_float(b)
    unequal = a != b
    if not unequal.any():
        return _NO_DIFFERENCES
    with np.errstate(all="ignore"):
        apart = np.abs(a[unequal] - b[unequal])
        close = np.isclose(
            a, b, rtol=tolerances.rtol, atol=tolerances.atol, equal_nan=tolerances.equal_nan
        )
        share = float(np.count_nonzero(close) / close.size)
        result = str(bool(close.all()))
        return ElementDifferences(
            result, share, _compute_cosine(a.ravel(), b.ravel()), apart.mean(), apart.max()
        )


def format_statistic_differences(a: tuple[float, ...], b: tuple[float, ...]) -> str:
    """Return the absolute differences of statistics, which are the last cell of a row."""
    return ", ".join(_format_number(abs(one - other)) for one, other in zip(a, b, strict=True))


def truncate_number(number: float, places: int) -> float:
    """Return a number truncated to `places` decimal places.

    A float32 is scaled in float32, as the tool does with numpy 2.

    >>> truncate_number(0.29999999, 5), truncate_number(-1.5, 0)
    (0.29999, -1.0)
    """
    factor = 10**places
    single = getattr(number, "dtype", None) == np.float32
    with np.errstate(over="ignore"):
        scaled = float(np.multiply(number, factor, dtype=np.float32 if single else np.float64))
    return int(scaled) / factor if math.isfinite(scaled) else float(number)


def _format_number(number: float) -> str:
    return f"{truncate_number(number, _DECIMAL_PLACES):.{_DECIMAL_PLACES}f}"


def _convert_to_float(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return an array as floats of at least 32 bits, because the tool cannot print half floats."""
    if array.dtype.kind == "c":
        return np.stack((np.real(array), np.imag(array)))
    if array.dtype.kind == "f":
        return array.astype(np.float32) if array.dtype.itemsize < np.float32().itemsize else array
    return array.astype(np.float64)


def _compute_cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """Return the cosine of two vectors; 1 if both norms are 0, NaN if only one is."""
    norm_a: Any = np.linalg.norm(a)
    norm_b: Any = np.linalg.norm(b)
    zeros = (norm_a <= _MAX_ZERO_NORM, norm_b <= _MAX_ZERO_NORM)
    if any(zeros):
        return 1.0 if all(zeros) else math.nan
    return float(np.clip(np.dot(a, b) / (norm_a * norm_b), -1, 1))


_COLUMN_GAP = "  "


def format_table(title: str, table: ApiTable) -> str:
    """Return a table for a terminal, followed by an empty line; cells may have several lines."""
    rows = [[cell.split("\n") for cell in row] for row in (table.titles, *table.rows)]
    widths = [
        max(len(line) for row in rows for line in row[column])
        for column in range(len(table.titles))
    ]
    lines = [title]
    for row in rows:
        for height in range(max(map(len, row))):
            cells = [cell[height] if height < len(cell) else "" for cell in row]
            padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines.append(_COLUMN_GAP.join(padded).rstrip())
    return "\n".join(lines) + "\n\n"


_UNREADABLE_RESULT = "unreadable"
_MAX_THREADS = 8


@dataclass(frozen=True, slots=True)
class ComparedRank:
    """One rank of one dump."""

    dump: ApiRankDump
    tensors_by_call: TensorsByCall
    """Tensors to compare, by call."""


@dataclass(frozen=True, slots=True)
class ApiComparisonSettings:
    """Settings of a comparison of two ranks."""

    tolerances: ElementTolerances
    ignore_unmatched: bool
    ignore_backward: bool
    by: str = "elements"
    """What is compared: `elements`, `statistics`, or `nothing`; in the last case calls are only
    paired.
    """


def make_step_tables(
    parts: Sequence[tuple[ApiDumpStep, ApiDumpStep]],
    a: ComparedRank,
    b: ComparedRank,
    settings: ApiComparisonSettings,
    rank: int,
) -> tuple[ApiTableSet, list[str]]:
    """Return the tables of a step, and sentences about unreadable files.

    `parts` are the calls of the step and its recomputed calls, which are paired separately.
    """
    names = make_side_titles(a.dump.framework, b.dump.framework)
    mapped: list[tuple[str, str]] = []
    found: dict[CallDirection, list[TensorPair]] = {"forward": [], "backward": []}
    for one, other in parts:
        spans = pair_api_calls(one.calls, other.calls)
        mapped.extend((_format_calls(one, span.a), _format_calls(other, span.b)) for span in spans)
        for direction, rows in found.items():
            rows.extend(
                pair_tensors(spans, (one, a.tensors_by_call), (other, b.tensors_by_call), direction)
            )
    if settings.ignore_backward:
        found["backward"] = []
    forward, damaged = _make_table(names, found["forward"], a, b, settings)
    backward, more = _make_table(names, found["backward"], a, b, settings)
    mapping = ApiTable(names, tuple(mapped))
    return ApiTableSet(mapping, forward, backward, rank), [*damaged, *more]


def _format_calls(step: ApiDumpStep, calls: range) -> str:
    return "\n".join(step.names[at] for at in calls)


def _make_table(
    names: tuple[str, str],
    rows: Sequence[TensorPair],
    a: ComparedRank,
    b: ComparedRank,
    settings: ApiComparisonSettings,
) -> tuple[ApiTable | None, list[str]]:
    """Return the table of one direction, or None if nothing is compared, and its problems."""
    if settings.ignore_unmatched:
        rows = [pair for pair in rows if pair[0] and pair[1]]
    if not rows or settings.by == "nothing":
        return None, []
    if settings.by == "statistics":
        return ApiTable(list_statistic_titles(names), tuple(map(_make_statistics_row, rows))), []
    shown = [
        pair for pair in rows if not any(each and each.call.kind == LAYER_KIND for each in pair)
    ]
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(threads, thread_name_prefix="rankdump-compare") as pool:
        row = partial(_make_element_row, a=a, b=b, tolerances=settings.tolerances)
        found = list(pool.map(row, shown))
    table = ApiTable(list_value_titles(names), tuple(cells for cells, _ in found))
    return table, [problem for _, problem in found if problem]


def _make_statistics_row(pair: TensorPair) -> tuple[str, ...]:
    missing = (math.nan, math.nan, math.nan)
    shapes = (format_shape_list(each.shape) if each else "" for each in pair)
    return (
        *_format_names(pair),
        *shapes,
        format_statistic_differences(*(each.statistics if each else missing for each in pair)),
    )


def _make_element_row(
    pair: TensorPair, a: ComparedRank, b: ComparedRank, tolerances: ElementTolerances
) -> tuple[tuple[str, ...], str]:
    """Return the cells of a row, and a sentence about a file that cannot be read, if
    there is one.
    """
    names, shapes = _format_names(pair), [str(each.shape) if each else "" for each in pair]
    found, problem = NO_PARTNER_DIFFERENCES, ""
    if pair[0] is not None and pair[1] is not None:
        try:
            arrays = load_file(a.dump.files[names[0]]), load_file(b.dump.files[names[1]])
        except CorruptedError as error:
            found, problem = ElementDifferences(_UNREADABLE_RESULT), str(error)
        else:
            shapes = [str(array.shape) for array in arrays]
            found = compare_elements(*arrays, tolerances)
    return (*names, *shapes, *found.cells), problem


def _format_names(pair: TensorPair) -> tuple[str, ...]:
    return tuple(each.name if each else "" for each in pair)

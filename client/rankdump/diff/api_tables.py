"""The three tables of an API comparison, and their CSV files, as troubleshooter has them.

    ts_api_mapping_{step}.csv, ts_api_forward_compare_{step}.csv, ts_api_backward_compare_{step}.csv

Every field is quoted, lines end in LF, and an empty line ends the file (api-dump.md A.6). The
tables of a rank other than 0 have `rank{N}_` before the step. `from_report` makes them of a report
of ours: numbers are rounded, and means are over all elements.
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import ExhaustedError
from rankdump.contract.layout.api_name import call_of, place_of, tensor_name
from rankdump.contract.layout.api_tree import ApiFiles
from rankdump.diff.pairing.kinds import marks_layer
from rankdump.diff.values import CONSTANTS, Outcome, Report, Row, Tensor, Verdict

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
_STEMS = ("ts_api_mapping", "ts_api_forward_compare", "ts_api_backward_compare")
_SHAPES = ("shape of orig", "shape of target")
_VALUES = ("result of allclose", "ratio of allclose", "cosine similarity", "mean & max diffs")
_FIGURES = ("max, min, mean diffs",)
_FIGURE_NAMES = ("max", "min", "avg")
SHAPES_DIFFER = "Shape is inconsistent"
"""What stands for a result where shapes differ."""
FRAMEWORKS: Mapping[str, str] = {
    "mindtorch": "mindtorch",
    "mindspore": "mindspore",
    "torch": "pytorch",
}
"""What tables call a framework, by what its files begin with; of several the first counts."""
_BY_FOLDER = {ApiFiles(name).folder: shown for name, shown in FRAMEWORKS.items()}


@dataclass(frozen=True, slots=True)
class ApiTable:
    """One table."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class ApiTables:
    """What came of one step of one rank."""

    mapping: ApiTable
    forward: ApiTable | None = None
    """None where there was nothing to compare: no file then."""
    backward: ApiTable | None = None
    rank: int = 0


def sides(origin: str, target: str) -> tuple[str, str]:
    """Return the first two titles; a framework that is not known is left out."""
    return _side("ORIGIN NET", origin), _side("TARGET NET", target)


def values_titles(names: tuple[str, str]) -> tuple[str, ...]:
    """Return the titles of a table that compares elements."""
    return (*names, *_SHAPES, *_VALUES)


def figures_titles(names: tuple[str, str]) -> tuple[str, ...]:
    """Return the titles of a table that compares figures."""
    return (*names, *_SHAPES, *_FIGURES)


def write(tables: Sequence[ApiTables], folder: Path, step: int) -> list[Path]:
    """Write the files of a step, those of all its ranks; return their paths.

    What an earlier comparison left under those names gives way. ExhaustedError when a file cannot
    be written.
    """
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rank in tables:
            for path, table in _files(rank, folder, step):
                if table is None:
                    path.unlink(missing_ok=True)
                else:
                    _write(path, as_csv(table))
                    written.append(path)
    except OSError as error:
        raise ExhaustedError(f"{error.filename or folder}: {error.strerror}") from None
    return written


def as_csv(table: ApiTable) -> str:
    """Return the text of a file."""
    text = io.StringIO()
    writer = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(table.titles)
    writer.writerows(table.rows)
    return text.getvalue() + "\n"


def from_report(report: Report) -> Mapping[int, tuple[ApiTables, ...]]:
    """Return the tables of each iteration, by rank; names are those of an API where they are.

    Constants have none: they belong to no iteration.
    """
    found: defaultdict[int, defaultdict[int, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in report.rows:
        if row.iteration != CONSTANTS:
            found[row.iteration][row.rank].append(row)
    return {
        iteration: tuple(_tables(rank, ranks[rank]) for rank in sorted(ranks))
        for iteration, ranks in sorted(found.items())
    }


def _tables(rank: int, rows: Sequence[Row]) -> ApiTables:
    names = sides(_framework(row.pair.a for row in rows), _framework(row.pair.b for row in rows))
    forward = [row for row in rows if not row.backward]
    backward = [row for row in rows if row.backward]
    calls = dict.fromkeys((row.position, _call(row.name_a), _call(row.name_b)) for row in forward)
    make = _values if any(_measured(row) for row in rows) else _figures
    return ApiTables(
        ApiTable(names, tuple((a, b) for _, a, b in calls)),
        make(names, forward) if forward else None,
        make(names, backward) if backward else None,
        rank,
    )


def _values(names: tuple[str, str], rows: Sequence[Row]) -> ApiTable:
    lines = tuple(
        (*_tensors(row), *_shapes(row, str), *_numbers(row.outcome))
        for row in rows
        if not marks_layer(row.name_a or row.name_b)
    )
    return ApiTable(values_titles(names), lines)


def _figures(names: tuple[str, str], rows: Sequence[Row]) -> ApiTable:
    def figures(row: Row) -> str:
        return ", ".join(f"{row.outcome.figures.get(name, math.nan):.5f}" for name in _FIGURE_NAMES)

    lines = tuple((*_tensors(row), *_shapes(row, as_list), figures(row)) for row in rows)
    return ApiTable(figures_titles(names), lines)


def as_list(shape: tuple[int, ...]) -> str:
    """Return a shape as tables of figures spell it: `[2, 3]`."""
    return str(list(shape))


def _numbers(outcome: Outcome) -> tuple[str, str, str, str]:
    verdict, measures = outcome.verdict, outcome.measures
    if verdict is Verdict.SHAPE:
        result = SHAPES_DIFFER
    elif verdict in (Verdict.UNREADABLE, Verdict.UNKNOWN):
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


def _tensors(row: Row) -> tuple[str, str]:
    return _tensor(row.name_a, row.pair.a), _tensor(row.name_b, row.pair.b)


def _tensor(name: str, tensor: Tensor | None) -> str:
    """Return the name of a tensor: as in the info file when it is one of an API's call."""
    if tensor is None:
        return ""
    place = place_of(tensor.argument) if call_of(name) is not None else None
    return tensor_name(name, place) if place is not None else f"{name}_{tensor.place}"


def _call(name: str) -> str:
    call = call_of(name)
    return call.stem if call is not None else name


def _shapes(row: Row, spelt: Callable[[tuple[int, ...]], str]) -> tuple[str, str]:
    a, b = (side.shape if side is not None else None for side in (row.pair.a, row.pair.b))
    return spelt(a) if a is not None else "", spelt(b) if b is not None else ""


def _measured(row: Row) -> bool:
    """Tell whether elements of both sides were at hand."""
    sides_ = (row.pair.a, row.pair.b)
    return row.outcome.measures is not None or all(
        side is not None and side.entry is not None for side in sides_
    )


def _framework(tensors: Iterable[Tensor | None]) -> str:
    """Return the framework of a side, by the folder that its tensors lie in."""
    for tensor in tensors:
        if tensor is not None and tensor.entry is not None:
            return _BY_FOLDER.get(tensor.entry.path.parent.name, "")
    return ""


def _side(side: str, framework: str) -> str:
    return f"{side} ({framework})" if framework else side


def _files(tables: ApiTables, folder: Path, step: int) -> Iterator[tuple[Path, ApiTable | None]]:
    rank = f"rank{tables.rank}_" if tables.rank else ""
    each = (tables.mapping, tables.forward, tables.backward)
    for stem, table in zip(_STEMS, each, strict=True):
        yield folder / f"{stem}_{rank}{step}.csv", table


def _write(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, _CREATE, 0o600), "w", encoding="utf-8", newline="") as file:
        file.write(text)

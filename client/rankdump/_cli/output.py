"""Output for terminals and pipes: sentences, ratios, shapes and counts, tables with aligned
columns, progress bars. The only module that measures the width of the terminal.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import click
from rich.cells import cell_len, set_cell_size

from rankdump._core.json_values import make_plain
from rankdump._core.number_ranges import ranges
from rankdump._core.tensor_layout import TensorLayout

_ELLIPSIS = "..."


def format_ratio(bytes_in: int, bytes_stored: int) -> str:
    """Return the compression ratio: `2.50x`, or a dash when nothing is stored."""
    return f"{bytes_in / bytes_stored:.2f}x" if bytes_stored else "-"


def format_shape(extents: Iterable[int]) -> str:
    """Return a shape without spaces: `(2,3)`, or `()` for a scalar."""
    return f"({','.join(map(str, extents))})"


def to_json_value(value: object) -> object:
    """Return a value for JSON: `nan`, infinities and complex numbers become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return str(value) if isinstance(value, complex) else value


def format_reasons(counts: Mapping[str, int]) -> str:
    """Return counts by reason, the most frequent reason first: `disk_low 10, device_excluded 2`."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{reason} {count}" for reason, count in ordered if count)


def list_first(names: Collection[str], most: int, spell: Callable[[str], str] = str) -> str:
    """Return the first names, joined by commas; `...` stands for the remaining ones."""
    more = ["..."] if len(names) > most else []
    return ", ".join([*map(spell, islice(names, most)), *more])


def shorten_text(text: str, width: int) -> str:
    """Return a text shortened in the middle to a width; a quarter of the kept text is its
    beginning.
    """
    if cell_len(text) <= width:
        return text
    kept = max(width - len(_ELLIPSIS), 2)
    head = set_cell_size(text, kept // 4)
    tail = text
    while cell_len(tail) > kept - kept // 4:
        tail = tail[1:]
    return head + _ELLIPSIS + tail


def wrap_text(text: str, width: int | None) -> list[str]:
    """Return the lines of a sentence that is broken between words; one line if no width
    is given.
    """
    if width is None or not text:
        return [text]
    return textwrap.wrap(
        text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def format_layout(layout: TensorLayout) -> list[tuple[str, str]]:
    """Return lines about a layout, each as its subject and the text."""
    if layout.is_sample:
        return [("kept", str(layout))]
    mesh, flat = layout.mesh, layout.flat_range
    part = f"; elements {flat[0]:,} to {flat[1]:,} of the flattened tensor" if flat else ""
    name = f"{mesh.name} " if mesh.name else ""
    return [
        ("layout", f"{layout} (from {layout.source.value})"),
        ("global shape", format_shape(layout.global_shape)),
        ("offset", format_shape(layout.global_offset) + part),
        ("mesh", f"{name}{format_shape(mesh.shape)} of ranks {ranges(mesh.list_ranks())}"),
        *([("padding", f"{layout.padding:,} elements")] if layout.padding else []),
        *([("logical name", layout.logical_name)] if layout.logical_name else []),
    ]


_COLUMN_GAP = 2
_MIN_FLEXIBLE_WIDTH = 16

_DEFAULT_WIDTH = 100
_MIN_LINE_WIDTH = 60
_PROGRESS_DELAY_S = 1.0
"""Seconds before a progress bar is shown, so that short work shows none."""


@dataclass(frozen=True, slots=True)
class TableColumn:
    """One column of a table."""

    title: str
    is_right_aligned: bool = False
    is_flexible: bool = False
    """Whether texts in the column are shortened in the middle when the row is too wide."""


def without_attempts(
    columns: Sequence[TableColumn], rows: list[list[str]], attempts: Iterable[int]
) -> tuple[tuple[TableColumn, ...], list[list[str]]]:
    """Return a table, without its column of attempts if there was only the first attempt."""
    if any(attempts):
        return tuple(columns), rows
    at = [column.title for column in columns].index("attempt")
    rest = [[*row[:at], *row[at + 1 :]] for row in rows]
    return (*columns[:at], *columns[at + 1 :]), rest


def format_table(
    columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], *, width: int
) -> list[str]:
    """Return a title line and one line per row; flexible columns shrink to fit the width."""
    widths = _column_widths(columns, rows, width)
    titles = [column.title for column in columns]
    gap = _COLUMN_GAP if sum(widths) + _COLUMN_GAP * (len(columns) - 1) <= width else 1
    return [_format_row(columns, widths, cells, gap) for cells in (titles, *rows)]


def number_columns(*titles: str) -> tuple[TableColumn, ...]:
    """Return right-aligned columns for numbers."""
    return tuple(TableColumn(title, is_right_aligned=True) for title in titles)


def _column_widths(
    columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], width: int
) -> list[int]:
    widths = [
        max([cell_len(column.title), *(cell_len(row[at]) for row in rows)])
        for at, column in enumerate(columns)
    ]
    flexible = [at for at, column in enumerate(columns) if column.is_flexible]
    while flexible:
        excess = sum(widths) + _COLUMN_GAP * (len(columns) - 1) - width
        widest = max(flexible, key=lambda at: widths[at])
        if excess <= 0 or widths[widest] <= _MIN_FLEXIBLE_WIDTH:
            break
        widths[widest] -= (
            1 if len(flexible) > 1 else min(excess, widths[widest] - _MIN_FLEXIBLE_WIDTH)
        )
    return widths


def _format_row(
    columns: Sequence[TableColumn], widths: Sequence[int], cells: Sequence[str], gap: int
) -> str:
    padded: list[str] = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        text = shorten_text(cell, width)
        blanks = " " * (width - cell_len(text))
        padded.append(blanks + text if column.is_right_aligned else text + blanks)
    return (" " * gap).join(padded).rstrip()


def measure_width(*, err: bool = False) -> int:
    """Return the width of the terminal, or 100 in a pipe; COLUMNS overrides both."""
    if not _is_terminal(err) and "COLUMNS" not in os.environ:
        return _DEFAULT_WIDTH
    return max(_MIN_LINE_WIDTH, shutil.get_terminal_size((_DEFAULT_WIDTH, 24)).columns)


def print_lines(sentences: Iterable[str], *, err: bool = False) -> None:
    """Print sentences: wrapped between words on a terminal, one per line in a pipe."""
    width = measure_width(err=err) if _is_terminal(err) else None
    for sentence in sentences:
        for line in wrap_text(sentence, width):
            click.echo(line, err=err)


def print_json(body: object, *, indent: int | None = 1) -> None:
    """Print a value as JSON; a dataclass becomes an object with its fields."""
    click.echo(json.dumps(body, indent=indent, default=make_plain))


def print_table(lines: list[str], *, err: bool = False) -> None:
    """Print a table, with bold titles on a terminal."""
    for number, line in enumerate(lines):
        click.echo(click.style(line, bold=True) if number == 0 else line, err=err)


def print_rows(columns: Sequence[TableColumn], rows: Sequence[Sequence[str]]) -> None:
    """Print rows as a table that fits the width."""
    print_table(format_table(columns, rows, width=measure_width()))


def _is_terminal(err: bool) -> bool:
    stream = sys.stderr if err else sys.stdout
    return stream is not None and stream.isatty()


@contextmanager
def show_progress(what: str) -> Generator[Callable[[int, int], None], None, None]:
    """Show a progress bar on a terminal if the work takes more than a second.

    Yields a function that takes the number of finished items and the total.
    """
    if not _is_terminal(err=True):
        yield lambda done, total: None
        return
    # Imported on use, because `rich.progress` takes long to load.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(what, total=None)
    begun = time.monotonic()

    def report_progress(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        if time.monotonic() - begun > _PROGRESS_DELAY_S:
            progress.start()

    try:
        yield report_progress
    finally:
        progress.stop()

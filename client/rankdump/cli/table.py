"""Rows in aligned columns: plain text that reads well on a terminal and in a pipe. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

from rankdump.cli.text import shortened

_GAP = 2
_NARROWEST = 16


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    title: str
    right: bool = False
    """Aligned right, as numbers are."""
    flexible: bool = False
    """Gives way when the row is too wide; its texts are shortened in the middle."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], *, width: int) -> list[str]:
    """Return a title line and one line per row, within the width as far as flexible columns go."""
    widths = _widths(columns, rows, width)
    titles = [column.title for column in columns]
    gap = _GAP if sum(widths) + _GAP * (len(columns) - 1) <= width else 1
    return [_line(columns, widths, cells, gap) for cells in (titles, *rows)]


def numbers(*titles: str) -> tuple[Column, ...]:
    """Return columns of numbers."""
    return tuple(Column(title, right=True) for title in titles)


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[int]:
    widths = [
        max([cell_len(column.title), *(cell_len(row[at]) for row in rows)])
        for at, column in enumerate(columns)
    ]
    flexible = [at for at, column in enumerate(columns) if column.flexible]
    while flexible:
        excess = sum(widths) + _GAP * (len(columns) - 1) - width
        widest = max(flexible, key=lambda at: widths[at])
        if excess <= 0 or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1 if len(flexible) > 1 else min(excess, widths[widest] - _NARROWEST)
    return widths


def _line(columns: Sequence[Column], widths: Sequence[int], cells: Sequence[str], gap: int) -> str:
    padded: list[str] = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        text = shortened(cell, width)
        blanks = " " * (width - cell_len(text))
        padded.append(blanks + text if column.right else text + blanks)
    return (" " * gap).join(padded).rstrip()

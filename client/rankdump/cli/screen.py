"""Where output goes and how wide it is there. The only place that asks the terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable

import click

from rankdump.cli.text import paragraph

_PIPED_WIDTH = 100
_NARROWEST = 60


def table_width(*, err: bool = False) -> int:
    """Return the cells of a line: the terminal's, or 100 in a pipe; COLUMNS overrides both."""
    if not _is_terminal(err) and "COLUMNS" not in os.environ:
        return _PIPED_WIDTH
    return max(_NARROWEST, shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns)


def say(sentences: Iterable[str], *, err: bool = False) -> None:
    """Print sentences: folded between words on a terminal, one a line in a pipe."""
    width = table_width(err=err) if _is_terminal(err) else None
    for sentence in sentences:
        for line in paragraph(sentence, width):
            click.echo(line, err=err)


def show_table(lines: list[str], *, err: bool = False) -> None:
    """Print a table; its titles stand out on a terminal."""
    for number, line in enumerate(lines):
        click.echo(click.style(line, bold=True) if number == 0 else line, err=err)


def _is_terminal(err: bool) -> bool:
    return (sys.stderr if err else sys.stdout).isatty()

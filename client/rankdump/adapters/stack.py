"""Finds out which lines of the user's program are being run, for the one who asks later."""

from __future__ import annotations

import inspect
import linecache
import os
from pathlib import Path

from rankdump.contract.graph import SourceLine

MAX_LINES = 30
"""Frames kept, the innermost ones."""
_MAX_CHARACTERS = 1000
_OURS = f"{Path(__file__).parents[1]}{os.sep}"


def lines_now(*, besides: tuple[str, ...] = ()) -> tuple[SourceLine, ...]:
    """Return this thread's stack, outermost frame first.

    Frames of rankdump are left out, and those of files whose path begins as one of `besides`.
    """
    left_out = (_OURS, *besides)
    found: list[SourceLine] = []
    frame = inspect.currentframe()
    while frame is not None and len(found) < MAX_LINES:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if not file.startswith(left_out):
            text = linecache.getline(file, frame.f_lineno, frame.f_globals).strip()
            found.append(SourceLine(file, frame.f_lineno, name, text[:_MAX_CHARACTERS]))
        frame = frame.f_back
    return tuple(reversed(found))

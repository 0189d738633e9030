"""The lines a call of an API came from, as `torch_api_dump_stack.json` spells them.

    File <path>, line <number>, in <function>, \\n <source line>

Innermost first. Source: api-dump.md A.4. A stack that was met before costs one look at each
frame: every call of every step asks.
"""

from __future__ import annotations

import inspect
import linecache
import os
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_MAX_FRAMES = 60
_MAX_CHARACTERS = 1000
_MAX_KNOWN = 1 << 14
"""Stacks remembered; code that is made anew in every step must not fill the memory."""
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_FROZEN = "<frozen "
"""Begins the file names of the interpreter's own start."""


class Stacks:
    """The stacks of one process, each built once; safe to use from several threads."""

    def __init__(self, framework: str) -> None:
        """`framework` is the folder of the framework, whose frames are not the user's."""
        self._framework = f"{framework}{os.sep}"
        # A code object is known by its identity, which takes no time to hash, and kept alive.
        self._known: dict[tuple[int, ...], tuple[tuple[CodeType, ...], tuple[str, ...]]] = {}

    def now(self, *, users_only: bool) -> tuple[str, ...]:
        """Return this thread's stack without rankdump's frames, or only those of the user."""
        codes: list[CodeType] = []
        key: list[int] = [users_only]
        places: list[tuple[CodeType, int, dict[str, Any]]] = []
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and len(codes) < _MAX_FRAMES:
            code, line = frame.f_code, frame.f_lineno
            codes.append(code)
            key += (id(code), line)
            places.append((code, line, frame.f_globals))
            frame = frame.f_back
        known = self._known.get(tuple(key))
        if known is not None:
            return known[1]
        left_out = (_OURS, _FROZEN, self._framework) if users_only else (_OURS, _FROZEN)
        lines = tuple(
            _line(code, line, names)
            for code, line, names in places
            if not code.co_filename.startswith(left_out)
        )
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[tuple(key)] = (tuple(codes), lines)
        return lines


def _line(code: CodeType, line: int, names: dict[str, Any]) -> str:
    """Return a frame's line; without the source where there is none."""
    text = linecache.getline(code.co_filename, line, names).strip()[:_MAX_CHARACTERS]
    return f"File {code.co_filename}, line {line}, in {code.co_name}, \n {text}"

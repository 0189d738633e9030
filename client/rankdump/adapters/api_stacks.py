"""The lines a call of an API came from, as `torch_api_dump_stack.json` spells them.

    File <path>, line <number>, in <function>, \\n <source line>

Innermost first. Source: api-dump.md A.4. A stack that was met before costs one look at each
frame: every call of every step asks.
"""

from __future__ import annotations

import linecache
import os
from pathlib import Path
from types import CodeType, FrameType

MAX_LINES = 100
"""Frames of a stack that are kept, the innermost ones."""
_MAX_FRAMES = 400
"""Frames that are looked at for them."""
_MAX_CHARACTERS = 1000
_REMEMBERED = 1 << 14
"""Code that is made anew in every step must not fill the memory."""
_OURS = f"{Path(__file__).parents[1]}{os.sep}"
_FROZEN = "<frozen "
"""Begins the file names of the interpreter's own start."""


class Stacks:
    """The stacks of one process, each built once; safe to use from several threads."""

    def __init__(self, *foreign: str, users_only: bool) -> None:
        """`foreign` begins the names of files that are not the user's; ours are never shown."""
        self._hidden = (_OURS, _FROZEN, *foreign) if users_only else (_OURS,)
        # A code object is known by its identity, which takes no time to hash, and kept alive.
        self._shown: dict[int, tuple[CodeType, bool]] = {}
        self._lines: dict[tuple[int, int], str] = {}
        self._stacks: dict[tuple[int, ...], tuple[str, ...]] = {}

    def above(self, frame: FrameType | None) -> tuple[str, ...]:
        """Return the lines of a frame and of all that called it."""
        key: list[int] = []
        # Asked for with every call, of a dozen frames or more: this loop is all that most cost.
        at = frame
        while at is not None and len(key) < 2 * _MAX_FRAMES:
            # The line costs more than the instruction, and follows from it.
            key += (id(at.f_code), at.f_lasti)
            at = at.f_back
        place = tuple(key)
        known = self._stacks.get(place)
        if known is None:
            if len(self._stacks) >= _REMEMBERED:
                self._stacks.clear()
            known = self._stacks[place] = self._read(frame)
        return known

    def forget(self) -> None:
        """Know nothing any more."""
        # All that is known by the identity of a code object goes with the object.
        self._stacks.clear()
        self._lines.clear()
        self._shown.clear()

    def _read(self, frame: FrameType | None) -> tuple[str, ...]:
        frames: list[FrameType] = []
        while frame is not None and len(frames) < _MAX_FRAMES:
            frames.append(frame)
            frame = frame.f_back
        # All of them are part of the key, shown or not, and stay alive with it.
        if len(self._shown) + len(frames) > _REMEMBERED:
            self.forget()
        shown = [each for each in frames if self._shows(each.f_code)]
        return tuple(map(self._line, shown[:MAX_LINES]))

    def _shows(self, code: CodeType) -> bool:
        known = self._shown.get(id(code))
        if known is None:
            shown = not code.co_filename.startswith(self._hidden)
            known = self._shown[id(code)] = (code, shown)
        return known[1]

    def _line(self, frame: FrameType) -> str:
        code = frame.f_code
        place = (id(code), frame.f_lasti)
        known = self._lines.get(place)
        if known is None:
            text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
            # Code without a source has no line to show.
            shown = f" {text[:_MAX_CHARACTERS]}" if text else ""
            where = f"File {code.co_filename}, line {frame.f_lineno}, in {code.co_name}"
            known = self._lines[place] = f"{where}, \n{shown}"
        return known

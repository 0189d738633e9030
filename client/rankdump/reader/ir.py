"""A graph written as `.ir` text to its operators and the source lines they came from.

Tolerant: a line that says nothing of these is passed over. Holds one operator at a time. Reads
what our agent writes and what MindSpore 2.0 to 2.7 write (mindspore-dump.md 2.12).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError

_NODE = re.compile(r"\s*%\d+\([^)]*\) = (?:PrimFunc_)?([^\s(]+)\(")
_NAME = re.compile(r"\s*# Fullname with scope: \((.*)\)\s*")
# 2.7 writes the last line and the columns as well, and a remark behind a line of many operators.
_FRAME = re.compile(
    r"\s*# (?:inlined:)?In file (?P<file>.+?):(?P<first>[0-9]{1,9})(?:~(?P<last>[0-9]{1,9}))?"
    r"(?:, [0-9]+~[0-9]+)?/(?P<code>.*?)/(?:<~~.*)?\s*"
)
_MOST_CHARACTERS = 4096
"""Of a line with a place; where one ends is found by trying, which takes long in longer ones."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One place in the source, of the stack that an operator was called from."""

    file: str
    line: int
    last_line: int
    """Of a statement or function of several lines; else the line itself."""
    code: str
    """Text of the first line, stripped; empty when it is not known."""

    def holds(self, other: Frame) -> bool:
        """Return whether another place is a smaller part of this one."""
        mine, its = (self.line, self.last_line), (other.line, other.last_line)
        return self.file == other.file and mine[0] <= its[0] and its[1] <= mine[1] and mine != its


@dataclass(frozen=True, slots=True)
class IrOperator:
    """One operator of a graph."""

    op_type: str
    op_name: str
    """Full scope name."""
    frames: tuple[Frame, ...]
    """Outermost first; of a gradient, those of the operator it belongs to."""


def operators(path: Path) -> Iterator[IrOperator]:
    """Yield the operators of a file in its order; DamagedError when it cannot be read."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            yield from parsed(file)
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None


def parsed(lines: Iterable[str]) -> Iterator[IrOperator]:
    """Yield the operators that these lines describe."""
    op_type, op_name, frames = "", "", list[Frame]()
    for line in lines:
        node = _NODE.match(line)
        if node:
            if op_name:
                yield IrOperator(op_type, op_name, tuple(frames))
            op_type, op_name, frames = node[1], "", []
        elif "# In file " in line or "# inlined:In file " in line:
            frame = _FRAME.fullmatch(line) if len(line) <= _MOST_CHARACTERS else None
            if frame:
                frames.append(_frame(frame))
        elif op_type and not op_name:
            name = _NAME.fullmatch(line)
            op_name = name[1] if name else ""
    if op_name:
        yield IrOperator(op_type, op_name, tuple(frames))


def _frame(found: re.Match[str]) -> Frame:
    first = int(found["first"])
    last = int(found["last"] or first)
    return Frame(found["file"], first, max(first, last), found["code"].strip())

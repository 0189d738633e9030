"""Source line of an operator, with the lines around it where the script is on this host.

A tree may come from anyone, and names the file itself. So its lines are shown only where the line
that the tree recorded is in the file at that place: then it is the script.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.reader.source_lines import (
    Frame,
    OperatorNames,
    find_backward_name,
    graph_files,
    read_operators,
)
from rankdump._web.dump_source import DumpSource

_CONTEXT = 4
"""Lines before and after."""
_MAX_FILE_BYTES = 4 << 20
_MAX_FRAMES = 12
_SUFFIX = ".py"


class ContextLine(NamedTuple):
    """A line of a script."""

    number: int
    text: str
    is_line: bool
    """Whether it is the line itself."""


class SourceFrame(NamedTuple):
    """A frame of the stack of an operator."""

    file: str
    line: int
    code: str
    context: tuple[ContextLine, ...]
    """Empty where the script is not on this host, or is another one by now."""


def find_source(source: DumpSource, rank: int, name: str) -> tuple[SourceFrame, ...]:
    """Return the stack of an operator, innermost line first; empty where none was recorded.

    CorruptedError where the file of stacks is damaged.
    """
    frames = source.keep(("frames", rank, name), lambda: _find_frames(source, rank, name))
    return tuple(
        SourceFrame(each.file, each.line, each.code, read_context(each))
        for each in reversed(frames[-_MAX_FRAMES:])
    )


def _find_frames(source: DumpSource, rank: int, name: str) -> tuple[Frame, ...]:
    names = OperatorNames([name])
    likely: tuple[Frame, ...] = ()
    for file in graph_files(source.root, (rank,)):
        for operator in read_operators(file):
            if name in (operator.op_name, find_backward_name(operator.op_name)):
                return operator.frames
            if not likely and names.may_be(operator.op_name):
                likely = operator.frames
    return likely


def read_context(frame: Frame) -> tuple[ContextLine, ...]:
    """Return the lines around a frame; none unless the file has the recorded line."""
    path = Path(frame.file)
    if not frame.code or path.suffix != _SUFFIX or not path.is_absolute():
        return ()
    try:
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return ()
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ()
    at = frame.line - 1
    if not 0 <= at < len(lines) or lines[at].strip() != frame.code:
        return ()
    first = max(0, at - _CONTEXT)
    return tuple(
        ContextLine(first + offset + 1, text, first + offset == at)
        for offset, text in enumerate(lines[first : at + _CONTEXT + 1])
    )

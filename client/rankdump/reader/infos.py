"""The info files of api dumps: their lines, and to which iteration each belongs.

Ours say the step. The real tool's all say 1: there a step is a block of forward records with the
block of backward records behind it, as its own comparison has it, and everything is one step where
no backward was kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_info import InfoLine, parse

_THEIRS = 1
"""Step of every line of the real tool."""


@dataclass(frozen=True, slots=True)
class Noted:
    """One line of an info file."""

    line: InfoLine
    number: int
    """Of the line, from 1: the order of execution."""
    iteration: int


@dataclass(frozen=True, slots=True)
class Info:
    """What an info file says."""

    lines: tuple[Noted, ...]
    damage: str = ""
    """Why there is nothing behind these lines; empty where the file ends well."""
    torn: bool = False
    """Whether the damage is only that the last line was not written to its end."""
    stepped: bool = True
    """Whether its steps are real ones."""

    @property
    def given(self) -> frozenset[str]:
        """Figures that the file has of any tensor: where another has none of them, it is NaN."""
        return frozenset(item for noted in self.lines for item in noted.line.figures)


def read_info(path: Path, *, stepped: bool) -> Info:
    """Return what an info file says; with `stepped` it is known to have real steps.

    A line that is torn or none of these ends it; DamagedError when it cannot be read at all.
    """
    try:
        # Bytes that are no text are in no line of JSON: they end what is read of the file.
        text = path.read_bytes().decode("utf-8", "backslashreplace")
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    found: list[tuple[int, InfoLine]] = []
    damage, torn = "", False
    *ended, rest = text.split("\n")
    for number, line in enumerate((*ended, rest), start=1):
        if not line.strip():
            continue
        try:
            found.append((number, parse(line, file=f"{path}, line {number}")))
        except DamagedError as error:
            torn = number > len(ended)
            damage = f"{path}: its last line has no end: {line[:60]!r}" if torn else str(error)
            break
    stepped = stepped or any(line.step != _THEIRS for _, line in found)
    lines = [line for _, line in found]
    iterations = [line.step for line in lines] if stepped else _blocks(lines)
    pairs = zip(found, iterations, strict=True)
    noted = tuple(Noted(line, number, at) for (number, line), at in pairs)
    return Info(noted, damage, torn, stepped)


def _blocks(lines: Sequence[InfoLine]) -> list[int]:
    """Return the iteration of each line: a forward behind a backward begins the next one."""
    iterations: list[int] = []
    at, backward = 0, False
    for line in lines:
        now = "_backward_" in line.name
        at += backward and not now
        backward = now
        iterations.append(at)
    return iterations

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

    @property
    def given(self) -> frozenset[str]:
        """Figures that the file has of any tensor: where another has none of them, it is NaN."""
        return frozenset(item for noted in self.lines for item in noted.line.figures)


def read_info(path: Path, *, stepped: bool) -> Info:
    """Return what an info file says; with `stepped` it is known to have real steps.

    A line that is torn or none of these ends it; DamagedError when it cannot be read at all.
    """
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    found: list[InfoLine] = []
    damage = ""
    whole, _, torn = text.rpartition("\n")
    for number, line in enumerate(whole.split("\n") if whole else (), start=1):
        try:
            found.append(parse(line, file=f"{path}, line {number}"))
        except DamagedError as error:
            damage = str(error)
            break
    if torn and not damage:
        damage = f"{path}: its last line has no end: {torn[:60]!r}"
    if not stepped:
        stepped = any(line.step != _THEIRS for line in found)
    iterations = [line.step for line in found] if stepped else _blocks(found)
    pairs = zip(found, iterations, strict=True)
    noted = [Noted(line, number, at) for number, (line, at) in enumerate(pairs, start=1)]
    return Info(tuple(noted), damage)


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

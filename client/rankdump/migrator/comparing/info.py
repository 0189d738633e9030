"""An info file to the tensors it lists: what `contract.layout.api_info` says of each line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_info import SUMMARY, InfoLine, parse
from rankdump.contract.layout.api_name import ApiCall, ApiPlace, tensor_of
from rankdump.diff.flow import Shape


@dataclass(frozen=True, slots=True)
class InfoTensor:
    """One line."""

    name: str
    call: ApiCall
    place: ApiPlace
    step: int
    recomputed: bool
    shape: Shape
    figures: tuple[float, float, float]
    """Largest, smallest and mean element; NaN where there is none."""


@dataclass(frozen=True, slots=True)
class Info:
    """A whole file."""

    tensors: tuple[InfoTensor, ...]
    """In the order of the lines."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def figureless(self) -> bool:
        """Whether no tensor has any figure."""
        return all(math.isnan(figure) for tensor in self.tensors for figure in tensor.figures)


def read(path: Path) -> Info:
    """Return what an info file lists; DamagedError names the line that is none.

    A last line that its writer could not finish is left out.
    """
    try:
        *lines, rest = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DamagedError(f"{path}: cannot be read: {error}") from None
    tensors: list[InfoTensor] = []
    foreign: list[str] = []
    notes: list[str] = []
    for number, text in enumerate((*lines, rest), 1):
        if not text.strip():
            continue
        try:
            line = parse(text, file=f"{path}, line {number}")
        except DamagedError:
            if number <= len(lines):
                raise
            notes.append(f"{path}, line {number}: it is not finished and was left out")
            continue
        tensor = _tensor(line)
        if tensor is None:
            foreign.append(line.name)
        else:
            tensors.append(tensor)
    if foreign:
        notes.append(f"{path}: {len(foreign)} names of no API left out, such as {foreign[0]!r}")
    return Info(tuple(tensors), tuple(notes))


def _tensor(line: InfoLine) -> InfoTensor | None:
    found = tensor_of(line.name)
    if found is None:
        return None
    largest, smallest, mean = (line.figures.get(item, math.nan) for item in SUMMARY)
    figures = (largest, smallest, mean)
    return InfoTensor(line.name, *found, line.step, line.recomputed, line.shape, figures)

"""An info file to the tensors that it lists."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_info import SUMMARY, InfoLine
from rankdump.contract.layout.api_name import ApiCall, ApiPlace, tensor_of
from rankdump.diff.flow import Shape
from rankdump.reader.infos import read_info


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
    counted: bool = False
    """Whether its steps are real ones."""
    notes: tuple[str, ...] = ()
    """What was left out, and why."""

    @property
    def figureless(self) -> bool:
        """Whether no tensor has any figure."""
        return all(math.isnan(figure) for tensor in self.tensors for figure in tensor.figures)


def read(path: Path, *, counted: bool = False) -> Info:
    """Return what an info file lists; with `counted` its steps are known to be real ones.

    A last line that its writer could not finish is left out; DamagedError names any other that is
    none.
    """
    info = read_info(path, stepped=counted)
    if info.damage and not info.torn:
        raise DamagedError(info.damage)
    notes = [f"{info.damage}; it is left out"] if info.torn else []
    pairs = [(noted.line, _tensor(noted.line)) for noted in info.lines]
    foreign = [line.name for line, tensor in pairs if tensor is None]
    if foreign:
        notes.append(f"{path}: {len(foreign)} names of no API left out, such as {foreign[0]!r}")
    tensors = tuple(tensor for _, tensor in pairs if tensor is not None)
    return Info(tensors, info.stepped, tuple(notes))


def _tensor(line: InfoLine) -> InfoTensor | None:
    found = tensor_of(line.name)
    if found is None:
        return None
    largest, smallest, mean = (line.figures.get(item, math.nan) for item in SUMMARY)
    figures = (largest, smallest, mean)
    return InfoTensor(line.name, *found, line.step, line.recomputed, line.shape, figures)

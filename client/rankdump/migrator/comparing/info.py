"""An info file to the tensors it lists. Text only; nothing is ever unpickled.

    [name, step, marks, dtype, shape, [max, min, mean]]                 1.0.13 to 1.0.17, and ours
    [name, step, marks, dtype, shape, [max, min, mean], md5, l2norm]    1.0.18

troubleshooter leaves the step at 1 and the marks empty (api-dump.md A.3).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rankdump.contract.errors import DamagedError
from rankdump.contract.layout.api_name import RECOMPUTED, ApiCall, ApiPlace, tensor_of
from rankdump.diff.flow import Shape

_FEWEST_FIELDS = 6
_FIGURES = 3


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
    for number, line in enumerate((*lines, rest), 1):
        if not line.strip():
            continue
        try:
            name, tensor = _tensor(line)
        except (ValueError, RecursionError) as error:
            if number <= len(lines):
                raise DamagedError(f"{path}: line {number}: {error}") from None
            notes.append(f"{path}: line {number} is not finished and was left out")
            continue
        if tensor is None:
            foreign.append(name)
        else:
            tensors.append(tensor)
    if foreign:
        notes.append(f"{path}: {len(foreign)} names of no API left out, such as {foreign[0]!r}")
    return Info(tuple(tensors), tuple(notes))


def _tensor(line: str) -> tuple[str, InfoTensor | None]:
    """Return the name of a line, and what it says where that is a tensor of an API."""
    fields: object = json.loads(line)
    if not isinstance(fields, list):
        raise ValueError("not a JSON array")
    values = cast(list[Any], fields)
    if len(values) < _FEWEST_FIELDS:
        raise ValueError(f"{len(values)} fields, at least {_FEWEST_FIELDS} expected")
    name, step, marks, _, shape, figures = values[:_FEWEST_FIELDS]
    if not isinstance(name, str) or not isinstance(step, int) or not isinstance(marks, list):
        raise ValueError("no name, step and marks at its begin")
    found = tensor_of(name)
    if found is None:
        return name, None
    recomputed = RECOMPUTED in cast(list[Any], marks)
    return name, InfoTensor(name, *found, step, recomputed, _shape(shape), _figures(figures))


def _shape(value: object) -> Shape:
    extents = cast(list[Any], value) if isinstance(value, list) else [value]
    shape = tuple(extent for extent in extents if isinstance(extent, int) and extent >= 0)
    if len(shape) != len(extents):
        raise ValueError(f"shape {value!r} is none")
    return shape


def _figures(value: object) -> tuple[float, float, float]:
    figures = cast(list[Any], value) if isinstance(value, list) else []
    if len(figures) != _FIGURES:
        raise ValueError(f"{len(figures)} figures, {_FIGURES} expected")
    largest, smallest, mean = map(_figure, figures)
    return largest, smallest, mean


def _figure(value: object) -> float:
    if not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf

"""Which conversions there are, and the one way to run them. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from rankdump.contract.errors import UnsupportedError
from rankdump.contract.formats import fractal_nz, grouped, lettered
from rankdump.contract.formats.crop import cropped
from rankdump.contract.formats.lettered import DEEP, FLAT, Opener
from rankdump.contract.formats.origin import Origin
from rankdump.contract.formats.tiles import Array, Tiles


@dataclass(frozen=True, slots=True)
class Converted:
    """A tensor in its new format, C-contiguous."""

    array: Array
    whole: bool = False
    """Whether padding is still there, because the original shape is not a part of the result."""


Conversion: TypeAlias = "Callable[[Array, Origin], Converted]"


def convert(array: Array, source: str, target: str, origin: Origin | None = None) -> Converted:
    """Return a tensor of device shape in another format, its padding cropped.

    UnsupportedError when there is no such conversion, DamagedError when shape, original shape and
    format contradict each other. Nothing larger than the tensor and its padding is allocated.
    """
    if source == target:
        return Converted(np.ascontiguousarray(array))
    conversion = CONVERSIONS.get((source, target))
    if conversion is None:
        known = ", ".join(targets_of(source)) or "nothing"
        raise UnsupportedError(f"{source} is not converted to {target}, but to {known}")
    return conversion(array, origin or Origin())


def targets_of(source: str) -> tuple[str, ...]:
    """Return the formats that one can be converted to."""
    return tuple(target for known, target in CONVERSIONS if known == source)


def _read(opener: Opener, wanted: str, array: Array, origin: Origin) -> Converted:
    return _cropped(opener(array, origin, wanted), origin)


def _fractal_z(wanted: str, array: Array, origin: Origin) -> Converted:
    if origin.groups < 2:
        return _read(lettered.fractal_z, wanted, array, origin)
    return Converted(grouped.read(array, origin, wanted))


def _fractal_nz(array: Array, origin: Origin) -> Converted:
    return _cropped(fractal_nz.opened(array, origin), origin)


def _plain(letters: str, wanted: str, array: Array, origin: Origin) -> Converted:
    return _cropped(lettered.plain(array, letters, wanted), origin)


def _to_channels(letters: str, array: Array, origin: Origin) -> Converted:
    return Converted(lettered.to_channels(array, letters, origin))


def _to_fractal_z(letters: str, array: Array, origin: Origin) -> Converted:
    if origin.groups < 2 or "D" in letters:
        return Converted(lettered.to_fractal_z(array, letters, origin))
    return Converted(grouped.lay_out(array, letters, origin))


def _to_fractal_nz(array: Array, origin: Origin) -> Converted:
    return Converted(fractal_nz.lay_out(array, origin))


def _cropped(tiles: Tiles, origin: Origin) -> Converted:
    part = cropped(tiles.shape, origin.shape)
    return Converted(tiles.read(part or tiles.shape), whole=part is None)


def _conversions() -> dict[tuple[str, str], Conversion]:
    found: dict[tuple[str, str], Conversion] = {}
    for wanted in FLAT:
        found["NC1HWC0", wanted] = partial(_read, lettered.channels, wanted)
        found["FRACTAL_Z", wanted] = partial(_fractal_z, wanted)
        found[wanted, "NC1HWC0"] = partial(_to_channels, wanted)
        found[wanted, "FRACTAL_Z"] = partial(_to_fractal_z, wanted)
        # Matrices have no letters: what FRACTAL_NZ holds is the same in any of these.
        if wanted != "HWCN":
            found["FRACTAL_NZ", wanted] = _fractal_nz
    for wanted in DEEP:
        found["NDC1HWC0", wanted] = partial(_read, lettered.deep_channels, wanted)
        found["FRACTAL_Z_3D", wanted] = partial(_read, lettered.fractal_z, wanted)
        found[wanted, "NDC1HWC0"] = partial(_to_channels, wanted)
        found[wanted, "FRACTAL_Z_3D"] = partial(_to_fractal_z, wanted)
    for orders in (FLAT, DEEP):
        for letters in orders:
            for wanted in orders:
                if letters != wanted:
                    found[letters, wanted] = partial(_plain, letters, wanted)
    found["NDC1HWC0", "ND"] = found["NDC1HWC0", "NCDHW"]
    found["FRACTAL_NZ", "ND"] = _fractal_nz
    found["ND", "FRACTAL_NZ"] = _to_fractal_nz
    return found


CONVERSIONS = _conversions()
"""What can be converted, by source and target."""
TARGETS = tuple(sorted({target for _, target in CONVERSIONS}))

"""Formats whose axes have letters: plain orders, and C in blocks of C0. Pure.

NCHW NHWC HWCN NCDHW NDHWC DHWCN      every axis whole, in this order
NC1HWC0        [n][c/C0][h][w][c%C0]
NDC1HWC0       [n][d][c/C0][h][w][c%C0]
FRACTAL_Z      [c/C0][h][w][n/16][n%16][c%C0]        the first three in one extent
FRACTAL_Z_3D   [d][c/C0][h][w][n/16][n%16][c%C0]     the first four in one extent
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from rankdump.contract.errors import DamagedError
from rankdump.contract.formats.origin import (
    CUBE,
    Origin,
    block_of,
    check_rank,
    named_extents,
    usual_block,
)
from rankdump.contract.formats.tiles import Array, Tiles

Opener: TypeAlias = "Callable[[Array, Origin, str], Tiles]"
"""Makes tiles of a tensor on the device; the letters are those of the wanted order."""

FLAT = ("NCHW", "NHWC", "HWCN")
DEEP = ("NCDHW", "NDHWC", "DHWCN")
_NC1HWC0, _NDC1HWC0 = "NC1HWC0", "NDC1HWC0"


def plain(array: Array, letters: str, wanted: str) -> Tiles:
    """Return a tensor of plain order in another one."""
    check_rank(array.shape, len(letters), letters)
    return _ordered(Tiles(array), letters, wanted)


def channels(array: Array, origin: Origin, wanted: str) -> Tiles:
    """Return an NC1HWC0 tensor in a plain order."""
    check_rank(array.shape, 5, _NC1HWC0)
    block_of(array.shape, origin, _NC1HWC0)
    return _ordered(Tiles(array.transpose(0, 1, 4, 2, 3), 1), "NCHW", wanted)


def deep_channels(array: Array, origin: Origin, wanted: str) -> Tiles:
    """Return an NDC1HWC0 tensor in a plain order."""
    check_rank(array.shape, 6, _NDC1HWC0)
    block_of(array.shape, origin, _NDC1HWC0)
    return _ordered(Tiles(array.transpose(0, 1, 2, 5, 3, 4), 2), "NDCHW", wanted)


def fractal_z(array: Array, origin: Origin, wanted: str) -> Tiles:
    """Return a FRACTAL_Z or FRACTAL_Z_3D tensor, without groups, in a plain order."""
    source = "FRACTAL_Z_3D" if "D" in wanted else "FRACTAL_Z"
    check_rank(array.shape, 4, source)
    c0 = block_of(array.shape, origin, source)
    extents = {"D": 1, **named_extents(wanted, origin)}
    blocks = -(-extents["C"] // c0)
    outer = (extents["D"], blocks, extents["H"], extents["W"])
    first, columns, rows = array.shape[:3]
    if math.prod(outer) != first or not _fits(extents["N"], columns, rows):
        raise DamagedError(
            f"{source} of shape {array.shape} cannot hold {wanted} of {origin.shape}"
        )
    view = array.reshape(*outer, columns * rows, c0).transpose(0, 4, 1, 5, 2, 3)
    tiles = Tiles(view, 2)
    if "D" in wanted:
        return _ordered(tiles, "DNCHW", wanted)
    return _ordered(Tiles(view[0], 1), "NCHW", wanted)


def to_channels(array: Array, letters: str, origin: Origin) -> Array:
    """Lay a plain tensor out as NC1HWC0, or as NDC1HWC0 when it has a depth."""
    extents = _extents(array, letters)
    c0 = usual_block(array.itemsize, origin)
    blocks = -(-extents["C"] // c0)
    flat = (blocks, extents["H"], extents["W"], c0)
    if "D" in letters:
        made = np.zeros((extents["N"], extents["D"], *flat), array.dtype)
        deep_channels(made, Origin(), letters).fill(array)
    else:
        made = np.zeros((extents["N"], *flat), array.dtype)
        channels(made, Origin(), letters).fill(array)
    return made


def to_fractal_z(array: Array, letters: str, origin: Origin) -> Array:
    """Lay a plain tensor out as FRACTAL_Z, or as FRACTAL_Z_3D when it has a depth."""
    extents = _extents(array, letters)
    c0 = usual_block(array.itemsize, origin)
    outer = -(-extents["C"] // c0) * extents["H"] * extents["W"] * extents.get("D", 1)
    made = np.zeros((outer, -(-extents["N"] // CUBE), CUBE, c0), array.dtype)
    fractal_z(made, Origin(array.shape), letters).fill(array)
    return made


def _extents(array: Array, letters: str) -> dict[str, int]:
    check_rank(array.shape, len(letters), letters)
    return named_extents(letters, Origin(array.shape))


def _ordered(tiles: Tiles, letters: str, wanted: str) -> Tiles:
    return tiles.ordered([letters.index(letter) for letter in wanted])


def _fits(extent: int, blocks: int, block: int) -> bool:
    """Whether that many blocks are just enough."""
    return (blocks - 1) * block < extent <= blocks * block

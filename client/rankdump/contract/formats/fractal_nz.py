"""FRACTAL_NZ: a matrix in blocks of 16 rows by C0 columns, column of blocks after column. Pure.

[...][w/C0][h/16][h%16][w%C0]        of [...][h][w]; a vector is the first row of its blocks
"""

from __future__ import annotations

import numpy as np

from rankdump.contract.errors import DamagedError
from rankdump.contract.formats.origin import CUBE, Origin, block_of, usual_block
from rankdump.contract.formats.tiles import Array, Tiles

_NAME = "FRACTAL_NZ"
_RANK = 4


def opened(array: Array, origin: Origin) -> Tiles:
    """Return the matrices; a vector when the original shape is one."""
    if array.ndim < _RANK:
        raise DamagedError(f"{_NAME} has {_RANK} extents or more, the shape is {array.shape}")
    c0 = block_of(array.shape, origin, _NAME)
    *lead, columns, rows, height, _ = array.shape
    if height == 0:
        raise DamagedError(f"{_NAME} of shape {array.shape} has blocks of no rows")
    _check(origin.shape, (*lead, rows * height, columns * c0), height, c0, array.shape)
    view = np.moveaxis(array.reshape(*lead, columns, rows * height, c0), -3, -2)
    if len(origin.shape) == 1:
        return Tiles(view[0], 0)
    return Tiles(view, len(lead) + 1)


def lay_out(array: Array, origin: Origin) -> Array:
    """Lay matrices out, or a vector."""
    c0 = usual_block(array.itemsize, origin)
    *lead, height, width = (1,) * (2 - array.ndim) + array.shape
    made = np.zeros((*lead, -(-width // c0), -(-height // CUBE), CUBE, c0), array.dtype)
    opened(made, Origin()).fill(array.reshape(*lead, height, width))
    return made


def _check(
    wanted: tuple[int, ...],
    padded: tuple[int, ...],
    height: int,
    width: int,
    shape: tuple[int, ...],
) -> None:
    """Refuse an original shape whose blocks would be others."""
    if not wanted:
        return
    vector = len(wanted) == 1 and len(padded) == 2 and padded[0] == height
    least = (*padded[:-2], padded[-2] - height + 1, padded[-1] - width + 1)
    checked = (padded[0], *wanted) if vector else wanted
    fits = len(checked) == len(padded) and all(
        low <= extent <= high for low, extent, high in zip(least, checked, padded, strict=True)
    )
    if not fits:
        allowed = ",".join(
            str(high) if low == high else f"{low}-{high}"
            for low, high in zip(least, padded, strict=True)
        )
        raise DamagedError(
            f"{_NAME} of shape {shape} cannot hold a tensor of {wanted}; it holds ({allowed})"
        )

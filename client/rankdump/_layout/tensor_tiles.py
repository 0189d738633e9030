"""Tiles of a tensor: a view with one axis in blocks, the one copy that makes it whole or fills it,
and the original shape that a header states. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rankdump._kernels.array_kernels import copy_array
from rankdump.errors import CorruptedError

TileArray: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorTiles:
    """A tensor as it lies in memory, its axes in the order in which it is wanted."""

    view: TileArray
    split: int | None = None
    """The axis that is in blocks; the axis behind it has the elements of a block."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, with the padding of the last block."""
        shape, at = self.view.shape, self.split
        if at is None:
            return shape
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])

    def reorder(self, order: Sequence[int]) -> TensorTiles:
        """Return the same with its axes in another order; numbers as `shape` counts them."""
        at = self.split
        if at is None:
            return TensorTiles(transpose_axes(self.view, order))
        axes: list[int] = []
        for axis in order:
            axes += [at, at + 1] if axis == at else [axis + (axis > at)]
        return TensorTiles(transpose_axes(self.view, axes), list(order).index(at))

    def copy_elements(self, shape: tuple[int, ...]) -> TileArray:
        """Return the first elements of each axis, contiguous."""
        whole = np.empty(shape, self.view.dtype)
        for place, part in self._pairs(whole):
            copy_array(place, part)
        return whole

    def fill_from(self, whole: TileArray) -> None:
        """Copy a tensor of at most this shape into the tiles; the padding stays as it is."""
        for place, part in self._pairs(whole):
            copy_array(part, place)

    def _pairs(self, whole: TileArray) -> Iterator[tuple[TileArray, TileArray]]:
        """Yield pieces of a tensor and their places here: whole blocks, then the rest."""
        at, view = self.split, self.view
        if at is None:
            yield whole, view[tuple(map(slice, whole.shape))]
            return
        before, behind = whole.shape[:at], whole.shape[at + 1 :]
        block = view.shape[at + 1]
        blocks, rest = divmod(whole.shape[at], block)
        lead, tail = tuple(map(slice, before)), tuple(map(slice, behind))
        full = whole[(*lead, slice(blocks * block))].reshape(*before, blocks, block, *behind)
        yield full, view[(*lead, slice(blocks), slice(block), *tail)]
        if rest:
            last = whole[(*lead, slice(blocks * block, None))]
            yield last, view[(*lead, blocks, slice(rest), *tail)]


def transpose_axes(array: TileArray, axes: Sequence[int]) -> TileArray:
    """Return a view with the axes in another order."""
    return cast("TileArray", array.transpose(tuple(axes)))


CUBE_SIZE = 16
"""Rows of a block, and C0 of elements that have more than one byte on the device."""
BYTE_CUBE_SIZE = 32
"""C0 of elements of one byte."""


@dataclass(frozen=True, slots=True)
class OriginalLayout:
    """A tensor's layout before the device changed it."""

    shape: tuple[int, ...] = ()
    """In the format that the tensor is converted to, as msaccucmp takes it; empty: not known."""
    groups: int = 0
    """Of a grouped convolution; 0 and 1 are none."""
    c0: int = 0
    """Elements of a block; 0: that of the shape, or the usual one for the size of an element."""


def name_extents(letters: str, origin: OriginalLayout) -> dict[str, int]:
    """Return the original extents by their letters; CorruptedError when there are not as many."""
    if len(origin.shape) != len(letters) or 0 in origin.shape:
        raise CorruptedError(
            f"the original shape is {origin.shape}, but {letters} needs {len(letters)} extents "
            "above 0, and this format cannot be read without it"
        )
    return dict(zip(letters, origin.shape, strict=True))


def get_block_size(shape: tuple[int, ...], origin: OriginalLayout, source: str) -> int:
    """Return C0, the last extent; CorruptedError when the header contradicts itself."""
    c0 = shape[-1]
    if c0 == 0 or origin.c0 not in (0, c0):
        declared = f", but its format word declares {origin.c0}" if origin.c0 else ""
        raise CorruptedError(f"{source} of shape {shape} has blocks of {c0}{declared}")
    return c0


def get_usual_block_size(item_bytes: int, origin: OriginalLayout) -> int:
    """Return C0 for a tensor that is to be laid out (GE's rule)."""
    return origin.c0 or (BYTE_CUBE_SIZE if item_bytes == 1 else CUBE_SIZE)


def check_dimensions(shape: tuple[int, ...], rank: int, source: str) -> None:
    """Reject a shape that has another number of extents than its format."""
    if len(shape) != rank:
        raise CorruptedError(f"{source} needs {rank} extents, but the shape is {shape}")

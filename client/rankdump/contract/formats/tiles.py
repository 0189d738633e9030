"""A view of a tensor with one axis in blocks, and the one copy that makes it whole or fills it.

What lies together on both sides moves as one element: numpy then does in one step what would be
sixteen. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_PAGE_BYTES = 4096
_LINES = 4096
"""Cache lines that a core keeps at hand."""
_FAR_TILE = 128, 16
"""Elements that follow each other in the source, and in the target, where neighbours of the target
are pages apart in the source: more pages would not stay at hand."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A tensor as it lies in memory, its axes in the order in which it is wanted."""

    view: Array
    split: int | None = None
    """The axis that stands as blocks, with the elements of a block on the axis behind it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, with the padding of the last block."""
        shape, at = self.view.shape, self.split
        if at is None:
            return shape
        return (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])

    def ordered(self, order: Sequence[int]) -> Tiles:
        """Return the same with its axes in another order; numbers as `shape` counts them."""
        at = self.split
        if at is None:
            return Tiles(turned(self.view, order))
        axes: list[int] = []
        for axis in order:
            axes += [at, at + 1] if axis == at else [axis + (axis > at)]
        return Tiles(turned(self.view, axes), list(order).index(at))

    def read(self, shape: tuple[int, ...]) -> Array:
        """Return the first elements of each axis, contiguous."""
        whole = np.empty(shape, self.view.dtype)
        for place, part in self._pairs(whole):
            _move(place, part)
        return whole

    def fill(self, whole: Array) -> None:
        """Put a tensor of at most this shape where it belongs; the padding stays as it is."""
        for place, part in self._pairs(whole):
            _move(part, place)

    def _pairs(self, whole: Array) -> Iterator[tuple[Array, Array]]:
        """Yield pieces of a tensor and where they stand here: whole blocks, then what is left."""
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


def turned(array: Array, axes: Sequence[int]) -> Array:
    """Return a view with the axes in another order."""
    return cast("Array", array.transpose(tuple(axes)))


def _move(target: Array, source: Array) -> None:
    if not target.size:
        return
    target, source = target.squeeze(), source.squeeze()
    if target.ndim and target.strides[-1] == source.strides[-1] == target.itemsize:
        run = np.dtype((np.void, target.shape[-1] * target.itemsize))
        target, source = target.view(run)[..., 0], source.view(run)[..., 0]
    for piece in _pieces(source):
        np.copyto(target[(*piece, ...)], source[(*piece, ...)])


def _pieces(source: Array) -> Iterator[tuple[slice, ...]]:
    """Yield parts of a copy that the cache holds from the first use of a line to its last.

    numpy goes through the target from its first element to its last, which takes what lies
    together in the source at times that are far apart.
    """
    steps = list(source.shape)
    last, nearest = source.ndim - 1, int(np.argmin(source.strides)) if source.ndim else 0
    if nearest < last and source.strides[last] >= _PAGE_BYTES:
        steps[nearest], steps[last] = _FAR_TILE
    else:
        lines = 1
        for axis in range(last, nearest, -1):
            if lines * steps[axis] > _LINES:
                steps[axis] = max(1, _LINES // lines)
                break
            lines *= steps[axis]
    cuts = (
        [slice(start, start + step) for start in range(0, extent, step)]
        for extent, step in zip(source.shape, steps, strict=True)
    )
    return product(*cuts)

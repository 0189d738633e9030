"""A view of a tensor with one axis in blocks, and the one copy that makes it whole or fills it.

What lies together on both sides moves as one element: numpy then does in one step what would be
sixteen. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


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
            return Tiles(self.view.transpose(tuple(order)))
        axes: list[int] = []
        for axis in order:
            axes += [at, at + 1] if axis == at else [axis + (axis > at)]
        return Tiles(self.view.transpose(axes), list(order).index(at))

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


def _move(target: Array, source: Array) -> None:
    if not target.size:
        return
    if target.ndim and target.strides[-1] == source.strides[-1] == target.itemsize:
        run = np.dtype((np.void, target.shape[-1] * target.itemsize))
        target, source = target.view(run), source.view(run)
    np.copyto(target, source)

"""FRACTAL_Z of a grouped convolution: several groups share a block, each on its own diagonal. Pure.

Source: ascend-formats.md 3.4, after GE. Of G groups with `cin` channels and `cout` filters each,
E stand in one block, where E is the fewest that fill blocks of C0 by 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

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
from rankdump.contract.formats.tiles import Array

_NAME = "FRACTAL_Z"


@dataclass(frozen=True, slots=True)
class Plan:
    """How the groups of one tensor are laid out."""

    groups: int
    cin: int
    cout: int
    height: int
    width: int
    c0: int

    @property
    def together(self) -> int:
        """Groups in one block."""
        in_blocks = math.lcm(self.cin, self.c0) // self.cin
        out_blocks = math.lcm(self.cout, CUBE) // self.cout
        return min(math.lcm(in_blocks, out_blocks), self.groups)

    @property
    def extents(self) -> tuple[int, int, int, int, int, int]:
        """Blocks of groups, C1, H, W, filters, C0."""
        blocks = -(-self.groups // self.together)
        c1 = -(-self.together * self.cin // self.c0)
        filters = -(-self.together * self.cout // CUBE) * CUBE
        return blocks, c1, self.height, self.width, filters, self.c0

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As the device has it."""
        blocks, c1, height, width, filters, c0 = self.extents
        return blocks * c1 * height * width, filters // CUBE, CUBE, c0


def read(array: Array, origin: Origin, wanted: str) -> Array:
    """Return the tensor in a plain order."""
    check_rank(array.shape, 4, _NAME)
    extents = named_extents(wanted, origin)
    plan = _plan(extents, origin.groups, block_of(array.shape, origin, _NAME))
    if plan.shape != array.shape:
        raise DamagedError(
            f"{_NAME} of shape {array.shape} cannot hold {wanted} of {origin.shape} in "
            f"{origin.groups} groups: that takes {plan.shape}"
        )
    whole = np.empty(origin.shape, array.dtype)
    for filters, part in _pairs(_as_nchw(whole, wanted), array.reshape(plan.extents), plan):
        np.copyto(filters, part)
    return whole


def lay_out(array: Array, letters: str, origin: Origin) -> Array:
    """Lay a plain tensor out."""
    check_rank(array.shape, 4, letters)
    extents = named_extents(letters, Origin(array.shape))
    plan = _plan(extents, origin.groups, usual_block(array.itemsize, origin))
    made = np.zeros(plan.extents, array.dtype)
    for filters, part in _pairs(_as_nchw(array, letters), made, plan):
        np.copyto(part, filters)
    return made.reshape(plan.shape)


def _plan(extents: dict[str, int], groups: int, c0: int) -> Plan:
    filters = extents["N"]
    if filters % groups:
        raise DamagedError(f"{filters} filters do not divide into {groups} groups")
    return Plan(groups, extents["C"], filters // groups, extents["H"], extents["W"], c0)


def _pairs(whole: Array, blocks: Array, plan: Plan) -> Iterator[tuple[Array, Array]]:
    """Yield pieces of filters (n, c, h, w) and where they stand; one piece is of one block."""
    for group in range(plan.groups):
        block, within = divmod(group, plan.together)
        filters = slice(group * plan.cout, (group + 1) * plan.cout)
        rows = slice(within * plan.cout, (within + 1) * plan.cout)
        first, channel = within * plan.cin, 0
        while channel < plan.cin:
            c1, at = divmod(first + channel, plan.c0)
            count = min(plan.c0 - at, plan.cin - channel)
            part = blocks[block, c1, :, :, rows, at : at + count]
            yield whole[filters, channel : channel + count], part.transpose(2, 3, 0, 1)
            channel += count


def _as_nchw(array: Array, letters: str) -> Array:
    return array.transpose([letters.index(letter) for letter in "NCHW"])

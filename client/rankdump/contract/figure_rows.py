"""Tensors of which only figures are kept, many in one frame: what a row is made of. Pure.

A step has thousands of them, and each costs as little as its row: what repeats from step to step
is one value, which both sides make once and remember.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rankdump.contract.key import Side

MAX_ROWS = 1024
"""Rows of one frame at most."""


class TensorKind(NamedTuple):
    """What is the same about a tensor in every iteration.

    Where each call has a name of its own every tensor makes one: of all frozen values this sort is
    made, and found in a dictionary, fastest.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: Side
    slot: int
    dtype: str
    shape: tuple[int, ...]
    byte_count: int
    """Length of the elements in C order, little endian."""
    argument: str = ""
    """Where in the call the tensor stood: `args.0`, `kwargs.mask`; empty when unknown."""
    constant: bool = False
    """It never changes: kept once for its graph, whatever the iteration."""
    model: str = ""
    """Name of its model, of which a plan that names them all knows better."""


@dataclass(frozen=True, slots=True)
class FigureRows:
    """Tensors of one iteration in their order; three columns of one length, at most MAX_ROWS."""

    iteration: int
    kinds: tuple[TensorKind, ...]
    timestamps_us: tuple[int, ...]
    """Microseconds since the epoch; unique within a rank."""
    figures: tuple[str, ...]
    """Texts of the plan's statistics, joined by commas as a table has them."""
    switched_on: bool = False
    """The script itself switched dumping on: the plan's iterations do not matter."""
    degraded: bool = False
    """There was no room for the elements: the figures are all that is kept."""

    def __len__(self) -> int:
        return len(self.kinds)

"""Hands over what calls read and wrote: tensors, and numbers of Python where they are wanted."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rankdump.adapters.api_calls import ApiLeaf, argument_of, scalar_of
from rankdump.adapters.torch.observing import Observer
from rankdump.contract.key import Side
from rankdump.hook import Leaf

_NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
_HIDDEN = "_"
"""Begins the words for what torch's functions tell each other, as the depth of a warning."""


class Tensors:
    """What is dumped of the leaves of a call."""

    def __init__(self, observer: Observer, *, filtered: bool) -> None:
        """`filtered` leaves only floating-point tensors with a dimension and elements."""
        self._observer = observer
        self._filtered = filtered

    def hand_over(
        self, op_type: str, name: str, side: Side, leaves: Iterable[ApiLeaf], *, recomputed: bool
    ) -> list[Leaf]:
        """Hand over one side of a call; return what was, as tensors."""
        kept: list[Leaf] = []
        for leaf in leaves:
            value, scalar = leaf.value, ""
            if not isinstance(value, Tensor):
                hidden = side is Side.INPUT and leaf.word.startswith(_HIDDEN)
                if self._filtered or hidden:
                    continue
                scalar = scalar_of(value)
                value = _number(value, scalar)
            elif self._filtered and not _usual(value):
                continue
            if value is not None:
                place = argument_of(side, leaf.path, leaf.word, scalar, recomputed)
                kept.append(Leaf(leaf.slot, place, value))
        self._observer.tensors(op_type, name, side, kept)
        return kept


def _usual(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0


def _number(value: object, scalar: str) -> Tensor | None:
    """Return a number of Python as a tensor without dimensions; None for anything else."""
    if not scalar:
        return None
    try:
        return torch.tensor(value, dtype=_NUMBERS[scalar], device="cpu")
    except (OverflowError, RuntimeError):  # an int may have more bits than any file has
        return None

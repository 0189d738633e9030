"""Hands over what calls read and wrote: tensors, and numbers of Python where they are wanted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

from rankdump.adapters.torch.observing import Observer
from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import ApiPlace
from rankdump.hook import Leaf

_NUMBERS: dict[type, torch.dtype] = {int: torch.int64, float: torch.float64, bool: torch.bool}
_HIDDEN = "kwargs._"
"""What torch's functions tell each other, as the depth of a warning."""


class Tensors:
    """What is dumped of the leaves of a call."""

    def __init__(self, observer: Observer, *, filtered: bool) -> None:
        """`filtered` leaves only floating-point tensors with a dimension and elements."""
        self._observer = observer
        self._filtered = filtered

    def hand_over(
        self, op_type: str, name: str, side: Side, leaves: Iterable[Leaf], *, recomputed: bool
    ) -> list[Leaf]:
        """Hand over one side of a call; return what was, as tensors."""
        kept: list[Leaf] = []
        for leaf in leaves:
            value, scalar = leaf.value, ""
            if not isinstance(value, Tensor):
                if self._filtered or leaf.argument.startswith(_HIDDEN):
                    continue
                scalar, value = type(value).__name__, _number(value)
            elif self._filtered and not _usual(value):
                continue
            if value is not None:
                place = _place(side, leaf.argument, scalar, recomputed)
                kept.append(Leaf(leaf.slot, place, value))
        self._observer.tensors(op_type, name, side, kept)
        return kept


def _usual(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0 and tensor.numel() > 0


def _number(value: object) -> Tensor | None:
    """Return a number of Python as a tensor without dimensions; None for anything else."""
    kind = _NUMBERS.get(type(value))
    if kind is None:
        return None
    try:
        return torch.tensor(value, dtype=kind, device="cpu")
    except (OverflowError, RuntimeError):  # an int may have more bits than any file has
        return None


@lru_cache(maxsize=1 << 12)
def _place(side: Side, argument: str, scalar: str, recomputed: bool) -> str:
    """Return where a leaf of a call stood, as its tensor's name says it."""
    path = re.sub(r"[/\\\0:]", "_", argument.partition(".")[2])
    return ApiPlace(side, path, scalar, recomputed).argument

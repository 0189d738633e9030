"""What is known of a call for pairing it, and what a pairing says. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlowCall:
    """One forward call."""

    api: str
    """Its name without kind and number: `Conv2d`, `max_pool2d`, or the path of a layer."""
    shared: str
    """Its kind and name as all frameworks have it: `shared_name`."""
    inputs: tuple[Shape, ...] = ()
    """Shapes of its tensors in the order in which they were dumped."""
    outputs: tuple[Shape, ...] = ()

    @property
    def key(self) -> tuple[str, tuple[Shape, ...], tuple[Shape, ...]]:
        """What two calls have in common that may stand for each other."""
        return self.shared, self.inputs, self.outputs


@dataclass(frozen=True, slots=True)
class Span:
    """Calls of one side that stand for calls of the other, as places in their lists.

    One of the two is empty where they have no partner.
    """

    a: range
    b: range

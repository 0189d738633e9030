"""Decides which forward call a recomputation repeats. Pure: sees calls, never tensors.

Activation checkpointing comes in two kinds. The reentrant one runs a region inside an autograd
function and without gradients: its calls follow the creation of that function's node. The other
one watches what the region saves: its calls began under the same watcher. Both are found from
the node whose backward runs, because nodes are numbered as the forward made them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rankdump.adapters.torch.fingerprint import Fingerprint
from rankdump.contract.key import Side
from rankdump.hook import Names, Scope


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the backward: one node of one run through the graph."""

    task: int
    node: int
    """Number of the node, in the order in which its thread made nodes."""
    function: bool
    """It is an autograd function written in Python."""


class Surroundings(NamedTuple):
    """What a forward call began in."""

    thread: int
    next_node: int = 0
    """Number of the first node it could make."""
    watcher: int = 0
    """Which hook watched what it saved for the backward; 0 for none."""
    grad: bool = True


class Arrivals:
    """Which gradients of one run of a backward operator have been seen.

    A recomputed call shares them with its forward: their gradients are one operator's.
    """

    __slots__ = ("_awaited", "_read", "_seen")

    def __init__(self) -> None:
        self._awaited: set[tuple[Side, int]] = set()
        self._read: set[int] = set()
        self._seen: set[tuple[Side, int]] = set()

    def expect(self, side: Side, slot: int, identity: int) -> None:
        """Expect a gradient; the run ends with those of what the forward read.

        One tensor that was read and returned has one gradient: it ends the run when it has been
        seen on both sides.
        """
        if side is Side.INPUT:
            self._read.add(identity)
        if identity in self._read:
            self._awaited.add((side, slot))

    def begins(self, side: Side, slot: int) -> bool:
        """Note a gradient; return whether a run of the operator begins with it."""
        begins = not self._seen or (side, slot) in self._seen
        if begins:
            self._seen.clear()
        self._seen.add((side, slot))
        return begins

    @property
    def complete(self) -> bool:
        """Whether this run has given all gradients that are expected of it."""
        return self._awaited <= self._seen


@dataclass(slots=True, eq=False)
class Call:
    """One forward call of one operator."""

    scope: Scope
    number: int
    position: int
    """Its place among all forward calls of the iteration."""
    began_in: Surroundings
    fingerprint: Fingerprint | None = None
    repeated: int = 0
    watched: set[tuple[Side, int]] = field(default_factory=lambda: set())
    """Slots whose gradients the forward call itself waits for."""
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def names(self) -> Names:
        """Its names, and those of what follows from it."""
        return self.scope.names(self.number)


def region_start(program: Sequence[Call], step: Step) -> int | None:
    """Return the position of a region's first call; None when the step does not tell.

    The program is what one thread called, in order.
    """
    after = bisect_right(program, step.node, key=lambda call: call.began_in.next_node)
    if step.function and after < len(program) and not program[after].began_in.grad:
        return program[after].position
    watcher = program[after - 1].began_in.watcher if after else 0
    if not watcher:
        return None
    return next(call.position for call in program if call.began_in.watcher == watcher)


def paired(
    calls: Sequence[Call], *, after: int | None, same_data: Callable[[Call], bool]
) -> tuple[Call | None, str]:
    """Return the call that is repeated, and why this one; the calls are one operator's, in order.

    `after` is the position behind which the region goes on, None when that is not known.
    """
    if not calls:
        return None, "never called before"
    following = [call for call in calls if after is not None and call.position > after]
    if following:
        return following[0], "next in the region"
    same = [call for call in calls if same_data(call)]
    # Regions are repeated in reverse: of those repeated least, the last one.
    last = min(same or calls, key=lambda call: (call.repeated, -call.position))
    return last, "same data" if same else "last one not repeated"

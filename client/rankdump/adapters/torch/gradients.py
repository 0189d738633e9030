"""Hooks on tensors that see the gradients arriving at and leaving an operator.

Module backward hooks are not used: they wrap arguments and results in a node of autograd, and
in-place modules then fail. A tensor hook sees the gradient summed over all consumers, and
changes nothing.

A backward operator is one event, recorded when its first gradient arrives; what autograd does
inside it cannot be seen from here.
"""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import traced, unwrapped
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.pairing import Call
from rankdump.contract.key import Side
from rankdump.hook import Leaf

# Seen from the backward, what the forward wrote is read and what it read is written.
_BACKWARD_SIDE = {Side.INPUT: Side.OUTPUT, Side.OUTPUT: Side.INPUT}


class Arrivals:
    """Which gradients of one run of a backward operator have been seen."""

    __slots__ = ("_seen",)

    def __init__(self) -> None:
        self._seen: set[tuple[Side, int]] = set()

    def begins(self, side: Side, slot: int) -> bool:
        """Note a gradient; return whether a run of the operator begins with it."""
        begins = not self._seen or (side, slot) in self._seen
        if begins:
            self._seen.clear()
        self._seen.add((side, slot))
        return begins


class Gradients:
    """Places the hooks of one attached model."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._on_leaves: list[RemovableHandle] = []

    def watch(
        self, call: Call, side: Side, leaves: Iterable[Leaf], arrivals: Arrivals, *, again: bool
    ) -> None:
        """Wait for the gradients of what a call read or wrote.

        `again` says the call is being recomputed: slots its forward already waits for are left
        alone, so that no gradient is recorded twice. Either way they carry the forward's number.
        """
        name = call.scope.gradient(call.number)
        # The gradients arriving make the event, whether or not their values are wanted.
        if side is Side.INPUT and not self._observer.recorder.wants(name, Side.OUTPUT):
            return
        for leaf in leaves:
            tensor = leaf.value
            if not isinstance(tensor, Tensor) or not _hookable(tensor):
                continue
            place = (side, leaf.slot)
            if again and place in call.watched:
                continue
            if not again:
                call.watched.add(place)
            register = cast("Callable[[object], RemovableHandle]", tensor.register_hook)
            handle = register(_Arrival(self._observer, call, side, leaf, arrivals))
            if tensor.is_leaf:
                self._on_leaves.append(handle)

    def release(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        handles, self._on_leaves = self._on_leaves, []
        for handle in handles:
            handle.remove()


class _Arrival:
    """The hook of one slot; it holds what describes a tensor, never one."""

    __slots__ = ("_argument", "_arrivals", "_call", "_observer", "_side", "_slot")

    def __init__(
        self, observer: Observer, call: Call, side: Side, leaf: Leaf, arrivals: Arrivals
    ) -> None:
        self._observer = observer
        self._call = call
        self._side = side
        self._slot = leaf.slot
        self._argument = leaf.argument
        self._arrivals = arrivals

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        if not traced():
            shielded(self._take, self._observer.failed, gradient)

    def _take(self, gradient: Tensor) -> None:
        if not self._observer.armed:
            return
        scope = self._call.scope
        name = scope.gradient(self._call.number)
        if self._arrivals.begins(self._side, self._slot):
            self._observer.event(name)
        leaf = Leaf(self._slot, self._argument, gradient)
        self._observer.tensors(scope.op_type, name, _BACKWARD_SIDE[self._side], [leaf])


def _hookable(tensor: Tensor) -> bool:
    """Return whether autograd will bring a gradient here that no one else records."""
    if not tensor.requires_grad or isinstance(tensor, Parameter):
        return False
    # Inside torch.func a hook would become part of the function that is transformed.
    return unwrapped(tensor) is tensor

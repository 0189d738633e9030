"""Hooks on tensors that see the gradients arriving at and leaving an operator.

Module backward hooks are not used: they wrap arguments and results in a node of autograd, and
in-place modules then fail. A tensor hook sees the gradient summed over all consumers, and
changes nothing.

A backward operator is one event, recorded when its first gradient arrives; what autograd does
inside it cannot be seen from here. It is over when the gradients of all that the forward read
have arrived; one of which none is expected is over as soon as it was seen.
"""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from rankdump.adapters.torch.describing import Describer
from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import traced, unwrapped
from rankdump.adapters.torch.observing import Observer
from rankdump.adapters.torch.pairing import Call
from rankdump.contract.key import Side
from rankdump.hook import Leaf

# Seen from the backward, what the forward wrote is read and what it read is written.
_BACKWARD_SIDE = {Side.INPUT: Side.OUTPUT, Side.OUTPUT: Side.INPUT}


class Gradients:
    """Places the hooks of one attached model."""

    def __init__(self, observer: Observer, describer: Describer) -> None:
        self._observer = observer
        self._describer = describer
        self._hooks = TensorHooks()

    def watch(self, call: Call, side: Side, leaves: Iterable[Leaf], *, again: bool) -> None:
        """Wait for the gradients of what a call read or wrote.

        `again` says the call is being recomputed: slots its forward already waits for are left
        alone, so that no gradient is recorded twice. Either way they carry the forward's number.
        """
        name = call.names.gradient
        # The gradients arriving make the event, whether or not their values are wanted.
        if side is Side.INPUT and not self._observer.wants(name, Side.OUTPUT):
            return
        for leaf in leaves:
            tensor = leaf.value
            if not isinstance(tensor, Tensor) or not hookable(tensor):
                continue
            place = (side, leaf.slot)
            if again and place in call.watched:
                continue
            if not again:
                call.watched.add(place)
            self._hooks.place(tensor, _Arrival(self, call, side, leaf))
            call.arrivals.expect(side, leaf.slot, id(tensor))

    def release(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        self._hooks.release()

    def take(self, call: Call, side: Side, leaf: Leaf) -> None:
        """Hand over a gradient that has arrived, on that side of the forward."""
        observer, name = self._observer, call.names.gradient
        if not observer.armed:
            return
        if call.arrivals.begins(side, leaf.slot):
            observer.event(name)
            if self._describer.active:
                shielded(self._describer.gradient, self.failed, call)
        observer.tensors(call.scope.op_type, name, _BACKWARD_SIDE[side], [leaf])
        if call.arrivals.complete:
            observer.settled(name)

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.failed(error)


class _Arrival:
    """The hook of one slot; it holds what describes a tensor, never one."""

    __slots__ = ("_argument", "_call", "_gradients", "_side", "_slot")

    def __init__(self, gradients: Gradients, call: Call, side: Side, leaf: Leaf) -> None:
        self._gradients = gradients
        self._call = call
        self._side = side
        self._slot = leaf.slot
        self._argument = leaf.argument

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        if not traced():
            leaf = Leaf(self._slot, self._argument, gradient)
            shielded(self._gradients.take, self._gradients.failed, self._call, self._side, leaf)


class TensorHooks:
    """The hooks on tensors of one model: those of leaves stay in place for later backwards."""

    def __init__(self) -> None:
        self._on_leaves: list[RemovableHandle] = []

    def place(self, tensor: Tensor, hook: Callable[[Tensor], None]) -> None:
        """Have a hook given each gradient of a tensor."""
        handle = cast("Callable[[object], RemovableHandle]", tensor.register_hook)(hook)
        if tensor.is_leaf:
            self._on_leaves.append(handle)

    def release(self) -> None:
        """Remove those that may outlive the iteration."""
        handles, self._on_leaves = self._on_leaves, []
        for handle in handles:
            handle.remove()


def hookable(tensor: Tensor) -> bool:
    """Return whether autograd will bring a gradient here that no one else records."""
    if not tensor.requires_grad or isinstance(tensor, Parameter):
        return False
    # Inside torch.func a hook would become part of the function that is transformed.
    return unwrapped(tensor) is tensor

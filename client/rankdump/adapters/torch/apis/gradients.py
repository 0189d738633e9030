"""Hooks on what calls returned, which see the gradients that arrive there."""

# torch's stubs leave hooks and handles untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from torch import Tensor

from rankdump.adapters.api_calls import argument_of
from rankdump.adapters.torch.gradients import TensorHooks, hookable
from rankdump.adapters.torch.guard import shielded, uncompiled
from rankdump.adapters.torch.internals import traced
from rankdump.adapters.torch.observing import Observer
from rankdump.contract.key import Side
from rankdump.contract.layout.api_name import ApiCall, place_of
from rankdump.hook import Leaf

REPEATED = (
    "a backward ran again over one graph (retain_graph): its gradients have the names that those "
    "of the first run have; where they differ only the first run's files are kept, and the others "
    "are counted as dropped"
)


class ApiGradients:
    """Places the hooks of one attached model."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._hooks = TensorHooks()

    def watch(self, call: ApiCall, written: Iterable[Leaf]) -> None:
        """Wait for the gradients of what a forward call returned: tensors with their places."""
        backward = Backward(self._observer, call)
        for leaf in written:
            tensor = leaf.value
            if isinstance(tensor, Tensor) and hookable(tensor):
                self._hooks.place(tensor, _Arrival(backward, leaf.slot, leaf.argument))

    def release(self) -> None:
        """Remove the hooks from tensors that may outlive the iteration."""
        self._hooks.release()


class Backward:
    """The backward of one call, as often as it runs."""

    def __init__(self, observer: Observer, call: ApiCall) -> None:
        self._observer = observer
        self._op_type = call.op_type
        self._name = f"{call.stem}_backward"
        self._seen: set[int] = set()

    def take(self, leaf: Leaf) -> None:
        """Hand over a gradient that has arrived."""
        observer = self._observer
        if not observer.armed:
            return
        again = leaf.slot in self._seen
        if again:
            observer.recorder.warn_once(REPEATED)
        if again or not self._seen:
            self._seen.clear()
            observer.event(self._name)
        self._seen.add(leaf.slot)
        observer.tensors(self._op_type, self._name, Side.INPUT, (leaf,))
        observer.settled(self._name)

    def failed(self, error: Exception) -> None:
        """Report that a hook could not do its work."""
        self._observer.failed(error)


class _Arrival:
    """The hook of one output; it holds what describes a tensor, never one."""

    __slots__ = ("_argument", "_backward", "_slot")

    def __init__(self, backward: Backward, slot: int, argument: str) -> None:
        self._backward = backward
        self._slot = slot
        self._argument = _arrives_at(argument)

    @uncompiled
    def __call__(self, gradient: Tensor) -> None:
        if not traced():
            leaf = Leaf(self._slot, self._argument, gradient)
            shielded(self._backward.take, self._backward.failed, leaf)


@lru_cache(maxsize=1 << 10)
def _arrives_at(argument: str) -> str:
    """Return where the gradient of an output arrives: it is the backward's input.

    That the output was recomputed does not show in it.
    """
    place = place_of(argument)
    return argument if place is None else argument_of(Side.INPUT, place.path, place.word)

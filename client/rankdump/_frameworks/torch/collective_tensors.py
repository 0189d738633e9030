"""Operators of torch for collectives and messages, with the positions of their arguments, and the
tensors of those calls that the plan names: inputs are recorded when a call begins, outputs when
they are known to be complete and the script cannot have changed them yet.

This is the case when control returns to the script from a wait: of a synchronous call, of
`Work.wait`, of `wait_tensor`; at the end of a backward, after the reducer of
DistributedDataParallel has waited for its buckets; and at the end of the iteration if nothing else
refers to the output. It is not the case in the callback of a future, because a script that waits
for the future goes on at the same time. Nothing in this module waits, communicates, or changes a
tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rankdump._core.events import EventKind
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import Recorder
from rankdump._core.selection import extract_op_type
from rankdump._frameworks.operator_names import CallLeaf
from rankdump._frameworks.torch.internals import disable_function_modes, has_only_reference
from rankdump._frameworks.torch.module_hooks import exclude_from_compilation
from rankdump._frameworks.torch.tensors import TorchObserver

# The engine of autograd is a C++ class without stubs.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false

NOT_WAITED = "not_waited"
"""Drop reason of an output for which the script did not wait in any known way."""
_READ_BY_ROOT = frozenset({EventKind.BROADCAST, EventKind.SCATTER})
_WRITTEN_BY_ROOT = frozenset({EventKind.REDUCE, EventKind.GATHER})


@dataclass(frozen=True, slots=True)
class CollectiveOperands:
    """Tensors that one member of a collective or message reads and writes."""

    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()


def choose_operands(
    kind: EventKind,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    *,
    is_root: bool,
) -> CollectiveOperands:
    """Return the tensors that a member really reads and writes: in some operations most members do
    only one of both.

    Members of a broadcast other than the root pass memory that is only overwritten, and members of
    a reduction other than the root get back whatever the backend left in it.
    """
    if not is_root and kind in _READ_BY_ROOT:
        inputs = ()
    if not is_root and kind in _WRITTEN_BY_ROOT:
        outputs = ()
    return CollectiveOperands(inputs, outputs)


@dataclass(slots=True, eq=False)
class CollectiveTensorCall:
    """A call whose tensors are recorded, until its outputs are read or known to be lost."""

    observers: Sequence[tuple[TorchObserver, str]]
    """Observers of the recorders that selected the call, each with the call's name in that
    recorder.
    """
    outputs: Sequence[Tensor]
    _open: list[None] = field(default_factory=lambda: [None])

    @property
    def is_open(self) -> bool:
        """Whether the outputs are neither read nor lost."""
        return bool(self._open)

    def record_inputs(self, tensors: Sequence[Tensor]) -> None:
        """Record the inputs; called before the operation, which may overwrite them."""
        leaves = [CallLeaf(slot, f"args.{slot}", each) for slot, each in enumerate(tensors)]
        for observer, name in self.observers:
            observer.record_tensors(extract_op_type(name), name, TensorSide.INPUT, leaves)

    def record_outputs(self) -> None:
        """Record the outputs, which are complete, and end the call."""
        if not self._close():
            return
        leaves = [CallLeaf(slot, f"out.{slot}", each) for slot, each in enumerate(self.outputs)]
        for observer, name in self.observers:
            observer.record_tensors(extract_op_type(name), name, TensorSide.OUTPUT, leaves)
            observer.end_call(name)

    def lose_outputs(self) -> None:
        """Count the outputs as lost, and end the call."""
        if not self._close():
            return
        for observer, name in self.observers:
            if observer.is_selected(name, TensorSide.OUTPUT):
                place = (observer.graph, extract_op_type(name), name, TensorSide.OUTPUT)
                for slot in range(len(self.outputs)):
                    observer.recorder.count_loss(*place, slot, NOT_WAITED)
            observer.end_call(name)

    def settle(self) -> None:
        """Record the outputs if nothing can change them any more, such as those of a call in C++;
        else count them as lost.

        A work that is still running refers to its tensors. Outputs on an accelerator are lost,
        because no stream may have waited for them.
        """
        on_device = any(each.device.type != "cpu" for each in self.outputs)
        if not on_device and has_only_reference(self.outputs):
            self.record_outputs()
        else:
            self.lose_outputs()

    def fail(self) -> None:
        """End a call that raised and so has no outputs."""
        if self._close():
            for observer, name in self.observers:
                observer.end_call(name, raised=True)

    def _close(self) -> bool:
        """Close the call; return True only the first time. May be called from any thread."""
        try:
            self._open.pop()
        except IndexError:
            return False
        return True


def begin_tensor_call(
    listeners: Sequence[tuple[Recorder, int, str]],
    read_operands: Callable[[], CollectiveOperands],
) -> CollectiveTensorCall | None:
    """Record the inputs of a call for the recorders that selected it; None if none did.

    `listeners` are the recorders whose plan lists operators, each with the number of its model and
    the name of the call.
    """
    observers = [
        (TorchObserver(recorder, graph), name)
        for recorder, graph, name in listeners
        if any(recorder.is_wanted(graph, name, side) for side in TensorSide)
    ]
    if not observers:
        return None
    operands = read_operands()
    if not (operands.inputs or operands.outputs):
        return None
    call = CollectiveTensorCall(observers, operands.outputs)
    call.record_inputs(operands.inputs)
    return call


class OpenTensorCalls:
    """Calls whose outputs are not complete yet, by the object that the script will wait for.

    Tensors are kept alive until their call ends, at the latest at the end of the iteration; works
    are not kept alive.
    """

    def __init__(self, report_failure: Callable[[Exception], None]) -> None:
        self._report_failure = report_failure
        # No lock is taken, because a work may be released, and its callback run, at any line of
        # this thread.
        self._calls: dict[int, CollectiveTensorCall] = {}
        self._released: list[CollectiveTensorCall] = []
        """Calls whose works were released without a wait."""
        self._by_work: dict[int, CollectiveTensorCall] = {}
        self._by_memory: dict[int, CollectiveTensorCall] = {}

    def add(self, call: CollectiveTensorCall) -> None:
        """Add a call that has begun."""
        self._calls[id(call)] = call
        while self._released:
            self.end(self._released.pop(), CollectiveTensorCall.settle)

    def add_work(self, work: Any, call: CollectiveTensorCall) -> None:
        """Let a call end with the wait for its work; if the work is released before, the script did
        not wait.
        """
        self._by_work[id(work)] = call
        weakref.finalize(work, self._release_work, id(work)).atexit = False

    def add_memory(self, call: CollectiveTensorCall) -> None:
        """Let a call end with the wait for any of its tensors, which share one work."""
        for memory in {find_memory(each) for each in call.outputs if each.numel()}:
            earlier = self._by_memory.get(memory)
            if earlier is not None and earlier is not call:
                # An earlier call whose memory is overwritten now was never waited for.
                self.end(earlier, CollectiveTensorCall.lose_outputs)
            self._by_memory[memory] = call

    def end_wait(self, work: Any, *, raised: bool = False) -> None:
        """End the call whose work was waited for."""
        if self._by_work:
            self._end_waited(self._by_work.pop(id(work), None), raised=raised)

    def end_tensor_wait(self, tensor: Tensor, *, raised: bool = False) -> None:
        """End the call whose tensor was waited for."""
        if self._by_memory:
            self._end_waited(self._by_memory.get(find_memory(tensor)), raised=raised)

    def end_with_backward(self, call: CollectiveTensorCall, is_done: Callable[[], bool]) -> None:
        """Let a call that C++ made end with the running backward, if it is complete then.

        The reducer of DistributedDataParallel registers its wait after its last call. So the end is
        registered again when the engine reaches the first registration.
        """
        engine: Any = torch.autograd.Variable._execution_engine

        @exclude_from_compilation
        def read() -> None:
            try:
                if call.is_open and is_done():
                    self.end(call, CollectiveTensorCall.record_outputs)
            except Exception as error:
                self._report_failure(error)

        @exclude_from_compilation
        def register_again() -> None:
            try:
                engine.queue_callback(read)
            except Exception as error:
                self._report_failure(error)

        engine.queue_callback(register_again)

    def end(
        self,
        call: CollectiveTensorCall | None,
        how: Callable[[CollectiveTensorCall], None],
    ) -> None:
        """End a call with one of its methods; never raises."""
        if call is None:
            return
        self._calls.pop(id(call), None)
        for memory in [at for at, each in list(self._by_memory.items()) if each is call]:
            self._by_memory.pop(memory, None)
        try:
            with disable_function_modes():
                how(call)
        except Exception as error:
            self._report_failure(error)

    def end_all(self) -> None:
        """End all calls because their iteration ends; outputs that may still change are lost."""
        for call in list(self._calls.values()):
            self.end(call, CollectiveTensorCall.settle)
        self._by_work.clear()
        self._released.clear()

    def _end_waited(self, call: CollectiveTensorCall | None, *, raised: bool) -> None:
        how = CollectiveTensorCall.fail if raised else CollectiveTensorCall.record_outputs
        self.end(call, how)

    def _release_work(self, identity: int) -> None:
        call = self._by_work.pop(identity, None)
        if call is not None:
            self._released.append(call)


def find_memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, by which a later use of the memory is recognised."""
    return tensor.untyped_storage().data_ptr()


@dataclass(frozen=True, slots=True)
class CollectiveOperator:
    """Kind of an operator, and positions of its arguments, as in torch 2.13."""

    kind: EventKind
    group: int
    """Position of the process group."""
    sized: int | None = None
    """Position of the tensors whose element count is reported; it is equal on all members."""
    peer: int | None = None
    """Position of the other end of a message, as a rank within the group."""
    inputs: int | None = None
    """Position of the tensors that the operator reads."""
    outputs: int | None = None
    """Position of the tensors that the operator writes; equal to `inputs` if it works in place."""
    root: int | None = None
    """Position of the root, the only member that reads, or that gets a result, as a rank within the
    group.
    """


def _in_place(kind: EventKind, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 1, sized=0, inputs=0, outputs=0, root=root)


def _between(kind: EventKind, sized: int | None, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 2, sized=sized, inputs=1, outputs=0, root=root)


_GATHER = _between(EventKind.ALL_GATHER, 1)
_REDUCE_SCATTER = _between(EventKind.REDUCE_SCATTER, 1)
# The members may exchange parts of different sizes, so there is no common element count.
_ALL_TO_ALL = _between(EventKind.ALL_TO_ALL, None)
_BARRIER = CollectiveOperator(EventKind.BARRIER, 1)
COLLECTIVE_OPERATORS = {
    "allreduce_": _in_place(EventKind.ALL_REDUCE),
    "allreduce_coalesced_": _in_place(EventKind.ALL_REDUCE),
    "broadcast_": _in_place(EventKind.BROADCAST, root=2),
    "reduce_": _in_place(EventKind.REDUCE, root=3),
    "allgather_": _GATHER,
    "_allgather_base_": _GATHER,
    "allgather_coalesced_": _GATHER,
    "allgather_into_tensor_coalesced_": _GATHER,
    "reduce_scatter_": _REDUCE_SCATTER,
    "_reduce_scatter_base_": _REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "gather_": _between(EventKind.GATHER, 1, root=3),
    "scatter_": _between(EventKind.SCATTER, 0, root=3),
    "alltoall_": _ALL_TO_ALL,
    "alltoall_base_": _ALL_TO_ALL,
    "barrier": _BARRIER,
    "monitored_barrier_": _BARRIER,
    "send": CollectiveOperator(EventKind.SEND, 1, sized=0, peer=2, inputs=0),
    "recv_": CollectiveOperator(EventKind.RECV, 1, sized=0, peer=2, outputs=0),
    "recv_any_source_": CollectiveOperator(EventKind.RECV, 1, sized=0, outputs=0),
}
"""Operators of the namespace `c10d` (torch/csrc/distributed/c10d/Ops.cpp), by name."""

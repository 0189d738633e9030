"""Kernels of ours for torch's operators of collectives (`c10d::allreduce_` and the others). Every
collective and message of a process group passes through them: those called from Python, those of
functional collectives and DTensors, those of compiled regions, and those that C++ starts itself,
such as the gradient buckets of DistributedDataParallel.

A kernel is registered for the dispatch key BackendSelect, the last one before the kernel of the
backend. It reports the call and passes it on with unchanged arguments; tracing, fake tensors and
functionalization come before it, so it receives only calls that are executed. Removing the
registration restores torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, Protocol, TypeVar

import torch

from rankdump._core.events import EventKind
from rankdump._frameworks.torch.internals import skip_compilation

# The dispatcher is a C++ module whose stubs, where there are any, leave much unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false


@dataclass(frozen=True, slots=True)
class CollectiveOperator:
    """Kind and arguments of an operator, by their places, as in torch 2.13."""

    kind: EventKind
    group: int
    """Place of the process group."""
    sized: int | None = None
    """Place of the tensors whose element count is reported: it is equal on all members."""
    peer: int | None = None
    """Place of the rank in the group at the other end of a message."""
    inputs: int | None = None
    """Place of the tensors that it reads."""
    outputs: int | None = None
    """Place of the tensors that it writes; that of the inputs if it works in place."""
    root: int | None = None
    """Place of the rank in the group that alone reads, or alone gets a result."""


def _in_place(kind: EventKind, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 1, sized=0, inputs=0, outputs=0, root=root)


def _between(kind: EventKind, sized: int | None, root: int | None = None) -> CollectiveOperator:
    return CollectiveOperator(kind, 2, sized=sized, inputs=1, outputs=0, root=root)


_GATHER = _between(EventKind.ALL_GATHER, 1)
_REDUCE_SCATTER = _between(EventKind.REDUCE_SCATTER, 1)
# Members may exchange parts of different sizes, so there is no common count.
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


_CallT = TypeVar("_CallT")


class OperatorListener(Protocol[_CallT]):
    """Receiver of the calls of the operators; its methods never raise."""

    def begin_operator(
        self, operator: CollectiveOperator, arguments: Sequence[Any], caller: FrameType | None
    ) -> _CallT | None:
        """Note that an operator is about to be executed; the result is given to its end.

        `caller` is the Python frame that runs now; None in a thread of C++.
        """
        ...

    def end_operator(self, begun: _CallT | None, result: object, *, raised: bool = False) -> None:
        """Note that the operator has returned its result, or has raised."""
        ...

    def end_tensor_wait(self, tensor: torch.Tensor, *, raised: bool = False) -> None:
        """Note that the tensor of a functional collective was waited for, or the wait failed."""
        ...


class CollectiveOperatorPatch(Generic[_CallT]):
    """Registration of our kernels; in place while somebody listens."""

    def __init__(self, listener: OperatorListener[_CallT]) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._libraries: list[torch.library.Library] = []
        self._running: list[None] = []
        """An element for each call that is inside a kernel: appending and removing are atomic."""
        self._listening = False

    def install(self) -> None:
        """Register the kernels of all operators that this torch has."""
        with self._lock:
            self._listening = True
            if self._libraries:
                return
            key = torch._C.DispatchKey.BackendSelect
            below = torch._C._dispatch_keyset_full_after(key)
            collectives = torch.library.Library("c10d", "IMPL")
            self._libraries.append(collectives)
            for name, operator in COLLECTIVE_OPERATORS.items():
                if hasattr(torch.ops.c10d, name):
                    kernel = self._make_kernel(getattr(torch.ops.c10d, name), operator, below)
                    collectives.impl(name, kernel, key.name, with_keyset=True)
            if hasattr(torch.ops._c10d_functional, "wait_tensor"):
                waits = torch.library.Library("_c10d_functional", "IMPL")
                self._libraries.append(waits)
                kernel = self._make_wait_kernel(torch.ops._c10d_functional.wait_tensor, below)
                waits.impl("wait_tensor", kernel, key.name, with_keyset=True)

    def remove(self) -> None:
        """Stop reporting, and remove the kernels.

        A kernel must not be destroyed while another thread is inside it: then all stay, pass calls
        on, and are removed by the next call of this method.
        """
        with self._lock:
            self._listening = False
            if not self._running:
                libraries, self._libraries = self._libraries, []
                for library in libraries:
                    library._destroy()

    def _make_kernel(
        self, packet: Any, operator: CollectiveOperator, below: Any
    ) -> Callable[..., Any]:
        redispatch = packet.default._handle.redispatch_boxed

        def run_collective(keyset: Any, *arguments: Any) -> Any:
            self._running.append(None)
            begun = None
            try:
                if self._listening:
                    caller = sys._getframe().f_back
                    begun = self._listener.begin_operator(operator, arguments, caller)
                result = redispatch(keyset & below, *arguments)
            except BaseException as error:
                self._listener.end_operator(begun, None, raised=True)
                hide_frame(error)
                raise
            finally:
                self._running.pop()
            self._listener.end_operator(begun, result)
            return result

        skip_compilation(run_collective)
        return run_collective

    def _make_wait_kernel(self, packet: Any, below: Any) -> Callable[..., Any]:
        redispatch = packet.default._handle.redispatch_boxed

        def run_wait(keyset: Any, tensor: torch.Tensor) -> Any:
            self._running.append(None)
            raised = True
            try:
                result = redispatch(keyset & below, tensor)
                raised = False
                return result
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                self._running.pop()
                self._listener.end_tensor_wait(tensor, raised=raised)

        skip_compilation(run_wait)
        return run_wait


def hide_frame(error: BaseException) -> None:
    """Remove the calling function, which caught the error first, from the error's traceback.

    The caller raises it again with a bare `raise`, which since Python 3.11 does not add it again.
    """
    traceback = error.__traceback__
    if traceback is not None:
        error.__traceback__ = traceback.tb_next

"""Forward calls of an iteration, numbered for each operator, and the forward call that a
recomputation repeats. Tensors are recognised by fingerprints and never kept alive.

There are two kinds of activation checkpointing. The reentrant kind runs a region inside an autograd
function and without gradients: the calls of the region come after the creation of that function's
node. The other kind hooks the tensors that the region saves: the calls of the region began under
the same hook. Both kinds of region are found from the node whose backward is running, because nodes
are numbered in the order of the forward.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, strided

from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import UNDIVIDED_PASS, ForwardPass
from rankdump._frameworks.api_calls import ApiLeaf
from rankdump._frameworks.operator_names import CallLeaf, OperatorCallNames, OperatorScope
from rankdump._frameworks.torch.internals import (
    BackwardStep,
    find_saving_hook,
    find_thread_number,
    has_own_elements,
    is_wrapped,
    read_next_node_number,
    read_version,
)
from rankdump._frameworks.torch.layouts import strip_distribution


class TensorFingerprint(NamedTuple):
    """Address of a tensor's memory, and the version of its content."""

    tensor: weakref.ref[Tensor]
    address: int
    version: int

    def has_same_data(self, other: TensorFingerprint) -> bool:
        """Return whether both fingerprints are of the same tensor data, unchanged and still in
        memory.
        """
        mine = self.tensor()
        return (
            mine is not None
            and (self.address, self.version) == (other.address, other.version)
            # The memory may have been written in place since then.
            and (mine.data_ptr(), read_version(mine)) == (self.address, self.version)
        )


def compute_fingerprint(tensor: Tensor | None) -> TensorFingerprint | None:
    """Return the fingerprint of a tensor; None if it has no address or counts no versions."""
    if tensor is None or is_wrapped(tensor):
        return None
    if not has_own_elements(tensor):
        tensor = strip_distribution(tensor)
        if not has_own_elements(tensor):
            return None
    if tensor.is_inference() or tensor.layout is not strided or tensor.is_meta:
        return None
    address = tensor.data_ptr()
    if not address:
        return None
    # This equals `TensorFingerprint(...)` in a third of the time: every call of a module makes one.
    fields = weakref.ref(tensor), address, read_version(tensor)
    return tuple.__new__(TensorFingerprint, fields)


def find_first_tensor(leaves: Iterable[CallLeaf] | Iterable[ApiLeaf]) -> Tensor | None:
    """Return the first tensor among the arguments of a call, by which a repetition of the call is
    found.
    """
    for leaf in leaves:
        if isinstance(leaf.value, Tensor):
            return leaf.value
    return None


class ForwardContext(NamedTuple):
    """State of the thread and of autograd when a forward call begins."""

    thread: int
    next_node: int = 0
    """Number of the first graph node that the call could create."""
    watcher: int = 0
    """Identity of the hook on tensors saved for the backward; 0 if there is none."""
    grad: bool = True


class GradientArrivals:
    """Gradients that were seen in one run of a backward operator.

    A recomputed call shares this object with its forward call, because both have one backward
    operator.
    """

    __slots__ = ("_awaited", "_read", "_seen", "_watched")

    # A set of slots is an integer with one bit for each slot: most calls of a step have such sets,
    # and as objects all of them would be searched by the garbage collector.

    def __init__(self) -> None:
        self._awaited = self._seen = self._watched = 0
        self._read: tuple[int, ...] = ()

    def watches(self, side: TensorSide, slot: int) -> bool:
        """Return whether the forward call itself watches a slot."""
        return bool(self._watched & _get_slot_bit(side, slot))

    def watch_slot(self, side: TensorSide, slot: int) -> None:
        """Note that the forward call itself watches a slot."""
        self._watched |= _get_slot_bit(side, slot)

    def expect_gradient(self, side: TensorSide, slot: int, identity: int) -> None:
        """Expect a gradient; the run ends when the gradients of all inputs of the forward have
        arrived.

        A tensor that was both input and result has only one gradient: it is complete when it has
        been seen on both sides.
        """
        if side is TensorSide.INPUT:
            self._read += (identity,)
        if identity in self._read:
            self._awaited |= _get_slot_bit(side, slot)

    def begins_run(self, side: TensorSide, slot: int) -> bool:
        """Note a gradient; return whether a run of the backward operator begins with it."""
        bit = _get_slot_bit(side, slot)
        begins = not self._seen or bool(self._seen & bit)
        self._seen = bit if begins else self._seen | bit
        return begins

    @property
    def is_complete(self) -> bool:
        """Whether all expected gradients of this run have arrived."""
        return not self._awaited & ~self._seen


def _get_slot_bit(side: TensorSide, slot: int) -> int:
    return 1 << (2 * slot + (side is TensorSide.OUTPUT))


@dataclass(slots=True, eq=False)
class TorchOperatorCall:
    """One forward call of one operator."""

    scope: OperatorScope
    position: int
    """Position of the call among all forward calls of the iteration."""
    context: ForwardContext
    names: OperatorCallNames
    """Names of the call, of its recomputation and of its backward."""
    fingerprint: TensorFingerprint | None = None
    repeat_count: int = 0
    arrivals: GradientArrivals = field(default_factory=GradientArrivals)
    forward_pass: ForwardPass = UNDIVIDED_PASS
    """Forward pass of the call, which its recomputation and its gradients share."""


def find_region_start(program: Sequence[TorchOperatorCall], step: BackwardStep) -> int | None:
    """Return the position of the first call of a region; None if the step does not determine it.

    `program` has the calls of one thread, in order.
    """
    after = bisect_right(program, step.node, key=lambda call: call.context.next_node)
    if step.function and after < len(program) and not program[after].context.grad:
        return program[after].position
    watcher = program[after - 1].context.watcher if after else 0
    if not watcher:
        return None
    return next(call.position for call in program if call.context.watcher == watcher)


def choose_repeated_call(
    calls: Sequence[TorchOperatorCall],
    *,
    after: int | None,
    same_data: Callable[[TorchOperatorCall], bool],
) -> TorchOperatorCall | None:
    """Return the repeated call; `calls` are the calls of one operator, in order.

    `after` is the position after which the region continues; None if unknown.
    """
    if not calls:
        return None
    following = [call for call in calls if after is not None and call.position > after]
    if following:
        return following[0]
    same = [call for call in calls if same_data(call)]
    # Regions are repeated in reverse order, so the last one of the least repeated calls is the one.
    return min(same or calls, key=lambda call: (call.repeat_count, -call.position))


class ForwardCallLog:
    """Forward calls of one iteration; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_path: dict[str, list[TorchOperatorCall]] = {}
        self._by_thread: dict[int, list[TorchOperatorCall]] = {}
        self._position = 0
        self._last_repeated: dict[int, tuple[BackwardStep, int]] = {}
        self._watchers: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()
        self._watcher_numbers = itertools.count(1)

    def restart(self) -> None:
        """Forget all calls, because an iteration begins."""
        with self._lock:
            self._by_path.clear()
            self._by_thread.clear()
            self._last_repeated.clear()
            self._position = 0

    def add_forward_call(self, scope: OperatorScope, first: Tensor | None) -> TorchOperatorCall:
        """Return a new call, numbered from 0 for its operator; `first` is its first tensor."""
        fingerprint = compute_fingerprint(first)
        with self._lock:
            calls = self._by_path.get(scope.path)
            if calls is None:
                calls = self._by_path[scope.path] = []
            self._position += 1
            context = self._read_context()
            names = scope.call_names(len(calls))
            call = TorchOperatorCall(scope, self._position, context, names, fingerprint)
            calls.append(call)
            in_thread = self._by_thread.get(context.thread)
            if in_thread is None:
                in_thread = self._by_thread[context.thread] = []
            in_thread.append(call)
        return call

    def has_calls(self, scope: OperatorScope) -> bool:
        """Return whether an operator was called in this iteration."""
        with self._lock:
            return scope.path in self._by_path

    def find_repeated_call(
        self, scope: OperatorScope, first: Tensor | None, step: BackwardStep
    ) -> TorchOperatorCall | None:
        """Return the forward call that a call within the backward repeats; None if it
        repeats none.
        """
        now = compute_fingerprint(first)
        thread = find_thread_number()

        def same_data(call: TorchOperatorCall) -> bool:
            known = call.fingerprint
            return known is not None and now is not None and known.has_same_data(now)

        with self._lock:
            calls: Sequence[TorchOperatorCall] = self._by_path.get(scope.path, ())
            # The backward of an accelerator runs in other threads, so then any call may be the
            # repeated one.
            if thread in self._by_thread:
                calls = [call for call in calls if call.context.thread == thread]
            after = self._find_position(thread, step)
            call = choose_repeated_call(calls, after=after, same_data=same_data)
            if call is not None:
                call.repeat_count += 1
                self._last_repeated[thread] = (step, call.position)
        return call

    def _find_position(self, thread: int, step: BackwardStep) -> int | None:
        """Return the position after which the repeated region continues; None if unknown."""
        before = self._last_repeated.get(thread)
        if before is not None and before[0] == step:
            return before[1]
        threads = {thread} & self._by_thread.keys() or self._by_thread.keys()
        if len(threads) != 1:
            return None
        start = find_region_start(self._by_thread[next(iter(threads))], step)
        return None if start is None else start - 1

    def _read_context(self) -> ForwardContext:
        hook = find_saving_hook()
        watcher = 0
        if hook is not None:
            watcher = self._watchers.setdefault(hook, next(self._watcher_numbers))
        # This equals `ForwardContext(...)` in a third of the time.
        thread, grad = find_thread_number(), torch.is_grad_enabled()
        return tuple.__new__(ForwardContext, (thread, read_next_node_number(), watcher, grad))

"""Collectives and messages of this process: each call of torch's operators becomes an event that
ends with its work; models subscribe to these events.

Every collective and message of a process group passes through these operators: those called from
Python, those of functional collectives and DTensors, those of compiled regions, and those that C++
starts, such as the gradient buckets of DistributedDataParallel. Arguments, results and errors are
passed through unchanged. The future of a work reports its end. A work without a future (messages,
with gloo) ends when it is waited for, or at the latest when the script releases it; it is never
kept alive. A script gets a work from a method of its process group, and these methods are patched
to see the work; works of C++ end with their futures, or with the wait for their tensor.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rankdump._core.events import CallOutcome, EventKind, UnseenReason
from rankdump._core.recorder_protocol import Recorder
from rankdump._frameworks.attribute_patch import AttributePatch
from rankdump._frameworks.torch.collective_tensors import (
    COLLECTIVE_OPERATORS,
    CollectiveOperands,
    CollectiveOperator,
    CollectiveTensorCall,
    OpenTensorCalls,
    choose_operands,
    find_memory,
)
from rankdump._frameworks.torch.communication import (
    ANY_SOURCE,
    BucketCounter,
    CollectiveRequest,
    PendingCollective,
    UnseenCollectiveCounter,
    collective_recorder,
    count_elements,
    describe_group,
    is_captured,
    list_tensors,
    read_group_timeout,
)
from rankdump._frameworks.torch.internals import disable_function_modes, skip_compilation
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.tensors import TorchObserver

# Work, process group and dispatcher are C++ classes; their stubs, if there are any, are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false


def hide_frame(error: BaseException) -> None:
    """Remove the calling function, which caught the error first, from the traceback of the error.

    The caller raises the error again with a bare `raise`, which since Python 3.11 does not add the
    function again.
    """
    traceback = error.__traceback__
    if traceback is not None:
        error.__traceback__ = traceback.tb_next


_work_class: Any = getattr(dist, "Work", None)


class WorkWatcher:
    """Patch of `Work.wait`, with the works that were not waited for yet."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCollective] = {}
        self._by_memory: dict[int, PendingCollective] = {}
        """Works of C++ that have no future, by the memory of their tensor."""
        self._patch: AttributePatch | None = None
        self.open_tensors = OpenTensorCalls(collective_recorder.report_failure)
        """Selected tensors of works that have not been waited for yet."""

    def install(self) -> None:
        """Replace the method."""
        original: Callable[..., Any] = _work_class.wait
        watcher = self

        @wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(work, *args, **kwargs)
            except BaseException as error:
                watcher.fail_wait(work)
                hide_frame(error)
                raise
            watcher.end_wait(work)
            return result

        self._patch = AttributePatch(_work_class, "wait", wait)
        self._patch.install()

    def remove(self) -> None:
        """Restore the method; works that are still running end when they are released."""
        if self._patch is not None:
            self._patch.remove()
            self._patch = None
        for memory in list(self._by_memory):
            collective_recorder.end(self._by_memory.pop(memory, None))
        self.open_tensors.end_all()

    def watch_work(self, work: Any, pending: PendingCollective) -> None:
        """Finish the event when the work is complete; without a work it is complete already."""
        if pending.tensors is not None:
            self._watch_tensors(work, pending, pending.tensors)
        if not isinstance(work, dist.Work):
            collective_recorder.end(pending)
        elif not pending.begun:
            # If no recorder keeps the event, only its number matters, which may be known only at
            # the end.
            if pending.sequence is None:
                self._add_pending(work, pending)
        elif self._finish_by_future(work, pending):
            # The work is watched too, because a wait may return before the callbacks of the future
            # have run.
            if pending.is_open:
                self._pending[id(work)] = pending
        else:
            self._add_pending(work, pending)

    def watch_native_work(
        self, work: Any, pending: PendingCollective, tensors: Sequence[Tensor]
    ) -> None:
        """Finish the event of a work that only C++ holds.

        On an accelerator the event ends when the operation is queued; that of a message ends when
        its tensor is waited for.
        """
        if pending.tensors is not None:
            self._watch_native_tensors(work, pending, pending.tensors)
        if not pending.begun or self._finish_by_future(work, pending):
            return
        if pending.request.kind.is_collective or not tensors:
            collective_recorder.end(pending)
        else:
            self._by_memory[find_memory(tensors[0])] = pending

    def fail_wait(self, work: dist.Work) -> None:
        """Note that a wait for the work has failed."""
        collective_recorder.end(self._pending.pop(id(work), None), outcome=CallOutcome.FAILED)
        self.open_tensors.end_wait(work, raised=True)

    def end_wait(self, work: dist.Work) -> None:
        """Note that a wait for the work has returned."""
        self._end_event(work)
        self.open_tensors.end_wait(work)

    def _end_event(self, work: dist.Work) -> None:
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        try:
            sender = _find_sender(work, pending)
        except Exception:  # the wait failed, so the sender is unknown
            sender = None
        # On an accelerator a wait only queues the wait of a stream, so the outcome is unknown.
        on_device = pending.request.on_device
        outcome = CallOutcome.UNKNOWN if on_device else CallOutcome.COMPLETE
        collective_recorder.end(pending, sender, outcome)

    def end_tensor_wait(self, tensor: Tensor, *, raised: bool) -> None:
        """Note that a wait for the work of a tensor has returned, or has failed."""
        if self._by_memory:
            collective_recorder.end(self._by_memory.pop(find_memory(tensor), None))
        self.open_tensors.end_tensor_wait(tensor, raised=raised)

    def _watch_tensors(
        self, work: Any, pending: PendingCollective, tensors: CollectiveTensorCall
    ) -> None:
        try:
            if isinstance(work, dist.Work):
                self.open_tensors.add_work(work, tensors)
            elif pending.request.kind.is_collective or not pending.request.on_device:
                self.open_tensors.end(tensors, CollectiveTensorCall.record_outputs)
            # Otherwise it is a message of a batch on an accelerator, which is only queued when the
            # batch ends.
        except Exception as error:
            collective_recorder.report_failure(error)

    def _watch_native_tensors(
        self, work: Any, pending: PendingCollective, tensors: CollectiveTensorCall
    ) -> None:
        try:
            self.open_tensors.add_memory(tensors)
            if pending.request.scope:
                # On an accelerator the reducer has made the stream wait by then.
                is_queued = pending.request.on_device
                is_done = (lambda: True) if is_queued else work.get_future().done
                self.open_tensors.end_with_backward(tensors, is_done)
        except Exception as error:
            collective_recorder.report_failure(error)

    def _add_pending(self, work: dist.Work, pending: PendingCollective) -> None:
        self._pending[id(work)] = pending
        weakref.finalize(work, self._end_released, id(work)).atexit = False

    def _end_released(self, identity: int) -> None:
        collective_recorder.end(self._pending.pop(identity, None))

    def _finish_by_future(self, work: dist.Work, pending: PendingCollective) -> bool:
        """Let the work's future finish the event; return False without a usable future."""
        if pending.request.on_device or not pending.request.kind.is_collective:
            return False
        try:
            future = work.get_future()
        except RuntimeError:
            return False
        identity = id(work)

        def done(ended: Any) -> None:
            try:
                ended.value()
            except Exception:
                collective_recorder.end(pending, outcome=CallOutcome.FAILED)
            else:
                collective_recorder.end(pending, outcome=CallOutcome.COMPLETE)
            if self._pending.get(identity) is pending:
                self._pending.pop(identity, None)

        future.add_done_callback(done)
        return True


def _find_sender(work: Any, pending: PendingCollective) -> int | None:
    """Return the sender's global rank, for a message received from any rank."""
    request = pending.request
    if request.kind is not EventKind.RECV or request.peer != ANY_SOURCE:
        return None
    return request.group.ranks[work._source_rank()]


@dataclass(slots=True, eq=False)
class OperatorCall:
    """The execution of an operator, from its begin to its end."""

    group: dist.ProcessGroup | None = None
    pending: PendingCollective | None = None
    """The event of the operator; None after an internal error of rankdump."""
    tensors: Sequence[Tensor] = ()


class CallState(threading.local):
    """State of a thread: the operators that it is executing."""

    depth = 0
    """Number of operators that enclose the present one: a backend may consist of other groups."""
    events: list[PendingCollective] | None = None
    """Events whose works a patched method is about to return; None outside of such a method."""


class ProcessGroupObserver:
    """Makes an event of each call of an operator; methods that kernels call never raise."""

    def __init__(self, work_watcher: WorkWatcher, unseen: UnseenCollectiveCounter) -> None:
        self._work_watcher = work_watcher
        self._unseen = unseen
        self._buckets = BucketCounter()
        self.calls = CallState()

    def begin_operator(
        self, operator: CollectiveOperator, arguments: Sequence[Any], caller: FrameType | None
    ) -> OperatorCall | None:
        """Begin the event of an operator that is about to be executed; return None inside another
        operator.

        `caller` is the innermost Python frame; None in a thread of C++.
        """
        self.calls.depth += 1
        if self.calls.depth > 1:
            return None
        call = OperatorCall()
        try:
            with disable_function_modes():
                self._begin(operator, arguments, caller, call)
        except Exception as error:
            collective_recorder.report_failure(error)
            self._unseen.add("", UnseenReason.UNREADABLE_CALL)
        return call

    def end_operator(
        self, begun: OperatorCall | None, result: object, *, raised: bool = False
    ) -> None:
        """Let the event of an operator that has returned end with its work; end it now if the
        operator raised.
        """
        self.calls.depth -= 1
        if begun is None or begun.group is None:
            return
        try:
            self._unseen.skip(begun.group)
            if begun.pending is not None and raised:
                collective_recorder.end(begun.pending, outcome=CallOutcome.FAILED)
                open_tensors = self._work_watcher.open_tensors
                open_tensors.end(begun.pending.tensors, CollectiveTensorCall.fail)
            elif begun.pending is not None:
                self._watch_work(begun, begun.pending, result)
        except Exception as error:
            collective_recorder.report_failure(error)
            collective_recorder.end(begun.pending)

    def end_tensor_wait(self, tensor: Tensor, *, raised: bool = False) -> None:
        """End the message whose result is the tensor of a functional collective."""
        try:
            self._work_watcher.end_tensor_wait(tensor, raised=raised)
        except Exception as error:
            collective_recorder.report_failure(error)

    def _watch_work(self, call: OperatorCall, pending: PendingCollective, result: object) -> None:
        if self.calls.events is not None:
            self.calls.events.append(pending)
            return
        # An operator returns its work alone or as the last value; a monitored barrier returns
        # nothing.
        last = result[-1] if isinstance(result, (tuple, list)) else result
        if last is None:
            collective_recorder.end(pending)
            open_tensors = self._work_watcher.open_tensors
            open_tensors.end(pending.tensors, CollectiveTensorCall.record_outputs)
        else:
            work = dist.Work.unbox(last)  # pyright: ignore[reportArgumentType]
            self._work_watcher.watch_native_work(work, pending, call.tensors)

    def _begin(
        self,
        operator: CollectiveOperator,
        arguments: Sequence[Any],
        caller: FrameType | None,
        call: OperatorCall,
    ) -> None:
        call.group = dist.ProcessGroup.unbox(arguments[operator.group])
        self._unseen.compare(call.group)
        if collective_recorder.is_hidden:
            return
        if operator.kind.is_collective and not collective_recorder.is_armed:
            collective_recorder.count_collective(describe_group(call.group), operator.kind)
            return
        request = self._make_request(operator, arguments, caller, call)
        read_operands = partial(_read_operands, operator, arguments, call.group)
        call.pending = collective_recorder.begin(request, read_operands)
        if call.pending.tensors is not None:
            self._work_watcher.open_tensors.add(call.pending.tensors)

    def _make_request(
        self,
        operator: CollectiveOperator,
        arguments: Sequence[Any],
        caller: FrameType | None,
        call: OperatorCall,
    ) -> CollectiveRequest:
        group = call.group
        assert group is not None
        members = describe_group(group)
        sized = () if operator.sized is None else list_tensors(arguments[operator.sized])
        element_count, dtype = count_elements(sized)
        call.tensors = sized
        shown = sized or list_tensors(arguments[0])
        device = shown[0].device if shown else None
        if is_captured(device):
            self._unseen.add(members.name, UnseenReason.CUDA_GRAPH)
        peer = ANY_SOURCE
        if operator.peer is not None:
            peer = members.ranks[int(arguments[operator.peer])]
        # Calls of a method of a process group come from Python; other calls may be those of a
        # reducer.
        is_native = operator.kind is EventKind.ALL_REDUCE and self.calls.events is None
        return CollectiveRequest(
            kind=operator.kind,
            group=members,
            rank=members.ranks[group.rank()],
            element_count=element_count,
            dtype=dtype,
            peer=peer,
            scope=self._buckets.make_scope(members.name, caller, dtype) if is_native else "",
            on_device=device is not None and device.type != "cpu",
            timeout=read_group_timeout(group, device),
        )


def _read_operands(
    operator: CollectiveOperator, arguments: Sequence[Any], group: dist.ProcessGroup
) -> CollectiveOperands:
    inputs, outputs = (
        () if place is None else list_tensors(arguments[place])
        for place in (operator.inputs, operator.outputs)
    )
    is_root = operator.root is None or int(arguments[operator.root]) == group.rank()
    return choose_operands(operator.kind, inputs, outputs, is_root=is_root)


class CollectiveOperatorPatch:
    """Kernels of rankdump for the operators of collectives, registered while there is a listener.

    A kernel is registered for the dispatch key BackendSelect, the last one before the kernel of the
    backend. It reports the call and passes it on with unchanged arguments. Tracing, fake tensors
    and functionalization come before it, so it receives only calls that are executed. Removing the
    registration restores torch.
    """

    def __init__(self, listener: ProcessGroupObserver) -> None:
        self._listener = listener
        self._lock = threading.Lock()
        self._libraries: list[torch.library.Library] = []
        self._running: list[None] = []
        """One element for each call that is inside a kernel; a list, because appending and removing
        are atomic.
        """
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

        A kernel must not be destroyed while another thread is inside it: then all kernels stay,
        pass calls on, and are removed by the next call of this method.
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

        def run_wait(keyset: Any, tensor: Tensor) -> Any:
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


WORK_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "_allgather_base",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "gather",
    "scatter",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
)
"""Methods of a process group that return a work; each version of torch has only some of them, and
newer versions have some under two names.
"""


class ProcessGroupPatch:
    """Patch of the process groups of this process, in place while there is a listener."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._patches: list[AttributePatch] = []
        self._work_watcher = WorkWatcher()
        self._unseen = UnseenCollectiveCounter()
        self._observer = ProcessGroupObserver(self._work_watcher, self._unseen)
        self._operators = CollectiveOperatorPatch(self._observer)

    def add_recorder(self, recorder: Recorder, graph: int) -> None:
        """Report collectives to a recorder from now on."""
        collective_recorder.add_listener(recorder, graph)
        self.install()

    def remove_recorder(self, recorder: Recorder, graph: int) -> None:
        """Stop reporting to a recorder; removing the last one restores torch."""
        collective_recorder.remove_listener(recorder, graph)
        with self._lock:
            if not collective_recorder.has_listeners:
                self._restore()

    def install(self) -> None:
        """Observe operators and methods once torch.distributed is in use."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        with self._lock:
            if self._patches:
                return
            self._unseen.restart()
            self._work_watcher.install()
            for name in WORK_METHODS:
                if name in vars(dist.ProcessGroup):
                    ours = self._wrap_method(getattr(dist.ProcessGroup, name))
                    self._patches.append(AttributePatch(dist.ProcessGroup, name, ours))
                    self._patches[-1].install()
            self._operators.install()

    @property
    def is_installed(self) -> bool:
        """Whether collectives are observed."""
        return bool(self._patches)

    def end_iteration(self) -> None:
        """Report the collectives of the iteration that were not seen, and count as lost the tensors
        that nobody waited for.
        """
        # This comes first, so that a failure of the report does not leave these calls for the next
        # iteration.
        self._work_watcher.open_tensors.end_all()
        for (group, reason), count in self._unseen.take().items():
            collective_recorder.report_unseen(group, reason, count)

    def _restore(self) -> None:
        self._operators.remove()
        # Code that replaced our method still calls it; without kernels the method does nothing.
        for patch in self._patches:
            patch.remove()
        self._patches.clear()
        self._work_watcher.remove()

    def _wrap_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        calls = self._observer.calls

        @wraps(original)
        def return_work(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            outer, calls.events = calls.events, []
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                hide_frame(error)
                raise
            finally:
                events, calls.events = calls.events or [], outer
            for pending in events:
                self._watch_work(work, pending)
            return work

        return return_work

    def _watch_work(self, work: Any, pending: PendingCollective) -> None:
        try:
            self._work_watcher.watch_work(work, pending)
        except Exception as error:
            collective_recorder.report_failure(error)
            collective_recorder.end(pending)


process_group_patch = ProcessGroupPatch()
"""The patch of this process."""


class CollectiveSubscription:
    """Subscription of one model. It lasts while the model is not armed, because all ranks must
    count alike.
    """

    def __init__(self, observer: TorchObserver, *, wanted: bool = True) -> None:
        self._observer = observer
        self._is_subscribed = False
        if wanted and dist.is_available():
            run_shielded(self._subscribe, observer.report_failure)

    def begin_iteration(self, iteration: int) -> None:
        """Observe torch.distributed if the script has begun to use it, and number names from 0."""
        if self._is_subscribed:
            collective_recorder.begin_iteration(self._observer.recorder, iteration)
            if not process_group_patch.is_installed:
                run_shielded(process_group_patch.install, self._observer.report_failure)

    def end_iteration(self) -> None:
        """Report the collectives of this iteration that were not seen, and lost tensors."""
        if self._is_subscribed and process_group_patch.is_installed:
            run_shielded(process_group_patch.end_iteration, self._observer.report_failure)

    def set_recorder(self, recorder: Recorder) -> None:
        """Report to this recorder from now on."""
        observer, before = self._observer, self._observer.recorder
        observer.recorder = recorder
        if self._is_subscribed:
            process_group_patch.remove_recorder(before, observer.graph)
            process_group_patch.add_recorder(recorder, observer.graph)

    def unsubscribe(self) -> None:
        """Stop reporting collectives."""
        if self._is_subscribed:
            self._is_subscribed = False
            process_group_patch.remove_recorder(self._observer.recorder, self._observer.graph)

    def _subscribe(self) -> None:
        process_group_patch.add_recorder(self._observer.recorder, self._observer.graph)
        self._is_subscribed = True

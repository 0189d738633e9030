"""Patched methods of torch's process group, which report every collective call, the completion of
asynchronous ones, and the subscription of one model to them.

At this level it does not matter how a script imported `all_reduce`. Calls that never pass
through Python are not seen: those inside compiled regions, and those of torch's own C++.
Arguments, results and errors are passed through unchanged. The future of a work reports its end.
A work without a future (messages, with gloo) ends when it is waited for, or at the latest when
the script releases it; it is never kept alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import ref

import torch.distributed as dist
from torch.nn import Module

from rankdump._core.events import EventKind
from rankdump._core.recorder_protocol import Recorder
from rankdump._frameworks.torch.communication import (
    ANY_SOURCE,
    CollectiveRequest,
    PendingCollective,
    collective_recorder,
    count_elements,
    describe_group,
    list_tensors,
    read_group_timeout,
)
from rankdump._frameworks.torch.ddp import observe_buckets
from rankdump._frameworks.torch.internals import find_running_ddp
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.tensors import TorchObserver

# The work is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


_work_class: Any = getattr(dist, "Work", None)


class WorkWatcher:
    """Patch of `Work.wait`, with the works that were not waited for yet."""

    def __init__(self) -> None:
        self._pending: dict[int, PendingCollective] = {}
        self._replaced: tuple[object, object] | None = None

    def install(self) -> None:
        """Replace the method."""
        original: Callable[..., Any] = _work_class.wait
        watcher = self

        @wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            try:
                result = original(work, *args, **kwargs)
            except BaseException:
                watcher.fail_wait(work)
                raise
            watcher.end_wait(work)
            return result

        # The attribute in the class dict binds; `original`, read from the class, does not.
        self._replaced = (vars(_work_class)["wait"], wait)
        _work_class.wait = wait

    def remove(self) -> None:
        """Restore the method; works still running end when they are released."""
        if self._replaced is not None and vars(_work_class)["wait"] is self._replaced[1]:
            _work_class.wait = self._replaced[0]
        self._replaced = None

    def watch_work(self, work: Any, pending: PendingCollective) -> None:
        """Finish the event when the work is complete; without a work it is complete already."""
        if not isinstance(work, dist.Work):
            collective_recorder.end(pending)
        elif not pending.begun:
            # No recorder has the event: only its number matters, known perhaps only at the end.
            if pending.sequence is None:
                self._add_pending(work, pending)
        elif not _finish_by_future(work, pending):
            self._add_pending(work, pending)

    def fail_wait(self, work: dist.Work) -> None:
        """Note that a wait for the work has failed."""
        collective_recorder.fail(self._pending.pop(id(work), None))

    def end_wait(self, work: dist.Work) -> None:
        """Note that a wait for the work has returned."""
        pending = self._pending.pop(id(work), None)
        if pending is None:
            return
        try:
            sender = _find_sender(work, pending)
        except Exception:  # a wait that failed: the sender is unknown
            sender = None
        collective_recorder.end(pending, sender)

    def _add_pending(self, work: dist.Work, pending: PendingCollective) -> None:
        self._pending[id(work)] = pending
        weakref.finalize(work, self._end_released, id(work)).atexit = False

    def _end_released(self, identity: int) -> None:
        collective_recorder.end(self._pending.pop(identity, None))


def _finish_by_future(work: dist.Work, pending: PendingCollective) -> bool:
    """Let the work's future finish the event; return False without a usable future."""
    if pending.request.on_device or not pending.request.kind.is_collective:
        return False
    try:
        future = work.get_future()
    except RuntimeError:
        return False

    def done(ended: Any) -> None:
        try:
            ended.value()
        except Exception:
            collective_recorder.fail(pending)
        else:
            collective_recorder.end(pending)

    future.add_done_callback(done)
    return True


def _find_sender(work: Any, pending: PendingCollective) -> int | None:
    """Return the sender's global rank, for a message received from any rank."""
    request = pending.request
    if request.kind is not EventKind.RECV or request.peer != ANY_SOURCE:
        return None
    return request.group.ranks[work._source_rank()]


# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


@dataclass(frozen=True, slots=True)
class CollectiveMethod:
    """Kind and arguments of a method of the process group."""

    kind: EventKind
    size_argument: int | None = None
    """Index of the argument whose element count is reported: it is equal on all members."""
    peer_argument: int | None = None


_GATHER_METHOD = CollectiveMethod(EventKind.ALL_GATHER, 1)
_SCATTER_METHOD = CollectiveMethod(EventKind.REDUCE_SCATTER, 1)
COLLECTIVE_METHODS = {
    "allreduce": CollectiveMethod(EventKind.ALL_REDUCE, 0),
    "allreduce_coalesced": CollectiveMethod(EventKind.ALL_REDUCE, 0),
    "broadcast": CollectiveMethod(EventKind.BROADCAST, 0),
    "reduce": CollectiveMethod(EventKind.REDUCE, 0),
    "allgather": _GATHER_METHOD,
    "allgather_coalesced": _GATHER_METHOD,
    "allgather_into_tensor_coalesced": _GATHER_METHOD,
    "all_gather_single": _GATHER_METHOD,
    "all_gather_single_coalesced": _GATHER_METHOD,
    "_allgather_base": _GATHER_METHOD,
    "reduce_scatter": _SCATTER_METHOD,
    "reduce_scatter_single": _SCATTER_METHOD,
    "reduce_scatter_single_coalesced": _SCATTER_METHOD,
    "reduce_scatter_tensor_coalesced": _SCATTER_METHOD,
    "_reduce_scatter_base": _SCATTER_METHOD,
    "gather": CollectiveMethod(EventKind.GATHER, 1),
    "scatter": CollectiveMethod(EventKind.SCATTER, 0),
    # Members may exchange parts of different sizes, so there is no common count.
    "alltoall": CollectiveMethod(EventKind.ALL_TO_ALL),
    "alltoall_base": CollectiveMethod(EventKind.ALL_TO_ALL),
    "all_to_all_single": CollectiveMethod(EventKind.ALL_TO_ALL),
    "barrier": CollectiveMethod(EventKind.BARRIER),
    "monitored_barrier": CollectiveMethod(EventKind.BARRIER),
    "send": CollectiveMethod(EventKind.SEND, 0, 1),
    "recv": CollectiveMethod(EventKind.RECV, 0, 1),
    "recv_anysource": CollectiveMethod(EventKind.RECV, 0),
}
"""By name; each version of torch has some of them, newer versions under two names."""


class ProcessGroupPatch:
    """Patch of the methods, in place while there is a listener."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced: dict[str, tuple[object, object]] = {}
        self._work_watcher = WorkWatcher()

    def add_recorder(self, recorder: Recorder, graph: int) -> None:
        """Report collectives to a recorder from now on."""
        collective_recorder.add_listener(recorder, graph)
        self.install_methods()

    def remove_recorder(self, recorder: Recorder, graph: int) -> None:
        """Stop reporting to a recorder; removing the last one restores the methods."""
        collective_recorder.remove_listener(recorder, graph)
        with self._lock:
            if not collective_recorder.has_listeners:
                self._restore()

    def install_methods(self) -> None:
        """Replace the methods once torch.distributed is in use."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        with self._lock:
            if self._replaced:
                return
            self._work_watcher.install()
            for name, method in COLLECTIVE_METHODS.items():
                # The attribute in the class dict binds; the one read from the class does not.
                original = vars(dist.ProcessGroup).get(name)
                if original is not None:
                    ours = self._wrap_method(getattr(dist.ProcessGroup, name), method)
                    self._replaced[name] = (original, ours)
                    setattr(dist.ProcessGroup, name, ours)

    def _restore(self) -> None:
        for name, (original, ours) in self._replaced.items():
            # Code that replaced ours keeps calling it: without listeners it only counts.
            if vars(dist.ProcessGroup).get(name) is ours:
                setattr(dist.ProcessGroup, name, original)
        self._replaced.clear()
        self._work_watcher.remove()

    def _wrap_method(
        self, original: Callable[..., Any], method: CollectiveMethod
    ) -> Callable[..., Any]:
        @wraps(original)
        def observed(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if collective_recorder.is_nested:
                return original(group, *args, **kwargs)
            pending = _begin_collective(group, method, (*args, *kwargs.values()))
            try:
                with collective_recorder.suppress_nested():
                    work = original(group, *args, **kwargs)
            except BaseException:
                collective_recorder.fail(pending)
                raise
            self._end(work, pending)
            return work

        return observed

    def _end(self, work: Any, pending: PendingCollective | None) -> None:
        if pending is None:
            return
        try:
            self._work_watcher.watch_work(work, pending)
        except Exception as error:
            collective_recorder.report_failure(error)
            collective_recorder.end(pending)


def _begin_collective(
    group: dist.ProcessGroup, method: CollectiveMethod, arguments: Sequence[object]
) -> PendingCollective | None:
    """Begin the event of a call; None after an internal error, which must not reach the call."""
    try:
        members = describe_group(group)
        sized = None if method.size_argument is None else arguments[method.size_argument]
        tensors = list_tensors(sized)
        element_count, dtype = count_elements(tensors)
        peer = ANY_SOURCE
        if method.peer_argument is not None:
            peer = members.ranks[int(str(arguments[method.peer_argument]))]
        rank = members.ranks[group.rank()]
        device = tensors[0].device if tensors else None
        return collective_recorder.begin(
            CollectiveRequest(
                kind=method.kind,
                group=members,
                rank=rank,
                element_count=element_count,
                dtype=dtype,
                peer=peer,
                on_device=device is not None and device.type != "cpu",
                timeout=read_group_timeout(group, device),
            )
        )
    except Exception as error:
        collective_recorder.report_failure(error)
        return None


process_group_patch = ProcessGroupPatch()
"""Patch of this process."""


class CollectiveSubscription:
    """Subscription of one model, also while not armed: all ranks must count alike."""

    def __init__(self, model: Module, observer: TorchObserver) -> None:
        self._observer = observer
        self._is_subscribed = False
        self._outer_ddp: ref[Module] | None = None
        if dist.is_available():
            run_shielded(self._subscribe, observer.report_failure, model)

    def refresh_methods(self) -> None:
        """Patch the methods if torch.distributed has come into use."""
        if self._is_subscribed:
            run_shielded(process_group_patch.install_methods, self._observer.report_failure)

    def find_outer_ddp(self) -> None:
        """Find a DDP wrapper that was added later: it is visible only while it runs."""
        outer_ddp = find_running_ddp() if self._is_subscribed else None
        if outer_ddp is not None and (
            self._outer_ddp is None or self._outer_ddp() is not outer_ddp
        ):
            self._outer_ddp = ref(outer_ddp)
            observe_buckets(outer_ddp)

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

    def _subscribe(self, model: Module) -> None:
        process_group_patch.add_recorder(self._observer.recorder, self._observer.graph)
        self._is_subscribed = True
        observe_buckets(model)

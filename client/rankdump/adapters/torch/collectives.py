"""Replaces the methods of torch's process group, so that every collective call is seen.

At this level it does not matter how a script imported `all_reduce`. Calls that never pass
through Python are not seen: those inside compiled regions, and those torch's own C++ makes.
Arguments, results and errors are handed through as they are.
"""

# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist

from rankdump.adapters.torch.communication import (
    ANY_SOURCE,
    Pending,
    Request,
    group_of,
    process,
    size_of,
    tensors_in,
)
from rankdump.adapters.torch.completion import Waits
from rankdump.adapters.torch.limits import timeout_of
from rankdump.contract.events import EventKind
from rankdump.values import Recorder


@dataclass(frozen=True, slots=True)
class Method:
    """What a method of the process group does."""

    kind: EventKind
    sized_by: int | None = None
    """Place of the argument whose elements count: equal on every member of the group."""
    peer_at: int | None = None


_GATHER = Method(EventKind.ALL_GATHER, 1)
_SCATTER = Method(EventKind.REDUCE_SCATTER, 1)
METHODS = {
    "allreduce": Method(EventKind.ALL_REDUCE, 0),
    "allreduce_coalesced": Method(EventKind.ALL_REDUCE, 0),
    "broadcast": Method(EventKind.BROADCAST, 0),
    "reduce": Method(EventKind.REDUCE, 0),
    "allgather": _GATHER,
    "allgather_coalesced": _GATHER,
    "allgather_into_tensor_coalesced": _GATHER,
    "all_gather_single": _GATHER,
    "all_gather_single_coalesced": _GATHER,
    "_allgather_base": _GATHER,
    "reduce_scatter": _SCATTER,
    "reduce_scatter_single": _SCATTER,
    "reduce_scatter_single_coalesced": _SCATTER,
    "reduce_scatter_tensor_coalesced": _SCATTER,
    "_reduce_scatter_base": _SCATTER,
    "gather": Method(EventKind.GATHER, 1),
    "scatter": Method(EventKind.SCATTER, 0),
    # Members may exchange parts of different sizes, so there is no count to agree on.
    "alltoall": Method(EventKind.ALL_TO_ALL),
    "alltoall_base": Method(EventKind.ALL_TO_ALL),
    "all_to_all_single": Method(EventKind.ALL_TO_ALL),
    "barrier": Method(EventKind.BARRIER),
    "monitored_barrier": Method(EventKind.BARRIER),
    "send": Method(EventKind.SEND, 0, 1),
    "recv": Method(EventKind.RECV, 0, 1),
    "recv_anysource": Method(EventKind.RECV, 0),
}
"""By name; a version of torch has some of them, newer ones under two names."""


class Patch:
    """The replaced methods; in place as long as anybody listens."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replaced: dict[str, tuple[object, object]] = {}
        self._waits = Waits()

    def listen(self, recorder: Recorder, graph: int) -> None:
        """Tell a recorder of collectives from now on."""
        process.listen(recorder, graph)
        self.refresh()

    def forget(self, recorder: Recorder, graph: int) -> None:
        """Tell it no longer; the last one to go puts the methods back."""
        process.forget(recorder, graph)
        with self._lock:
            if not process.heard:
                self._restore()

    def refresh(self) -> None:
        """Replace the methods once torch.distributed is in use."""
        if not (dist.is_available() and dist.is_initialized()):
            return
        with self._lock:
            if self._replaced:
                return
            self._waits.install()
            for name, method in METHODS.items():
                # What stands in the class binds; what reading it gives is callable, but does not.
                original = vars(dist.ProcessGroup).get(name)
                if original is not None:
                    ours = self._observed(getattr(dist.ProcessGroup, name), method)
                    self._replaced[name] = (original, ours)
                    setattr(dist.ProcessGroup, name, ours)

    def _restore(self) -> None:
        for name, (original, ours) in self._replaced.items():
            # Somebody who replaced ours keeps calling it: with nobody listening it only counts.
            if vars(dist.ProcessGroup).get(name) is ours:
                setattr(dist.ProcessGroup, name, original)
        self._replaced.clear()
        self._waits.remove()

    def _observed(self, original: Callable[..., Any], method: Method) -> Callable[..., Any]:
        @wraps(original)
        def observed(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if process.nested:
                return original(group, *args, **kwargs)
            pending = _begun(group, method, (*args, *kwargs.values()))
            try:
                with process.counted():
                    work = original(group, *args, **kwargs)
            except BaseException:
                self._end(None, pending)
                raise
            self._end(work, pending)
            return work

        return observed

    def _end(self, work: Any, pending: Pending | None) -> None:
        if pending is None:
            return
        try:
            self._waits.watch(work, pending)
        except Exception as error:
            process.failed(error)
            process.end(pending)


def _begun(group: dist.ProcessGroup, method: Method, arguments: Sequence[object]) -> Pending | None:
    """Begin the event of a call; None when we fail, which the call must not notice."""
    try:
        members = group_of(group)
        sized = None if method.sized_by is None else arguments[method.sized_by]
        tensors = tensors_in(sized)
        element_count, dtype = size_of(tensors)
        peer = ANY_SOURCE
        if method.peer_at is not None:
            peer = members.ranks[int(str(arguments[method.peer_at]))]
        rank = members.ranks[group.rank()]
        device = tensors[0].device if tensors else None
        return process.begin(
            Request(
                kind=method.kind,
                group=members,
                rank=rank,
                element_count=element_count,
                dtype=dtype,
                peer=peer,
                on_device=device is not None and device.type != "cpu",
                timeout=timeout_of(group, device),
            )
        )
    except Exception as error:
        process.failed(error)
        return None


patch = Patch()
"""Of this process."""

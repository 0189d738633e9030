"""Collectives and messages of a process: their groups, numbers, begins, ends and timeouts. There is
one recorder for the whole process, because process groups belong to the process; how calls are
intercepted is not its concern.

Times are the host's: on an accelerator a collective ends for the host when it is queued and
waited for. A timeout that the backend does not reveal is unknown.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rankdump._core.events import EventKind, ProcessGroup
from rankdump._core.recorder_protocol import CollectiveCall, Recorder, StartedEvent
from rankdump._core.timeouts import GroupTimeout
from rankdump._frameworks.model_observer import find_script_line
from rankdump._frameworks.torch.tensors import find_dtype_name

# torch.distributed's stubs leave group names and ranks partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false


ANY_SOURCE = -1
_TORCH_FOLDERS = (f"{Path(torch.__file__).parent}{os.sep}",)

_OPERATION_TITLES = {
    kind: "".join(word.capitalize() for word in kind.name.split("_")) for kind in EventKind
}


class CollectiveCounter:
    """Numbers collectives per group, and messages per group, sender and receiver, from 0.

    Counting goes on in iterations that are not armed: all members must agree on the numbers.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[object, ...], Iterator[int]] = {}

    def next_number(self, *key: object) -> int:
        """Return the next number of a key; takes no lock, which a fork might find held."""
        return next(self._counts.setdefault(key, itertools.count()))


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A collective or message that is about to start."""

    kind: EventKind
    group: ProcessGroup
    rank: int
    """This process's global rank."""
    element_count: int = 0
    dtype: str = ""
    peer: int = ANY_SOURCE
    """Global rank at the other end of a message, if known."""
    scope: str = ""
    """Part of the name between group and operation."""
    on_device: bool = False
    """Its tensors are on an accelerator, whose works do not report their end to the host."""
    timeout: GroupTimeout | None = None
    """Timeout of the group, if known."""
    source: str = ""
    """`file:line` of the script that makes the call, if known."""


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A request that has started; only the first report of its end counts."""

    request: CollectiveRequest
    sequence: int | None
    """None until the sender is known, for a message from any rank."""
    begun: list[tuple[Recorder, StartedEvent]]
    sequences: CollectiveCounter
    _open: list[None] = field(default_factory=lambda: [None])

    def record_end(self, peer: int | None = None) -> None:
        """Record the end; `peer` is the sender if it was unknown until then."""
        try:
            self._open.pop()
        except IndexError:
            return
        if self.sequence is not None:
            for recorder, begun in self.begun:
                recorder.finish_event(begun)
            return
        peer = self.request.peer if peer is None else peer
        sequence = _next_message_number(self.sequences, self.request, peer)
        name, what = (
            format_collective_name(self.request, peer, sequence),
            _make_collective(self.request, peer, sequence),
        )
        for recorder, begun in self.begun:
            recorder.finish_event(begun, name=name, collective=what)

    def record_failure(self) -> None:
        """Record that the call has failed; it is not complete on any member."""
        try:
            self._open.pop()
        except IndexError:
            return
        for recorder, begun in self.begun:
            recorder.finish_event(begun, failed=True)


class CollectiveRecorder:
    """Numbers collectives, and reports them to all registered recorders."""

    def __init__(self) -> None:
        self._sequences = CollectiveCounter()
        self._listeners: list[tuple[Recorder, int]] = []
        self._nesting = threading.local()

    def add_listener(self, recorder: Recorder, graph: int) -> None:
        """Add a recorder; one that several models share receives each event once."""
        self._listeners = [*self._listeners, (recorder, graph)]

    def remove_listener(self, recorder: Recorder, graph: int) -> None:
        """Undo one `add_listener`."""
        remaining = list(self._listeners)
        if (recorder, graph) in remaining:
            remaining.remove((recorder, graph))
        self._listeners = remaining

    @property
    def has_listeners(self) -> bool:
        """Whether a recorder is registered."""
        return bool(self._listeners)

    @property
    def is_nested(self) -> bool:
        """Whether this thread is inside a call that was already counted."""
        return getattr(self._nesting, "depth", 0) > 0

    @contextmanager
    def suppress_nested(self) -> Generator[None]:
        """Count no call that is made within the block."""
        self._nesting.depth = getattr(self._nesting, "depth", 0) + 1
        try:
            yield
        finally:
            self._nesting.depth -= 1

    def begin(self, request: CollectiveRequest) -> PendingCollective:
        """Number a request, and start its event in every armed recorder."""
        if any(recorder.armed for recorder, _ in self._listeners):
            request = replace(request, source=find_script_line(besides=_TORCH_FOLDERS))
        if request.kind.is_collective:
            number = self._sequences.next_number(request.group.name)
        elif request.peer == ANY_SOURCE:
            number = None
        else:
            number = _next_message_number(self._sequences, request, request.peer)
        return PendingCollective(
            request, number, self._start_events(request, number), self._sequences
        )

    def end(self, pending: PendingCollective | None, peer: int | None = None) -> None:
        """Record the end of a request that was begun; never raises."""
        try:
            if pending is not None:
                pending.record_end(peer)
        except Exception as error:
            self.report_failure(error)

    def fail(self, pending: PendingCollective | None) -> None:
        """Record the failure of a request that was begun; never raises."""
        try:
            if pending is not None:
                pending.record_failure()
        except Exception as error:
            self.report_failure(error)

    def warn_once(self, message: str) -> None:
        """Log a warning with every recorder."""
        for recorder, _ in self._listeners:
            recorder.warn_once(message)

    def report_failure(self, error: Exception) -> None:
        """Report that a collective could not be recorded."""
        self.warn_once(f"a collective could not be recorded: {type(error).__name__}: {error}")

    def _start_events(
        self, request: CollectiveRequest, number: int | None
    ) -> list[tuple[Recorder, StartedEvent]]:
        """Start the event in every armed recorder, once in each."""
        started: dict[int, tuple[Recorder, StartedEvent]] = {}
        for recorder, graph in self._listeners:
            if not recorder.armed or id(recorder) in started:
                continue
            if request.timeout is not None:
                recorder.record_group_timeout(request.timeout)
            name, what = (
                format_collective_name(request, request.peer, number),
                _make_collective(request, request.peer, number),
            )
            begun = recorder.start_event(graph=graph, name=name, collective=what)
            started[id(recorder)] = (recorder, begun)
        return list(started.values())


def describe_group(group: dist.ProcessGroup) -> ProcessGroup:
    """Return the name and the global ranks of a process group of torch."""
    return ProcessGroup(str(group.group_name), tuple(dist.get_process_group_ranks(group)))


def count_elements(tensors: Iterable[Tensor]) -> tuple[int, str]:
    """Return the total element count of the tensors, and the element type of the first."""
    found = list(tensors)
    return sum(tensor.numel() for tensor in found), find_dtype_name(found[0]) if found else ""


def format_collective_name(request: CollectiveRequest, peer: int, sequence: int | None) -> str:
    """Return the name of a collective or message, unique within its iteration.

    A message with an unknown sender has no number, and shares its name with others.
    """
    title = _OPERATION_TITLES[request.kind]
    if sequence is None:
        return f"Default/group-{request.group.name}/peer-any/{title}"
    between = request.scope if request.kind.is_collective else f"peer-{peer}/"
    return f"Default/group-{request.group.name}/{between}{title}-op{sequence}"


def _make_collective(request: CollectiveRequest, peer: int, sequence: int | None) -> CollectiveCall:
    return CollectiveCall(
        kind=request.kind,
        group=request.group,
        sequence=sequence or 0,
        element_count=request.element_count,
        dtype=request.dtype,
        peer=peer,
        source=request.source,
    )


def _next_message_number(
    sequences: CollectiveCounter, request: CollectiveRequest, peer: int
) -> int:
    ends = (request.rank, peer) if request.kind is EventKind.SEND else (peer, request.rank)
    return sequences.next_number(request.group.name, *ends)


def list_tensors(value: object, depth: int = 2) -> Sequence[Tensor]:
    """Return the tensors of an argument: itself, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and depth:
        parts = cast("Sequence[object]", value)
        return [tensor for part in parts for tensor in list_tensors(part, depth - 1)]
    return []


collective_recorder = CollectiveRecorder()
"""Recorder of this process: groups and patched methods exist once."""


# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false


_MICROSECOND = timedelta(microseconds=1)
_known_timeouts: weakref.WeakKeyDictionary[Any, dict[str, GroupTimeout | None]] = (
    weakref.WeakKeyDictionary()
)
"""By group, because a name may be reused, and by device type; empty for the group's default."""


def read_group_timeout(
    group: dist.ProcessGroup, device: torch.device | None
) -> GroupTimeout | None:
    """Return the timeout of a group's backend for tensors of a device; None if unknown."""
    known = _known_timeouts.get(group)
    if known is None:
        known = _known_timeouts[group] = {}
    kind = "" if device is None else device.type
    if kind not in known:
        found = (_read_backend_timeout(group, each) for each in _list_devices(group, device))
        known[kind] = next(filter(None, found), None)
    return known[kind]


def _list_devices(group: Any, device: torch.device | None) -> Sequence[torch.device]:
    if device is not None:
        return (device,)
    return tuple(getattr(group, "_device_types", ()))


def _read_backend_timeout(group: Any, device: torch.device) -> GroupTimeout | None:
    try:
        backend = group._get_backend(device)
        limit = backend.options._timeout
        if not isinstance(limit, timedelta) or limit < timedelta():
            return None
        return GroupTimeout(str(group.group_name), backend.name().lower(), limit // _MICROSECOND)
    except (AttributeError, RuntimeError, TypeError):
        return None

"""Collectives and messages of a process: their groups, numbers, begins, ends and timeouts, the
buckets of DistributedDataParallel that they reduce, and collectives that were executed but not
seen. There is one recorder for the whole process, because process groups belong to the process;
interception of the calls is in `collectives`.

Times are those of the host: on an accelerator, a collective ends for the host when it is queued or
waited for. A timeout that the backend does not reveal is unknown.
"""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor

from rankdump._core.black_box import MAX_GROUP_CALLS, GroupCalls
from rankdump._core.events import CallOutcome, EventKind, ProcessGroup, UnseenReason
from rankdump._core.recorder_protocol import CollectiveCall, Recorder, StartedEvent
from rankdump._core.timeouts import GroupTimeout
from rankdump._frameworks.model_observer import find_script_line
from rankdump._frameworks.torch.collective_tensors import (
    CollectiveOperands,
    CollectiveTensorCall,
    begin_tensor_call,
)
from rankdump._frameworks.torch.tensors import find_dtype_name

# torch.distributed's stubs leave group names and ranks partly unknown.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false


ANY_SOURCE = -1
_TORCH_FOLDERS = (f"{Path(torch.__file__).parent}{os.sep}",)

_OPERATION_TITLES = {
    kind: "".join(word.capitalize() for word in kind.name.split("_")) for kind in EventKind
}


CounterKey: TypeAlias = "tuple[object, ...]"
"""Key of a counter: the name of a group; for names of collectives also the kind, for messages
sender and receiver.
"""


class CollectiveCounter:
    """Numbers collectives per group, and messages per group, sender and receiver, from 0.

    The number in a name counts only calls of the same kind, so that calls of another kind that only
    some iterations have, such as broadcasts of the order of buckets, do not shift it. Counting goes
    on in iterations that are not armed, because all members must agree on the numbers.
    """

    def __init__(self) -> None:
        self._counts: dict[CounterKey, Iterator[int]] = {}
        self._reached: dict[CounterKey, int] = {}

    def next_number(self, *key: object) -> int:
        """Return the next number of a key; takes no lock, because another thread may hold it during
        a fork.
        """
        number = next(self._counts.setdefault(key, itertools.count()))
        # If two threads count at once, the first one may come here last; then the names of an
        # iteration that begins now are one too high.
        self._reached[key] = number + 1
        return number

    def copy_counts(self) -> Mapping[CounterKey, int]:
        """Return how often each key was counted so far."""
        return self._reached.copy()


@dataclass(frozen=True, slots=True)
class IterationStart:
    """The running iteration of a recorder, and the counts at its begin."""

    iteration: int = -1
    counts: Mapping[CounterKey, int] = field(default_factory=dict[CounterKey, int])

    def number_within(self, number: int, *key: object) -> int:
        """Return a number of the whole run as a number within the iteration, from 0."""
        return number - self.counts.get(key, 0)


@dataclass(frozen=True, slots=True)
class CollectiveRequest:
    """A collective or message that is about to start."""

    kind: EventKind
    group: ProcessGroup
    rank: int
    """Global rank of this process."""
    element_count: int = 0
    dtype: str = ""
    peer: int = ANY_SOURCE
    """Global rank at the other end of a message; ANY_SOURCE if unknown."""
    scope: str = ""
    """Text in the name between group and operation."""
    on_device: bool = False
    """Whether the tensors are on an accelerator, whose works do not report their end to
    the host.
    """
    timeout: GroupTimeout | None = None
    """Timeout of the group; None if unknown."""
    source: str = ""
    """`file:line` of the script that makes the call; empty if unknown."""


@dataclass(slots=True, eq=False)
class PendingCollective:
    """A request that has started; only the first report of its end counts."""

    request: CollectiveRequest
    sequence: int | None
    """Number of the request; None for a message from any rank until the sender is known."""
    begun: list[tuple[Recorder, StartedEvent, IterationStart]]
    sequences: CollectiveCounter
    tensors: CollectiveTensorCall | None = None
    """The tensors of the call, if the plan selects them."""
    _open: list[None] = field(default_factory=lambda: [None])

    @property
    def is_open(self) -> bool:
        """Whether no end was reported yet."""
        return bool(self._open)

    def record_end(
        self, peer: int | None = None, outcome: CallOutcome = CallOutcome.UNKNOWN
    ) -> None:
        """Record the end of the request; `peer` is the sender if it was not known before.

        A call that failed is not complete on any member.
        """
        try:
            self._open.pop()
        except IndexError:
            return
        if self.sequence is not None or outcome is CallOutcome.FAILED:
            for recorder, begun, _ in self.begun:
                recorder.finish_event(begun, outcome=outcome)
            return
        peer = self.request.peer if peer is None else peer
        key = _find_name_key(self.request, peer)
        sequence = self.sequences.next_number(*key)
        what = _make_collective(self.request, peer, sequence)
        for recorder, begun, start in self.begun:
            number = start.number_within(sequence, *key)
            name = format_collective_name(self.request, peer, number)
            recorder.finish_event(begun, name=name, collective=what, outcome=outcome)


_NamedCall: TypeAlias = "tuple[Recorder, int, str, IterationStart]"
"""Recorder, number of its model, name of the call in this recorder, and its running iteration."""
_NO_ITERATION = IterationStart()


class _LatestCollective(NamedTuple):
    """The last collective of a process group."""

    called_us: int
    kind: EventKind
    group: ProcessGroup
    number: int
    """Number of earlier collectives of the group."""


class CollectiveRecorder:
    """Numbers collectives, and reports them to all registered recorders."""

    def __init__(self) -> None:
        self._sequences = CollectiveCounter()
        self._listeners: list[tuple[Recorder, int]] = []
        self._iterations: dict[int, IterationStart] = {}
        """Running iterations by identity of the recorder."""
        self.is_hidden = False
        """Whether calls are left out of the execution order and of all counts, because a step is
        repeated.
        """
        self._latest: dict[str, _LatestCollective] = {}
        """The last collective of each group, by the group's name."""

    def begin_iteration(self, recorder: Recorder, iteration: int) -> None:
        """Number names of collectives from 0 again, if a new iteration of the recorder begins."""
        known = self._iterations.get(id(recorder))
        if known is None or known.iteration != iteration:
            counts = self._sequences.copy_counts()
            self._iterations[id(recorder)] = IterationStart(iteration, counts)

    def add_listener(self, recorder: Recorder, graph: int) -> None:
        """Add a recorder; a recorder that several models share receives each event once."""
        self._listeners = [*self._listeners, (recorder, graph)]

    def remove_listener(self, recorder: Recorder, graph: int) -> None:
        """Undo one `add_listener`."""
        remaining = list(self._listeners)
        if (recorder, graph) in remaining:
            remaining.remove((recorder, graph))
        self._listeners = remaining
        if all(each is not recorder for each, _ in remaining):
            self._iterations.pop(id(recorder), None)

    @property
    def has_listeners(self) -> bool:
        """Whether a recorder is registered."""
        return bool(self._listeners)

    @property
    def is_armed(self) -> bool:
        """Whether a recorder keeps events now."""
        return any(recorder.armed for recorder, _ in self._listeners)

    def count_collective(self, group: ProcessGroup, kind: EventKind) -> tuple[int, int]:
        """Count a collective; return its number in its group, and its number among those of its
        kind in the group.
        """
        number = self._sequences.next_number(group.name)
        self._latest[group.name] = _LatestCollective(time.time_ns() // 1000, kind, group, number)
        return number, self._sequences.next_number(group.name, int(kind))

    def list_calls(self, *, members: bool) -> tuple[GroupCalls, ...]:
        """Return the progress of this rank in each group, the most recently used group first; may
        be called from any thread.

        Members of groups are included only on request, because there may be thousands.
        """
        latest = sorted(self._latest.copy().values(), key=lambda each: each.called_us, reverse=True)
        return tuple(
            GroupCalls(
                *(each.group.name, each.group.ranks if members else ()),
                *(each.number + 1, each.kind.name.lower(), each.called_us),
            )
            for each in latest[:MAX_GROUP_CALLS]
        )

    def begin(
        self, request: CollectiveRequest, read_operands: Callable[[], CollectiveOperands]
    ) -> PendingCollective:
        """Number a request, record its inputs if they are selected, and start its events.

        `read_operands` is called only if a plan may select the call.
        """
        if self.is_armed:
            request = replace(request, source=find_script_line(besides=_TORCH_FOLDERS))
        if request.kind.is_collective:
            number, name_number = self.count_collective(request.group, request.kind)
        elif request.peer == ANY_SOURCE:
            number = name_number = None
        else:
            key = _find_name_key(request, request.peer)
            number = name_number = self._sequences.next_number(*key)
        named = self._name_call(request, name_number)
        tensors = self._begin_tensors(named, read_operands)
        begun = self._start_events(named, request, number)
        return PendingCollective(request, number, begun, self._sequences, tensors)

    def end(
        self,
        pending: PendingCollective | None,
        peer: int | None = None,
        outcome: CallOutcome = CallOutcome.UNKNOWN,
    ) -> None:
        """Record the end or the failure of a request that was begun; never raises."""
        try:
            if pending is not None:
                pending.record_end(peer, outcome)
        except Exception as error:
            self.report_failure(error)

    def warn_once(self, message: str) -> None:
        """Log a warning with every recorder."""
        for recorder, _ in self._listeners:
            recorder.warn_once(message)

    def report_unseen(self, group: str, reason: UnseenReason, count: int) -> None:
        """Report collectives that were executed but not seen, once to each armed recorder."""
        for recorder in {id(each): each for each, _ in self._listeners}.values():
            if recorder.armed:
                recorder.report_unseen_collectives(group, reason, count)

    def report_failure(self, error: Exception) -> None:
        """Report that a collective could not be recorded."""
        self.warn_once(f"a collective could not be recorded: {type(error).__name__}: {error}")

    def _name_call(self, request: CollectiveRequest, number: int | None) -> list[_NamedCall]:
        """Return each armed recorder once, with the number of its model and the name of
        the call.
        """
        named: dict[int, _NamedCall] = {}
        key = _find_name_key(request, request.peer)
        for recorder, graph in self._listeners:
            if recorder.armed and id(recorder) not in named:
                start = self._iterations.get(id(recorder), _NO_ITERATION)
                within = None if number is None else start.number_within(number, *key)
                name = format_collective_name(request, request.peer, within)
                named[id(recorder)] = (recorder, graph, name, start)
        return list(named.values())

    def _begin_tensors(
        self, named: Sequence[_NamedCall], read_operands: Callable[[], CollectiveOperands]
    ) -> CollectiveTensorCall | None:
        listing = [each[:3] for each in named if each[0].names_operators(each[1])]
        if not listing:
            return None
        try:
            return begin_tensor_call(listing, read_operands)
        except Exception as error:
            self.report_failure(error)
            return None

    def _start_events(
        self, named: Sequence[_NamedCall], request: CollectiveRequest, number: int | None
    ) -> list[tuple[Recorder, StartedEvent, IterationStart]]:
        """Start the event in every armed recorder."""
        started: list[tuple[Recorder, StartedEvent, IterationStart]] = []
        for recorder, graph, name, start in named:
            if request.timeout is not None:
                recorder.record_group_timeout(request.timeout)
            what = _make_collective(request, request.peer, number)
            begun = recorder.start_event(graph=graph, name=name, collective=what)
            started.append((recorder, begun, start))
        return started


_known_groups: weakref.WeakKeyDictionary[Any, ProcessGroup] = weakref.WeakKeyDictionary()


def describe_group(group: dist.ProcessGroup) -> ProcessGroup:
    """Return the name and the global ranks of a process group of torch."""
    known = _known_groups.get(group)
    if known is None:
        known = ProcessGroup(str(group.group_name), tuple(dist.get_process_group_ranks(group)))
        _known_groups[group] = known
    return known


def count_elements(tensors: Iterable[Tensor]) -> tuple[int, str]:
    """Return the number of elements of all tensors, and the element type of the first tensor."""
    found = list(tensors)
    return sum(tensor.numel() for tensor in found), find_dtype_name(found[0]) if found else ""


def format_collective_name(request: CollectiveRequest, peer: int, number: int | None) -> str:
    """Return the name of a collective or message, unique within its iteration.

    `number` is counted within the iteration, so the same call has the same name in every iteration.
    A message with an unknown sender has no number, and shares its name with others.
    """
    title = _OPERATION_TITLES[request.kind]
    if number is None:
        return f"Default/group-{request.group.name}/peer-any/{title}"
    between = request.scope if request.kind.is_collective else f"peer-{peer}/"
    return f"Default/group-{request.group.name}/{between}{title}-op{number}"


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


def _find_name_key(request: CollectiveRequest, peer: int) -> CounterKey:
    """Return the counter key for the number in a name: with the kind, or with sender and receiver
    of a message.
    """
    if request.kind.is_collective:
        # `int` is used because the hash of an enumeration's member is a Python call.
        return (request.group.name, int(request.kind))
    ends = (request.rank, peer) if request.kind is EventKind.SEND else (peer, request.rank)
    return (request.group.name, *ends)


def list_tensors(value: object, depth: int = 2) -> Sequence[Tensor]:
    """Return the tensors of an argument, which is a tensor, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and depth:
        parts = cast("Sequence[object]", value)
        return [tensor for part in parts for tensor in list_tensors(part, depth - 1)]
    return []


collective_recorder = CollectiveRecorder()
"""The recorder of this process; there is only one, because groups and patched methods
exist once.
"""


# The process group is a C++ class whose stubs are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportPrivateUsage=false


_MICROSECOND = timedelta(microseconds=1)
_known_timeouts: weakref.WeakKeyDictionary[Any, dict[str, GroupTimeout | None]] = (
    weakref.WeakKeyDictionary()
)
"""Known timeouts by group object, because a name may be reused, and by device type; the empty type
is the group's default.
"""


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


_ENGINE_MODULES = ("torch.autograd", "torch.autograd.graph")
"""Modules with the Python functions that run autograd's engine."""
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]


class BucketCounter:
    """Counts the buckets that a backward reduces in each process group.

    The reducer of DistributedDataParallel, with or without a built-in communication hook, calls the
    operator of the all-reduce itself, from C++. So nothing is registered with the reducer, and the
    traceback of a failing reduction has no frame of rankdump. It reduces the buckets of a backward
    in the order of their numbers.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        """For each group: the number of the backward, and the number of buckets that it has reduced
        so far.
        """

    def make_scope(self, group: str, caller: FrameType | None, dtype: str) -> str:
        """Return the part of an all-reduce's name that identifies its bucket; empty if it has none.

        `caller` is the innermost Python frame; None in a thread of the engine.
        """
        task = find_backward(caller)
        if task is None:
            return ""
        if dtype == "int32":
            # An all-reduce of integers has the map of the parameters that the ranks used; gradients
            # have no integers.
            return "used-parameters/"
        before, count = self._counts.get(group, (task, 0))
        number = count if before == task else 0
        self._counts[group] = task, number + 1
        return f"bucket-{number}/"


def find_backward(caller: FrameType | None) -> int | None:
    """Return the number of the backward whose engine called an operator without Python code
    between.
    """
    if caller is not None and caller.f_globals.get("__name__") not in _ENGINE_MODULES:
        return None
    find_task = getattr(_C, "_current_graph_task_id", None)
    task = -1 if find_task is None else find_task()
    return None if task == -1 else task


_COUNTED_BACKENDS = frozenset({"gloo"})


class UnseenCollectiveCounter:
    """Collectives that were executed but not seen, by group and reason, until they are taken.

    Process groups count the collectives of their backends: what a group counted between our calls
    was called without torch's operators. Only gloo is compared, whose count rises by collectives of
    the calling thread alone. Replays of a CUDA graph, and groups written in Python, have no such
    count, so they are reported as such.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Count of each group at the last comparison; -1 if it cannot be compared."""
        self._found: Counter[tuple[str, UnseenReason]] = Counter()

    def restart(self) -> None:
        """Forget all counts: collectives while there was no listener are not reported."""
        self._known.clear()
        self._found.clear()
        for group in list_groups():
            self._known[group] = _read_count(group)

    def compare(self, group: dist.ProcessGroup) -> None:
        """Count what a group has executed since the last comparison."""
        before = self._known.get(group)
        if before == -1:
            return
        count = self._known[group] = _read_count(group)
        if before is not None and count > before:
            self._found[str(group.group_name), UnseenReason.BACKEND_CALL] += count - before

    def skip(self, group: dist.ProcessGroup) -> None:
        """Treat everything that a group has counted by now as seen."""
        if self._known.get(group) != -1:
            self._known[group] = _read_count(group)

    def add(self, group: str, reason: UnseenReason) -> None:
        """Count one collective that is known to be missing."""
        self._found[group, reason] += 1

    def take(self) -> dict[tuple[str, UnseenReason], int]:
        """Compare all groups; return and forget all counts."""
        for group in list_groups():
            self.compare(group)
            if is_python_group(group):
                self._found[str(group.group_name), UnseenReason.PYTHON_GROUP] = 0
        found, self._found = dict(self._found), Counter()
        return found


def list_groups() -> list[dist.ProcessGroup]:
    """Return the process groups of which this process is a member."""
    world: Any = getattr(dist.distributed_c10d, "_world", None)
    return list(getattr(world, "pg_map", ()))


def is_python_group(group: dist.ProcessGroup) -> bool:
    """Return whether a Python class implements collectives of the group."""
    classes = type(group).__mro__
    return any("allreduce" in vars(each) for each in classes[: classes.index(dist.ProcessGroup)])


def is_captured(tensor_device: torch.device | None) -> bool:
    """Return whether a call is only captured into a CUDA graph, whose replays are not seen."""
    if tensor_device is None or tensor_device.type != "cuda":
        return False
    return torch.cuda.is_current_stream_capturing()


def _read_count(group: Any) -> int:
    try:
        if str(group.name()).lower() not in _COUNTED_BACKENDS:
            return -1
        return group._get_sequence_number_for_group()
    except (AttributeError, RuntimeError):
        return -1

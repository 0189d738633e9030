"""Protocols and values between framework adapters, recorder and transport: tensors wherever they
lie (`TensorSource`), observations, decisions, staged records, and what an adapter may call on a
session (`Recorder`) or a session on an adapter (`IterationHook`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from rankdump._core.events import EventKind, ProcessGroup
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import TensorSide
from rankdump._core.session_protocol import RecordHead
from rankdump._core.timeouts import GroupTimeout


class TensorSource(Protocol):
    """A tensor wherever it lies; reading its facts costs nothing, `copy_into` one copy."""

    @property
    def dtype(self) -> str:
        """Common name of the element type, as in `contract.dtypes`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost first."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of the elements, packed."""
        ...

    def copy_into(self, target: memoryview) -> None:
        """Write the elements into `byte_count` writable bytes, C order, little endian."""
        ...

    def accelerator(self) -> DeviceCopier | None:
        """Return what can copy the elements on its own; None when only the processor can."""
        ...

    def elements(self) -> memoryview | None:
        """Return the elements where they lie, C order, little endian; None if that needs a copy.

        They are the job's own: good until the caller returns to it, and never to be written.
        """
        ...

    def unordered(self) -> memoryview | None:
        """Return the elements where they lie, in any order; None where even that needs a copy.

        They are the job's own, as those of `elements` are.
        """
        ...

    def get_version(self) -> TensorVersion | None:
        """Return what tells whether the elements are still the same; None where nothing does."""
        ...

    def copy_elements(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        ...

    def make_head_source(self, count: int) -> TensorSource:
        """Return the first elements in C order, as a tensor of one dimension."""
        ...

    def is_finite(self) -> bool:
        """Return whether no element is NaN or infinite; always so for types that have none."""
        ...

    def has_changed(self) -> bool:
        """Return whether the elements are known to have changed since this source was made."""
        ...

    def make_memory_source(self) -> TensorSource:
        """Return a source that stays with the tensor's memory, and keeps nothing else alive."""
        ...

    def read_again(self) -> TensorSource | str:
        """Return the tensor as it is by now, or the reason why it cannot be read any more."""
        ...

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> DeferredStatistics | None:
        """Start computing statistics on the accelerator; None when the tensor is in host memory."""
        ...


class TensorVersion(NamedTuple):
    """A tensor as it stands: the same object, changed as often, has the same elements.

    Writes past the framework, through memory that is shared with another library, do not count.
    """

    tensor_object: object
    """May be referred to weakly."""
    change_count: int
    owner: object
    """The one whose memory it shows, changed as often: itself, or what it is a view of."""


class DeviceCopier(Protocol):
    """Copies one tensor's elements into host memory while the job goes on."""

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Make a stretch of host memory fit for that, for all tensors; None when it cannot be.

        Return what ends it.
        """
        ...

    def copy_into(self, target: memoryview) -> DeviceTransfer:
        """Begin to write the elements, C order, little endian, into a part of pinned memory.

        What the job does to the tensor from now on does not show.
        """
        ...


class DeviceTransfer(Protocol):
    """A copy that an accelerator makes on its own; any thread may ask."""

    def done(self) -> bool:
        """Return whether the elements are there; raise when they never will be."""
        ...


class DeferredStatistics(Protocol):
    """Statistics that are still on an accelerator."""

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        """Return the texts of these others of its own kind, read back all at once."""
        ...


class TensorObservation(NamedTuple):
    """One tensor that an operator read or wrote; owned by the training job.

    A step has thousands of them: of all frozen values this sort is made fastest.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: TensorSide
    slot: int
    argument: str
    """Where in the call the tensor stood: `args.0`, `kwargs.mask`, `out.hidden`."""
    tensor: TensorSource
    state: bool = False
    """A weight, buffer or constant as it stands: no operator read or wrote it just now."""
    constant: bool = False
    """It never changes: kept once for its graph."""


@dataclass(frozen=True, slots=True)
class TensorDecision:
    """Whether a tensor is kept, and why not."""

    is_kept: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A record whose bytes no longer depend on the training job."""

    head: RecordHead
    data: memoryview


class PlacementResult(Enum):
    """What became of an attempt to copy a tensor straight into shared memory."""

    DONE = "done"
    FULL = "full"
    """There was no room, and patience ended."""
    ELSEWHERE = "elsewhere"
    """It has to go another way: no shared memory, or too large for one entry."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """What a collective or message is, beside its times."""

    kind: EventKind
    group: ProcessGroup
    sequence: int
    """Number in its group; of a message in its (group, sender, receiver)."""
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""


@dataclass(slots=True, eq=False)
class StartedEvent:
    """An event that has started; only the trace looks inside.

    Not frozen for one number, which is known late.
    """

    position: int
    start_us: int
    graph: int
    name: str
    collective: CollectiveCall | None
    stall_us: int
    """Of a collective: how long dumping had held the rank up by then."""
    iteration: int = -1
    """The one it was reported in while it was open; -1 as long as it was not."""


class Recorder(Protocol):
    """What an adapter may ask of a session.

    No method raises into the training job or holds it up longer than `block_timeout_s`.
    """

    @property
    def armed(self) -> bool:
        """Whether the plan selects the iteration that runs now on this rank."""
        ...

    def begin_call(self, graph: int, op_name: str) -> None:
        """Say that a forward call of an operator begins, before any tensor of it comes."""
        ...

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        ...

    def observe(self, observation: TensorObservation) -> None:
        """Record a tensor of a side that `wants` has just said is kept."""
        ...

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count a tensor of a side that `wants` has just said is kept, and that cannot be read."""
        ...

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Say that one call of an operator is over: all its tensors were handed over.

        A plan that keeps operators with an overflow, or the one that raised, decides here; one
        that watches operators reads them again.
        """
        ...

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Say which operators of a graph the script marked with `set_dump`.

        Names are scopes without the type and number of a call, as
        `network-Net/conv1-Conv2d`, and dotted names of parameters.
        """
        ...

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described now: in the first armed iteration."""
        ...

    def describe(self, graph: int, node: GraphNode) -> None:
        """Take an operator's part in the graph; the first description of a name counts."""
        ...

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Take a parameter's part in the graph."""
        ...

    @property
    def wants_arguments(self) -> bool:
        """Whether the plan keeps the arguments of operators, in this iteration."""
        ...

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        """Take what an operator was configured with, if the plan selects the operator."""
        ...

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Take where a selected call of an API came from: lines, innermost first.

        For trees with a file of stacks; any other has its stacks from `describe`.
        """
        ...

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Advance the rank's program by one event, which is to be finished whatever happens."""
        ...

    def finish_event(
        self, begun: StartedEvent, *, name: str = "", collective: CollectiveCall | None = None
    ) -> None:
        """Record an event begun earlier as complete now; from any thread.

        Name and collective are given when only the end has shown them.
        """
        ...

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Say what a process group that is used was made with, as often as is convenient."""
        ...

    def warn_once(self, message: str) -> None:
        """Log a warning the first time it is said."""
        ...


class IterationHook(Protocol):
    """What a session calls on an attached adapter."""

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install or remove what observes the job; called on the training thread."""
        ...

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Hand over what is read at the end of an iteration, such as parameters."""
        ...

    def detach(self) -> None:
        """Leave the job as it was before."""
        ...


__all__ = [
    "CollectiveCall",
    "DeferredStatistics",
    "DeviceCopier",
    "DeviceTransfer",
    "IterationHook",
    "PlacementResult",
    "Recorder",
    "StagedRecord",
    "StartedEvent",
    "TensorDecision",
    "TensorObservation",
    "TensorSource",
    "TensorVersion",
]

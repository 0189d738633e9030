"""Protocols and values that framework adapters, recorder and transport exchange: tensors in any
memory (`TensorSource`), observations, decisions, staged records, the calls of an adapter on a
session (`Recorder`), and the calls of a session on an adapter (`IterationHook`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from rankdump._core.black_box import FaultKind, GroupCalls
from rankdump._core.events import CallOutcome, EventKind, ProcessGroup, UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.plan import StatisticPrecision
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.run_card import ModelSummary, ParameterDigest
from rankdump._core.session_protocol import RecordHead
from rankdump._core.tensor_layout import TensorLayout
from rankdump._core.timeouts import GroupTimeout
from rankdump._kernels.kernel_functions import FoundMoments


class TensorSource(Protocol):
    """A tensor in host or device memory. Reading an attribute costs nothing,
    `copy_into` one copy.
    """

    @property
    def dtype(self) -> str:
        """Common name of the element type, as in `_core/element_types.py`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the dimensions, outermost first."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of the elements without gaps."""
        ...

    layout: TensorLayout | None
    """Part of a logical tensor that this tensor is; None for a whole tensor."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements in C order, little endian, into `byte_count` writable bytes."""
        ...

    def accelerator(self) -> DeviceCopier | None:
        """Return the copier of the accelerator that can copy the elements; None if only the CPU
        can.
        """
        ...

    def elements(self) -> memoryview | None:
        """Return a view of the elements in C order, little endian; None if that requires a copy.

        The view is memory of the job: it is valid until control returns to the job, and must not be
        written.
        """
        ...

    def unordered(self) -> memoryview | None:
        """Return a view of the elements in any order; None if that requires a copy. It is valid as
        long as that of `elements`.
        """
        ...

    def get_version(self) -> TensorVersion | None:
        """Return a version that changes with the elements; None if the framework has none."""
        ...

    def copy_elements(self) -> bytes:
        """Return a copy of the elements in C order, little endian."""
        ...

    def locate_elements(self) -> int | bytes:
        """Return the address of the elements in C order, little endian, or else a copy of them.

        The address is valid as long as the view of `elements`.
        """
        ...

    def make_head_source(self, count: int) -> TensorSource:
        """Return the first `count` elements in C order as a source with one dimension."""
        ...

    def is_finite(self) -> bool:
        """Return whether no element is NaN or infinite; always true for types that have neither."""
        ...

    def has_changed(self) -> bool:
        """Return whether the elements are known to have changed since this source was made."""
        ...

    def make_memory_source(self) -> TensorSource:
        """Return a source of the tensor's memory that keeps nothing else alive."""
        ...

    def read_again(self) -> TensorSource | str:
        """Return the tensor as it is now, or the reason why it can no longer be read."""
        ...

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> DeferredStatistics | None:
        """Start computing statistics on the accelerator; None if the tensor is in host memory."""
        ...


class TensorVersion(NamedTuple):
    """Version of a tensor's elements: they are unchanged while the object and its count of changes
    are the same.

    Writes that bypass the framework, through memory shared with another library, are not counted.
    """

    tensor_object: object
    """The tensor's object, which can be referenced weakly."""
    change_count: int
    owner: object
    """The tensor that owns the memory and its count of changes: the tensor itself, or the base of a
    view.
    """


class DeviceCopier(Protocol):
    """Copies the elements of one tensor into host memory while the job goes on."""

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Pin host memory for all copies; return a function that unpins it, or None if pinning is
        impossible.
        """
        ...

    def copy_into(self, target: memoryview) -> DeviceTransfer:
        """Begin to copy the elements, in C order and little endian, into a part of pinned memory.

        Later changes of the tensor by the job do not affect the copy.
        """
        ...


class DeviceTransfer(Protocol):
    """An asynchronous copy by an accelerator; safe to use from any thread."""

    def is_done(self) -> bool:
        """Return whether the copy is complete; raise if it failed."""
        ...


class DeferredStatistics(Protocol):
    """Statistics that are still being computed on an accelerator."""

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        """Return the texts of all `others`, which have this class too, read from the device at
        once.
        """
        ...


class ForwardPass(NamedTuple):
    """Forward pass that a call belongs to; gradients belong to the pass of their forward call."""

    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None if the iteration is not divided."""
    phase: str = ""
    """One of `PASS_PHASES`."""


UNDIVIDED_PASS = ForwardPass()
"""Training pass over a whole batch; also the pass of tensors that belong to no pass, such as
parameters.
"""


class TensorObservation(NamedTuple):
    """One tensor that an operator read or wrote; it belongs to the training job.

    It is a NamedTuple because that is created fastest: a step has thousands of observations.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name of the operator; its components are joined by `/`."""
    side: TensorSide
    slot: int
    argument: str
    """Place of the tensor in its call, such as `args.0`, `kwargs.mask` or `out.hidden`."""
    tensor: TensorSource
    state: bool = False
    """Whether the tensor is a weight, buffer or constant that is read outside of an operator's
    call.
    """
    constant: bool = False
    """Whether the tensor never changes, so that it is kept only once for its graph."""
    forward_pass: ForwardPass = UNDIVIDED_PASS


@dataclass(frozen=True, slots=True)
class TensorDecision:
    """Whether a tensor is kept, and if not, why."""

    is_kept: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A record with a copy of its elements that no longer depends on the training job."""

    head: RecordHead
    data: memoryview


class PlacementResult(Enum):
    """Result of an attempt to copy a tensor directly into shared memory."""

    DONE = "done"
    FULL = "full"
    """There was no space in time."""
    ELSEWHERE = "elsewhere"
    """The tensor must be sent another way: there is no shared memory, or the tensor is too large
    for one entry.
    """


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective or a message, without its times."""

    kind: EventKind
    group: ProcessGroup
    sequence: int
    """Number of a collective in its group, or of a message among those with its group, sender and
    receiver.
    """
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""
    source: str = ""
    """`file:line` of the script that made the call; empty when it is not known."""


@dataclass(slots=True, eq=False)
class StartedEvent:
    """An event that has started, whose fields only the trace reads. It is not frozen because
    `iteration` is set later.
    """

    position: int
    start_us: int
    graph: int
    name: str
    collective: CollectiveCall | None
    stall_us: int
    """For a collective: microseconds for which dumping had delayed the rank when it started."""
    iteration: int = -1
    """Iteration in which the event was reported as open; -1 before."""


class Recorder(Protocol):
    """Calls that an adapter may make on a session; as they are here, nothing is recorded.

    No method raises into the training job, or delays it longer than `block_timeout_s`.
    """

    @property
    def armed(self) -> bool:
        """Whether the plan selects the running iteration on this rank."""
        return False

    @property
    def card(self) -> CardRecorder | None:
        """The run card of the running iteration; None if no card is kept."""
        return None

    @property
    def declared_pass(self) -> ForwardPass:
        """The micro-batch that the script declared last in this iteration, if any."""
        return UNDIVIDED_PASS

    def begin_call(self, graph: int, op_name: str) -> None:
        """Announce that a forward call of an operator begins; called before its tensors are
        observed.
        """

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors on this side of an operator are kept in the running iteration."""
        return False

    def names_operators(self, graph: int) -> bool:
        """Return whether the plan selects operators of a graph individually instead of all of them.

        If the plan selects all operators, tensors of collectives are not to be recorded.
        """
        return False

    def observe(self, observation: TensorObservation) -> None:
        """Record a tensor on a side for which `is_wanted` has just returned True."""

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count a tensor that cannot be read, on a side for which `is_wanted` has just returned
        True.
        """

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Announce that a call of an operator has ended; called after its tensors are observed.

        Plans that keep operators with an overflow, or the operator that raised, decide here; plans
        with watched operators read these again here.
        """

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Set the operators of a graph that the script marked with `set_dump`.

        Names are scopes without the type and number of a call, such as `network-Net/conv1-Conv2d`,
        and dotted names of parameters.
        """

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described for the graph; true in the first armed
        iteration.
        """
        return False

    def describe(self, graph: int, node: GraphNode) -> None:
        """Add an operator to the graph; the first description of a name counts."""

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Add a parameter to the graph."""

    @property
    def wants_arguments(self) -> bool:
        """Whether the plan keeps the arguments of operators in this iteration."""
        return False

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        """Record the arguments that an operator was configured with, if the plan selects it."""

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Record the call stack of a selected API call: its lines, innermost call first.

        It is used by trees with a file of call stacks; other trees take stacks from `describe`.
        """

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Advance the rank's program by one event; the caller must finish the event in any case."""
        return StartedEvent(0, 0, graph, name, collective, 0)

    def record_event(self, *, graph: int, name: str) -> None:
        """Advance the rank's program by one event that has no duration."""

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> None:
        """Record that a started event is over now; may be called from any thread.

        `name` and `collective` are given if they were not known at the start, `outcome` if the
        outcome of a collective is known. A failed event is over on this rank, but not complete.
        """

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Record the timeout that a process group was created with; may be repeated."""

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        """Note that there are no events for `count` collectives of the running iteration; 0 means
        an unknown number.
        """

    def warn_once(self, message: str) -> None:
        """Log a warning, but only the first time."""


@runtime_checkable
class TensorNameFinder(Protocol):
    """An adapter that knows the names of the tensors of its model."""

    @property
    def graph(self) -> int:
        """Number of the model's graph."""
        ...

    def iterate_named(self) -> Iterator[tuple[str, object]]:
        """Yield the parameters and buffers of the model with their names."""
        ...

    def find_layout(
        self, tensor: object
    ) -> Callable[[tuple[int, ...]], TensorLayout | None] | None:
        """Return a function that finds the layout of a parameter, for a tensor that is a part of
        one.
        """
        ...


@runtime_checkable
class HiddenHook(Protocol):
    """An adapter that observes all iterations, and can be suspended for a while."""

    def hide(self, on: bool) -> None:
        """Suspend observing, or resume it."""
        ...


class LateRow(NamedTuple):
    """Pulse of a tensor on an accelerator, which is read back after its step."""

    number: int
    """Number of the tensor's kind."""
    moments: FoundMoments
    gradient: TensorKind | None
    """Kind of the gradient of a parameter; None if the tensor is no gradient of a parameter."""
    source: str = ""
    """`file:line` of the call in the script."""


class TurnSpending(NamedTuple):
    """Fingerprints and copies that a step would make of the tensors whose turn it is."""

    fingerprinted_bytes: int = 0
    fingerprints: int = 0
    copied_bytes: int = 0
    copies: int = 0


class CallLister(Protocol):
    """Lists the progress of a rank in the collectives of its groups; called from any thread."""

    def __call__(self, *, members: bool) -> tuple[GroupCalls, ...]:
        """Return the progress in each group; with `members`, also the members of the groups."""
        ...


class CauseRecorder(Protocol):
    """Receiver of the inputs of a step: digests and numbers; called on the training thread."""

    def add_digest(self, name: str, digest: str) -> None:
        """Keep the digest of an input of the step, such as its batch."""
        ...

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers of the step, such as its loss."""
        ...

    def add_rates(self, optimizer: object, rates: Sequence[float]) -> None:
        """Keep the learning rates of the groups of an optimizer that is about to step."""
        ...


class CardRecorder(CauseRecorder, Protocol):
    """Receiver of the remaining facts of a run card, in iterations that are dumped."""

    has_black_box: bool
    """Whether the hooks of a black box report batch, generators and learning rates."""

    def add_random_states(self) -> None:
        """Keep the digests of the random generators of Python and numpy."""
        ...

    def use_settings(self, settings: Mapping[str, str]) -> None:
        """Keep the seeds and the flags of determinism of a framework."""
        ...

    def add_model(self, graph: int, summary: ModelSummary) -> None:
        """Keep the summary of an attached model; it replaces an earlier summary of the
        same graph.
        """
        ...

    def add_parameters(self, graph: int, digests: Mapping[str, ParameterDigest]) -> None:
        """Keep digests of a model's parameters before the step, by their logical names."""
        ...

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout that the script declared for a parameter, if it fits this shape."""
        ...


class PulseRecorder(CauseRecorder, Protocol):
    """Receiver of what an adapter measures for the black box; called on the training thread."""

    stride: int
    """Number of parts that the modules are divided into; each step measures one of them."""
    part: int
    """Index of the part that is measured in the running step."""

    def note_tensor_count(self, tensor_count: int) -> None:
        """Note the number of tensors of a model: the stride stays so low that every few steps
        measure a tensor.
        """
        ...

    def use_call_lister(self, list_calls: CallLister) -> None:
        """Add to each step how far this rank has come in the collectives of its groups."""
        ...

    def number_kind(self, kind: TensorKind) -> int:
        """Return the number of a kind; -1 if there are too many kinds."""
        ...

    def is_watched(self, op_type: str, op_name: str) -> bool:
        """Return whether a watch rule names an operator, which is then measured in every step."""
        ...

    def add_pulse(
        self, number: int, moments: FoundMoments, find_source: Callable[[], str] = str
    ) -> bool:
        """Add the pulse of a tensor, whose kind has this number; return whether all elements are
        finite.

        `find_source` returns the line of the script that is running.
        """
        ...

    def add_gradient(self, kind: TensorKind, number: int, moments: FoundMoments) -> bool:
        """Add the pulse of the gradient of a parameter."""
        ...

    @property
    def keeps_tensors(self) -> bool:
        """Whether the plan and the agent allow tensors to be kept in full."""
        ...

    def can_afford(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together may be made now."""
        ...

    def is_too_much(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies together take too long or too much memory
        for any step.
        """
        ...

    def add_detail(
        self, number: int, moments: FoundMoments, fingerprint: bytes, byte_count: int, spent_ns: int
    ) -> None:
        """Add the remaining statistics and the fingerprint of the tensor whose pulse was added
        last; `number` is that of its kind. The fingerprint of `byte_count` bytes took `spent_ns`.
        """
        ...

    def keep_tensor(self, kind: TensorKind, number: int, source: TensorSource) -> None:
        """Keep in full the tensor whose pulse was added last and whose kind has this number; count
        it as left out if the budgets have no room.
        """
        ...

    def begin_fault(self) -> bool:
        """Note that a tensor is not finite; return whether neither this step nor the one before had
        such a tensor.
        """
        ...

    def keep_fault(self, number: int, tensors: Sequence[tuple[TensorKind, TensorSource]]) -> None:
        """Keep tensors in full and send them at once: the tensor whose pulse was added last, whose
        kind has this number, and the inputs of its operator. Tensors that do not fit are counted.
        """
        ...

    def count_left_out(self, count: int = 1) -> None:
        """Count tensors that were to be kept in full but are not; without effect if no tensors are
        kept.
        """
        ...

    def add_late_rows(self, iteration: int, rows: Sequence[LateRow]) -> None:
        """Add rows that were measured late to a step that has ended."""
        ...

    def count_skipped(self, count: int = 1) -> None:
        """Count tensors that were not measured."""
        ...

    def add_time(self, spent_ns: int, calls: int = 1) -> None:
        """Add the time that measuring took, and the number of calls of hooks that it
        took place in.
        """
        ...

    def report_fault(
        self,
        kind: FaultKind,
        text: str,
        tensor_kind: TensorKind | None = None,
        source: str = "",
        *,
        iteration: int | None = None,
    ) -> None:
        """Report a fault of an iteration, by default of the running one, so that the agent freezes
        the ring.
        """
        ...


class IterationHook(Protocol):
    """Calls that a session makes on an attached adapter."""

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install or remove hooks for an iteration that begins; called on the training thread."""
        ...

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Observe the tensors that are read at the end of an iteration, such as parameters."""
        ...

    def detach(self) -> None:
        """Remove all changes made to the job."""
        ...

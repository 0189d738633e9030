"""Protocols and values between framework adapters, recorder and transport: tensors in any memory
(`TensorSource`), observations, decisions, staged records, and the calls of an adapter on a session
(`Recorder`) and of a session on an adapter (`IterationHook`).
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
    """A tensor in host or device memory; attributes cost nothing, `copy_into` costs one copy."""

    @property
    def dtype(self) -> str:
        """Common name of the element type, as in `element_types`."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents, outermost first."""
        ...

    @property
    def byte_count(self) -> int:
        """Bytes of the elements, packed."""
        ...

    layout: TensorLayout | None
    """Which part of a logical tensor this is; None for a whole tensor."""

    def copy_into(self, target: memoryview) -> None:
        """Write the elements into `byte_count` writable bytes, C order, little endian."""
        ...

    def accelerator(self) -> DeviceCopier | None:
        """Return the accelerator that can copy the elements; None when only the CPU can."""
        ...

    def elements(self) -> memoryview | None:
        """Return a view of the elements, C order, little endian; None if that needs a copy.

        It shows memory of the job: valid until control returns to the job, and not to be written.
        """
        ...

    def unordered(self) -> memoryview | None:
        """Return a view like that of `elements`, in any order; None if that needs a copy."""
        ...

    def get_version(self) -> TensorVersion | None:
        """Return a version that changes with the elements; None where there is none."""
        ...

    def copy_elements(self) -> bytes:
        """Return a copy of the elements, C order, little endian."""
        ...

    def locate_elements(self) -> int | bytes:
        """Return the address of the elements, C order, little endian, or a copy of them.

        The address is valid as long as the view of `elements`.
        """
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
        """Return a source of the tensor's memory that keeps nothing else alive."""
        ...

    def read_again(self) -> TensorSource | str:
        """Return the tensor in its present state, or the reason why it can no longer be read."""
        ...

    def start_statistics(
        self, items: tuple[str, ...], precision: StatisticPrecision
    ) -> DeferredStatistics | None:
        """Start computing statistics on the accelerator; None when the tensor is in host memory."""
        ...


class TensorVersion(NamedTuple):
    """State of a tensor: the same object with the same count of changes has the same elements.

    Writes past the framework, through memory shared with another library, are not counted.
    """

    tensor_object: object
    """May be referred to weakly."""
    change_count: int
    owner: object
    """The tensor that owns the memory and its count of changes: itself, or the base of a view."""


class DeviceCopier(Protocol):
    """Copies one tensor's elements into host memory while the job goes on."""

    def pin(self, memory: memoryview) -> Callable[[], None] | None:
        """Pin host memory for all copies; return what unpins it, or None when impossible."""
        ...

    def copy_into(self, target: memoryview) -> DeviceTransfer:
        """Begin to write the elements, C order, little endian, into a part of pinned memory.

        Later changes of the tensor by the job do not affect the copy.
        """
        ...


class DeviceTransfer(Protocol):
    """An asynchronous copy by an accelerator; safe to use from any thread."""

    def is_done(self) -> bool:
        """Return whether the copy is complete; raise when it failed."""
        ...


class DeferredStatistics(Protocol):
    """Statistics that are still on an accelerator."""

    def read(self, others: Sequence[DeferredStatistics]) -> list[tuple[str, ...]]:
        """Return the texts of `others`, all of this class, read from the device at once."""
        ...


class ForwardPass(NamedTuple):
    """Forward pass that a call belongs to; gradients belong to that of their forward call."""

    microbatch: int | None = None
    """Number of the micro-batch within the iteration; None when it is not divided."""
    phase: str = ""
    """One of `PASS_PHASES`."""


UNDIVIDED_PASS = ForwardPass()
"""Training pass over a whole batch, and the pass of what belongs to none, such as parameters."""


class TensorObservation(NamedTuple):
    """One tensor that an operator read or wrote; owned by the training job.

    A NamedTuple, which is made fastest: a step has thousands of them.
    """

    graph: int
    op_type: str
    op_name: str
    """Full scope name, components joined by `/`."""
    side: TensorSide
    slot: int
    argument: str
    """Place of the tensor in its call: `args.0`, `kwargs.mask`, `out.hidden`."""
    tensor: TensorSource
    state: bool = False
    """A weight, buffer or constant that is read outside of any operator's call."""
    constant: bool = False
    """It never changes, so it is kept once for its graph."""
    forward_pass: ForwardPass = UNDIVIDED_PASS


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
    """Result of an attempt to copy a tensor directly into shared memory."""

    DONE = "done"
    FULL = "full"
    """There was no space within the time allowed."""
    ELSEWHERE = "elsewhere"
    """It must be sent another way: no shared memory, or too large for one entry."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A collective or message, without its times."""

    kind: EventKind
    group: ProcessGroup
    sequence: int
    """Number in its group; of a message in its (group, sender, receiver)."""
    element_count: int = 0
    dtype: str = ""
    peer: int = -1
    """Global rank at the other end of a send or receive."""
    source: str = ""
    """`file:line` of the script that made the call; empty when it is not known."""


@dataclass(slots=True, eq=False)
class StartedEvent:
    """An event that has started; only the trace reads it. Not frozen: `iteration` is set late."""

    position: int
    start_us: int
    graph: int
    name: str
    collective: CollectiveCall | None
    stall_us: int
    """Of a collective: how long dumping had held the rank up by then."""
    iteration: int = -1
    """Iteration in which it was reported while it was open; -1 until then."""


class Recorder(Protocol):
    """Calls that an adapter may make on a session; as they are here, nothing is recorded.

    No method raises into the training job or holds it up longer than `block_timeout_s`.
    """

    @property
    def armed(self) -> bool:
        """Whether the plan selects the iteration that runs now on this rank."""
        return False

    @property
    def card(self) -> CardRecorder | None:
        """The run card of the running iteration; None where none is kept."""
        return None

    @property
    def declared_pass(self) -> ForwardPass:
        """The micro-batch that the script declared last in this iteration, if any."""
        return UNDIVIDED_PASS

    def begin_call(self, graph: int, op_name: str) -> None:
        """Announce a forward call of an operator, before any of its tensors."""

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors of that operator and side are kept in this iteration."""
        return False

    def names_operators(self, graph: int) -> bool:
        """Return whether the plan selects operators of a graph one by one.

        If it selects all of them, no tensor of a collective is to be recorded.
        """
        return False

    def observe(self, observation: TensorObservation) -> None:
        """Record a tensor of a side for which `is_wanted` has just returned True."""

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count a tensor that cannot be read, of a side for which `is_wanted` returned True."""

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Announce the end of an operator's call, after all of its tensors.

        A plan that keeps operators with an overflow, or the one that raised, decides here; one
        that watches operators reads them again.
        """

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Set the operators of a graph that the script marked with `set_dump`.

        Names are scopes without the type and number of a call, as
        `network-Net/conv1-Conv2d`, and dotted names of parameters.
        """

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described now: in the first armed iteration."""
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
        """Record the configuration of an operator, if the plan selects it."""

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Record the stack of a selected call of an API: lines, innermost first.

        For trees with a file of stacks; others take stacks from `describe`.
        """

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Advance the rank's program by one event, which must be finished in any case."""
        return StartedEvent(0, 0, graph, name, collective, 0)

    def record_event(self, *, graph: int, name: str) -> None:
        """Advance the rank's program by one event without a duration."""

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> None:
        """Record an event begun earlier as complete now; from any thread.

        Name and collective are given when they were not known at the start, `outcome` of a
        collective whose outcome is known. One that has failed is over on this rank, but not
        complete.
        """

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Record the timeout that a process group was made with; may be repeated."""

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        """Note that collectives of this iteration are not among the events; 0: unknown number."""

    def warn_once(self, message: str) -> None:
        """Log a warning, once for each message."""


@runtime_checkable
class TensorNameFinder(Protocol):
    """An adapter that knows the names of its model's tensors."""

    @property
    def graph(self) -> int:
        """Number of the model."""
        ...

    def iterate_named(self) -> Iterator[tuple[str, object]]:
        """Yield the parameters and buffers of the model with their names."""
        ...

    def find_layout(
        self, tensor: object
    ) -> Callable[[tuple[int, ...]], TensorLayout | None] | None:
        """Return the function that finds the layout of a parameter, for one that is a part."""
        ...


@runtime_checkable
class HiddenHook(Protocol):
    """An adapter that observes all iterations, and can be told to do nothing for a while."""

    def hide(self, on: bool) -> None:
        """Do nothing from now on, or go on."""
        ...


class LateRow(NamedTuple):
    """Pulse of a tensor on an accelerator."""

    number: int
    """Of its kind."""
    moments: FoundMoments
    gradient: TensorKind | None
    """The kind of the gradient of a parameter; None for another tensor."""
    source: str = ""
    """`file:line` of the call in the script."""


class TurnSpending(NamedTuple):
    """What a step spends on tensors whose turn it is."""

    fingerprinted_bytes: int = 0
    fingerprints: int = 0
    copied_bytes: int = 0
    copies: int = 0


class CallLister(Protocol):
    """Returns how far a rank has come in the collectives of its groups; on any thread."""

    def __call__(self, *, members: bool) -> tuple[GroupCalls, ...]:
        """Return it, with the members of the groups on request."""
        ...


class CauseRecorder(Protocol):
    """Takes what a step is computed from, on the training thread."""

    def add_digest(self, name: str, digest: str) -> None:
        """Keep the digest of something that the step was computed from."""
        ...

    def note(self, numbers: Mapping[str, float]) -> None:
        """Keep numbers of the step, such as its loss."""
        ...

    def add_rates(self, optimizer: object, rates: Sequence[float]) -> None:
        """Keep the learning rates of the groups of an optimizer that is about to step."""
        ...


class CardRecorder(CauseRecorder, Protocol):
    """Takes what a run card has beyond that, in iterations that are dumped."""

    has_black_box: bool
    """Whether batch, generators and learning rates come from the hooks of a black box."""

    def add_random_states(self) -> None:
        """Keep the digests of the generators of Python and numpy."""
        ...

    def use_settings(self, settings: Mapping[str, str]) -> None:
        """Keep seeds and flags of determinism of a framework."""
        ...

    def add_model(self, graph: int, summary: ModelSummary) -> None:
        """Keep the summary of an attached model; it replaces an earlier one of that number."""
        ...

    def add_parameters(self, graph: int, digests: Mapping[str, ParameterDigest]) -> None:
        """Keep digests of parameters of a model before the step, by their logical names."""
        ...

    def find_layout(self, name: str, shape: tuple[int, ...]) -> TensorLayout | None:
        """Return the layout that the script declared for a parameter, if it fits that shape."""
        ...


class PulseRecorder(CauseRecorder, Protocol):
    """Takes what an adapter measures for the black box, on the training thread."""

    stride: int
    """One of so many parts of the modules is measured in each step."""
    part: int
    """The part that is measured in the running step."""

    def limit_stride(self, tensors: int) -> None:
        """Note that a model has so many tensors: a step now and then measures one at least."""
        ...

    def use_calls(self, list_calls: CallLister) -> None:
        """Have each step say how far this rank has come in the collectives of its groups."""
        ...

    def number_kind(self, kind: TensorKind) -> int:
        """Return the number of a kind; -1 when there are too many."""
        ...

    def is_watched(self, op_type: str, op_name: str) -> bool:
        """Return whether a watch rule names an operator, which is then measured in every step."""
        ...

    def add_pulse(
        self, number: int, moments: FoundMoments, find_source: Callable[[], str] = str
    ) -> bool:
        """Add a row of the kind of that number; return whether all elements are finite.

        `find_source` returns the line of the script that is running.
        """
        ...

    def add_gradient(self, kind: TensorKind, number: int, moments: FoundMoments) -> bool:
        """Add a row of the gradient of a parameter."""
        ...

    @property
    def keeps_tensors(self) -> bool:
        """Whether the plan and the agent have room for tensors in full."""
        ...

    def can_afford(self, spending: TurnSpending) -> bool:
        """Return whether these fingerprints and copies may be made now, together."""
        ...

    def is_too_much(self, spending: TurnSpending) -> bool:
        """Return whether they take too long, or too much memory, in any step."""
        ...

    def add_detail(
        self, number: int, moments: FoundMoments, fingerprint: bytes, byte_count: int, spent_ns: int
    ) -> None:
        """Add the other statistics and the fingerprint of the tensor whose pulse was added last,
        of the kind of that number. `spent_ns` is what the fingerprint took, of so many bytes.
        """
        ...

    def keep_tensor(self, kind: TensorKind, number: int, source: TensorSource) -> None:
        """Keep the tensor whose pulse was added last in full, of the kind of that number; or count
        it where the budgets have no room.
        """
        ...

    def begin_fault(self) -> bool:
        """Note that a tensor is not finite; return whether its fault is new, in this step and in
        the one before.
        """
        ...

    def keep_fault(self, number: int, tensors: Sequence[tuple[TensorKind, TensorSource]]) -> None:
        """Keep tensors in full and send them at once: the one whose pulse was added last, of the
        kind of that number, and the inputs of its operator; and count those that do not fit.
        """
        ...

    def count_left_out(self, count: int = 1) -> None:
        """Count tensors that were to be kept in full, if any are kept."""
        ...

    def add_late_rows(self, iteration: int, rows: Sequence[LateRow]) -> None:
        """Add rows to a step that has ended."""
        ...

    def count_skipped(self, count: int = 1) -> None:
        """Count tensors that were not measured."""
        ...

    def add_time(self, spent_ns: int, calls: int = 1) -> None:
        """Add time that measuring took, in calls of hooks."""
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
        """Report a fault, by default of the running iteration; the agent freezes the ring."""
        ...


class IterationHook(Protocol):
    """Calls that a session makes on an attached adapter."""

    def iteration_begins(self, iteration: int, armed: bool) -> None:
        """Install or remove the hooks; called on the training thread."""
        ...

    def iteration_ends(self, iteration: int, armed: bool) -> None:
        """Observe what is read at the end of an iteration, such as parameters."""
        ...

    def detach(self) -> None:
        """Remove all changes made to the job."""
        ...

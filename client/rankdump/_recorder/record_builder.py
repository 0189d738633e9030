"""Builder and sender of a rank's records: an observed tensor is named, stamped and staged, and
becomes a record, a row of statistics, or a loss with a reason, which is counted and sent at once or
in batches.

Every observation ends in exactly one of these items; building an item never raises. Staging makes
one copy into memory that outlives the step, either the agent's shared memory or the heap under a
byte budget. It never compresses, and never waits longer than the plan allows.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from typing import TypeAlias

from rankdump._core.bounded_cache import remember
from rankdump._core.drop_reasons import BUFFER_FULL, STEP_OVERHEAD
from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import UNNAMED_MODEL, DumpPlan
from rankdump._core.record import StatisticRows, TensorKind, TensorSide
from rankdump._core.recorder_protocol import (
    ForwardPass,
    PlacementResult,
    StagedRecord,
    TensorObservation,
    TensorSource,
)
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.session_protocol import (
    CallStacks,
    KernelArguments,
    OperatorArguments,
    RecordHead,
)
from rankdump._core.tensor_layout import TensorLayout, make_sample_layout
from rankdump._layout.tree_layouts import DEFAULT_LAYOUT, Layout
from rankdump._recorder.iteration_state import (
    IterationCounters,
    IterationState,
    LostTensor,
    StallTimer,
)
from rankdump._recorder.overhead_governor import RecordForm
from rankdump._recorder.plan_settings import ROW_BYTES, SAMPLE_ELEMENTS, is_statistics_only
from rankdump._recorder.step_overhead import StepOverhead
from rankdump._recorder.tensor_statistics import (
    SMALL_TENSOR_BYTES,
    RowBatch,
    StatisticsCalculator,
    TensorStatisticsRow,
)
from rankdump._transport.frame_queue import COPY_FAILED
from rankdump._transport.send_buffer import SendBuffer
from rankdump._wire.session_messages import remember_kind

_logger = logging.getLogger(__name__)

_MAX_REMEMBERED_NAMES = 1 << 14
"""Limit for a training loop that never calls `step`, in which every call number makes a
new name.
"""


class TimestampAllocator:
    """Allocates time stamps that name files and sort rows; safe to use from several threads.

    Each time stamp is later than all before it, unless all tensors of a call share the time of the
    first one.
    """

    def __init__(self, clock_us: Callable[[], int], *, shared: bool) -> None:
        self._clock_us = clock_us
        self.shared = shared
        """Whether all tensors of a call share the time of its first tensor."""
        self._lock = threading.Lock()
        self._last_us = 0
        self._iteration = -1
        self._calls: dict[tuple[int, str], tuple[int, set[int]]] = {}
        """For each call of the running iteration its time stamp, and the tensors that have it."""

    def allocate(self, kind: TensorKind, iteration: int) -> int:
        """Return the time stamp of a tensor of this kind in microseconds since the epoch."""
        with self._lock:
            if not self.shared:
                return self._next_us()
            if iteration != self._iteration or len(self._calls) >= _MAX_REMEMBERED_NAMES:
                self._calls.clear()
                self._iteration = iteration
            call = kind.graph, kind.op_name
            place = -kind.slot - 1 if kind.side is TensorSide.OUTPUT else kind.slot
            known = self._calls.get(call)
            # If the call already had this tensor, the tensor belongs to a new call of the same
            # name.
            if known is None or place in known[1]:
                known = self._calls[call] = self._next_us(), set[int]()
            known[1].add(place)
            return known[0]

    def end_call(self, graph: int, op_name: str) -> None:
        """End a forward call. The end of a backward is ignored, because it may be reported too
        early.
        """
        if not op_name.startswith(GRADIENTS_PREFIX):
            with self._lock:
                self._calls.pop((graph, op_name), None)

    def _next_us(self) -> int:
        stamp_us, last_us = self._clock_us(), self._last_us
        self._last_us = stamp_us = stamp_us if stamp_us > last_us else last_us + 1
        return stamp_us


_KindPlace: TypeAlias = "tuple[int, str, TensorSide, int, ForwardPass]"
_KindDetails: TypeAlias = "tuple[str, str, bool, str, tuple[int, ...], TensorLayout | None]"
"""Properties of a kind that may differ between tensors of the same operator, side and slot."""


class RecordNamer:
    """Finds the kind and the head of each tensor of one rank; safe to use from several threads."""

    def __init__(
        self,
        *,
        rank: int,
        net_name: str,
        clock_us: Callable[[], int],
        layout: Layout = DEFAULT_LAYOUT,
    ) -> None:
        """`net_name` is the network name of the plan; if it is set, it replaces the names of
        models.
        """
        self._rank = rank
        self._net_name = net_name
        self._unknown_id = layout.unknown_id
        self._stamps = TimestampAllocator(clock_us, shared=layout.shares_timestamps)
        self.needs_call_ends = layout.shares_timestamps
        """Whether tensors of a call share a time stamp, so that the end of the call must be
        reported.
        """
        # In an API dump each call has its own name, so kinds need not be remembered.
        self._remembers = layout.api_files is None
        self.stamp = self._stamps.allocate
        """Returns the time stamp, in microseconds, that names a tensor's file or sorts its row."""
        self._models: dict[int, str] = {}
        self._kinds: dict[_KindPlace, tuple[_KindDetails, TensorKind]] = {}

    @property
    def op_names(self) -> set[str]:
        """Names of the operators that had a tensor so far; called from any thread."""
        return {place[1] for place in list(self._kinds)}

    def name_model(self, graph: int, name: str) -> None:
        """Set the name of a graph's model, and forget the kinds that have its old name."""
        self._models[graph] = name
        self._kinds.clear()

    def get_model_name(self, graph: int) -> str:
        """Return the name of a graph's model."""
        return self._net_name or self._models.get(graph, UNNAMED_MODEL)

    def find_kind(self, observation: TensorObservation, source: TensorSource) -> TensorKind:
        """Return the kind of the observed tensor; `source` reads the tensor or a sample of it.

        If names repeat, the same object is returned while type and shape stay the same.
        """
        if not self._remembers:
            return self._make_kind(observation, source)
        graph, op_type, op_name, side, slot, argument, _, _, constant, forward = observation
        place = (graph, op_name, side, slot, forward)
        details = (op_type, argument, constant, source.dtype, source.shape, source.layout)
        known = self._kinds.get(place)
        if known is not None and known[0] == details:
            return known[1]
        kind = self._make_kind(observation, source)
        remember_kind(kind)
        return remember(self._kinds, place, (details, kind), _MAX_REMEMBERED_NAMES)[1]

    def end_call(self, graph: int, op_name: str) -> None:
        """End a call: the next call of the same name gets a new time stamp."""
        if self.needs_call_ends:
            self._stamps.end_call(graph, op_name)

    def make_head(
        self, kind: TensorKind, *, iteration: int, switched_on: bool = False
    ) -> RecordHead:
        """Return the head of a record of this kind, with the present time."""
        stamp_us, unknown = self.stamp(kind, iteration), self._unknown_id
        # This equals `RecordHead(...)` in a third of the time: every tensor needs a head.
        fields = kind, iteration, stamp_us, self._rank, unknown, unknown, switched_on
        return tuple.__new__(RecordHead, fields)

    def _make_kind(self, observation: TensorObservation, source: TensorSource) -> TensorKind:
        graph, op_type, op_name, side, slot, argument, _, _, constant, forward = observation
        model = self._net_name or self._models.get(graph, UNNAMED_MODEL)
        elements = source.dtype, tuple(source.shape), source.byte_count
        place = graph, op_type, op_name, side, slot
        # This equals `TensorKind(...)` in a third of the time: in an API dump every tensor has a
        # kind of its own.
        fields = (*place, *elements, argument, constant, model, source.layout, *forward)
        return tuple.__new__(TensorKind, fields)


MIN_RECORD_BYTES = 512
"""Least bytes that a record is charged: the approximate size of one without elements."""
CALL_BYTES = 256
"""Approximate bytes of a call with its stack; a repeated stack is sent once."""


class StagingBudget:
    """Budget of bytes that may be held at once; an item larger than the limit is admitted alone."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0
        """Number of bytes that are held now."""
        self._freed = threading.Condition()

    def resize(self, limit_bytes: int) -> None:
        """Set another limit; bytes held above the new limit stay held."""
        with self._freed:
            self._limit_bytes = limit_bytes
            self._freed.notify_all()

    def acquire(self, byte_count: int, compute_remaining_s: Callable[[], float]) -> bool:
        """Hold the bytes, and wait for space while time remains; return False if there was none in
        time.
        """
        with self._freed:
            while self.held_bytes and self.held_bytes + byte_count > self._limit_bytes:
                left_s = compute_remaining_s()
                if left_s <= 0:
                    return False
                # The wait is at most a second at a time, because the remaining time is extended
                # whenever the agent makes progress.
                self._freed.wait(min(left_s, 1.0))
            self.held_bytes += byte_count
            return True

    def release(self, byte_count: int) -> None:
        """Release held bytes, and wake the threads that wait for space."""
        with self._freed:
            self.held_bytes -= byte_count
            self._freed.notify_all()


class StagingBuffer:
    """Reserves space for records and rows, and copies tensors; safe for several threads."""

    def __init__(
        self,
        send_buffer: SendBuffer,
        *,
        records: StagingBudget,
        rows: StagingBudget,
        copies_directly: bool = True,
    ) -> None:
        """`copies_directly` permits copies into shared memory.

        Rows of statistics have their own budget, so that they are sent even if records have used up
        theirs.
        """
        self._send_buffer = send_buffer
        self._records = records
        self._rows = rows
        self._copies_directly = copies_directly

    def resize_rows(self, limit_bytes: int) -> None:
        """Set another limit of the budget of rows."""
        self._rows.resize(limit_bytes)

    def keep(self, head: RecordHead, source: TensorSource) -> RecordHead | StagedRecord | None:
        """Copy the elements of a record once; return None if there is no space.

        The head alone is returned if the elements are in shared memory, because nothing is left to
        send then.
        """
        if self._copies_directly:
            result = self._send_buffer.place_record(head, source)
            if result is PlacementResult.DONE:
                return head
            if result is PlacementResult.FULL:
                return None
        charge = _compute_charge(head)
        if not self._records.acquire(charge, self._send_buffer.compute_remaining_wait_s):
            return None
        try:
            data = memoryview(bytearray(head.byte_count))
            source.copy_into(data)
        except BaseException:
            self._records.release(charge)
            raise
        return StagedRecord(head, data)

    def admit(self, rows: StatisticRows) -> bool:
        """Reserve space for rows until `release`; return False if there was no space in time."""
        charge = _compute_row_charge(rows)
        return self._rows.acquire(charge, self._send_buffer.compute_remaining_wait_s)

    def admit_at_once(self, stacks: CallStacks) -> bool:
        """Reserve space for call stacks until `release`, without waiting; return False if there is
        none.
        """
        return self._rows.acquire(len(stacks.calls) * CALL_BYTES, lambda: 0.0)

    def release(self, item: StagedRecord | StatisticRows | CallStacks) -> None:
        """Release the reserved space of an item that was sent."""
        if isinstance(item, StatisticRows):
            self._rows.release(_compute_row_charge(item))
        elif isinstance(item, CallStacks):
            self._rows.release(len(item.calls) * CALL_BYTES)
        else:
            self._records.release(_compute_charge(item.head))


def _compute_charge(head: RecordHead) -> int:
    return max(head.byte_count, MIN_RECORD_BYTES)


def _compute_row_charge(rows: StatisticRows) -> int:
    return len(rows) * ROW_BYTES + sum(map(len, rows.fingerprints))


NO_STATISTICS = "no_statistics"
UNSUPPORTED_DTYPE = "unsupported_dtype"


BuildResult: TypeAlias = "RecordHead | StagedRecord | TensorStatisticsRow | LostTensor"
"""Result of an observation; a head alone stands for a record in shared memory."""


class RecordBuilder:
    """Builds a record, a row or a loss from each observation as the plan says; safe to use from
    several threads.
    """

    def __init__(
        self,
        plan: DumpPlan,
        iteration_state: IterationState,
        *,
        namer: RecordNamer,
        staging: StagingBuffer,
        calculator: StatisticsCalculator | None,
        stalls: StallTimer,
        overhead: StepOverhead | None = None,
    ) -> None:
        """`overhead` selects the form of tensors if the plan limits the overhead."""
        self._overhead = overhead
        self._iteration_state = iteration_state
        self._namer = namer
        self.end_call = namer.end_call
        """Ends a call: later tensors of the same name belong to another call."""
        self.needs_call_ends = namer.needs_call_ends
        """Whether `end_call` must be called, because time stamps depend on it."""
        self._staging = staging
        self._stalls = stalls
        self._loss_reason = ""
        self.use_plan(plan, calculator)

    def use_plan(self, plan: DumpPlan, calculator: StatisticsCalculator | None) -> None:
        """Build records as another plan says from now on."""
        self._sample_elements = plan.content.sample_elements
        self._no_elements = is_statistics_only(plan)
        self._degrades = plan.delivery.on_full == "statistic"
        self._calculator = calculator

    def lose_further(self, reason: str) -> None:
        """Make every further tensor a loss with this reason, without a copy, because no agent takes
        tensors.
        """
        self._loss_reason = reason

    def build_record(self, observation: TensorObservation) -> BuildResult:
        """Return the item of an observed tensor, which is copied or measured now."""
        source = observation.tensor
        # The row of a small tensor never waits for space, and measuring the time of this call would
        # take as long as the call.
        is_timed = not self._no_elements or source.byte_count > SMALL_TENSOR_BYTES
        if is_timed:
            self._stalls.begin()
        try:
            return self._build(observation, source)
        except Exception:  # a tensor that cannot be read must not end the training
            _logger.debug("copy failed", exc_info=True)
            return self.make_loss(observation.op_name, COPY_FAILED)
        finally:
            if is_timed:
                self._stalls.end()

    def rebuild_record(self, observation: TensorObservation) -> BuildResult:
        """Return the item of a tensor that was kept by reference; it is copied or measured as it is
        now.
        """
        try:
            tensor = observation.tensor.read_again()
        except Exception:  # a tensor that cannot be read must not end the training
            _logger.debug("tensor unknown", exc_info=True)
            return self.make_loss(observation.op_name, COPY_FAILED)
        if isinstance(tensor, str):
            return self.make_loss(observation.op_name, tensor)
        return self.build_record(observation._replace(tensor=tensor))

    def make_loss(self, op_name: str, reason: str) -> LostTensor:
        """Return the loss of a tensor of the running iteration."""
        return LostTensor(self._iteration_state.iteration, op_name, reason)

    def _build(self, observation: TensorObservation, source: TensorSource) -> BuildResult:
        if self._loss_reason:
            return self.make_loss(observation.op_name, self._loss_reason)
        if source.dtype not in ELEMENT_TYPES:
            return self.make_loss(observation.op_name, UNSUPPORTED_DTYPE)
        if self._sample_elements:
            source = self._take_sample(source, self._sample_elements)
        if self._overhead is not None:
            form = self._overhead.select_form()
            if form is not RecordForm.FULL:
                lesser = self._reduce(observation, source, form)
                if isinstance(lesser, (LostTensor, TensorStatisticsRow)):
                    return lesser
                source = lesser
        state = self._iteration_state
        kind = self._namer.find_kind(observation, source)
        if self._no_elements:
            row = self._make_row(kind, source)
            return self.make_loss(kind.op_name, NO_STATISTICS) if row is None else row
        head = self._namer.make_head(kind, iteration=state.iteration, switched_on=state.switched)
        record = self._staging.keep(head, source)
        if record is not None:
            return record
        row = self._make_row(kind, source, degraded=BUFFER_FULL) if self._degrades else None
        return self.make_loss(kind.op_name, BUFFER_FULL) if row is None else row

    def _reduce(
        self, observation: TensorObservation, source: TensorSource, form: RecordForm
    ) -> TensorSource | TensorStatisticsRow | LostTensor:
        """Return what a form other than the full one keeps of a tensor."""
        if form is RecordForm.NOTHING:
            return self.make_loss(observation.op_name, STEP_OVERHEAD)
        # A part of a logical tensor has a layout already, which cannot say that elements are
        # missing.
        if form is RecordForm.SAMPLE and source.layout is None:
            first = self._take_sample(source, SAMPLE_ELEMENTS)
            if first is not source:
                first.layout = make_sample_layout(tuple(source.shape), SAMPLE_ELEMENTS)
            return first
        kind = self._namer.find_kind(observation, source)
        row = self._make_row(kind, source, degraded=STEP_OVERHEAD)
        return self.make_loss(kind.op_name, STEP_OVERHEAD) if row is None else row

    def _make_row(
        self, kind: TensorKind, source: TensorSource, *, degraded: str = ""
    ) -> TensorStatisticsRow | None:
        """Return the row of a tensor; None if the plan keeps no statistics, or if the element type
        has none.
        """
        calculator = self._calculator
        if calculator is None or kind.dtype not in calculator.measured_types:
            return None
        state = self._iteration_state
        iteration, switched = state.iteration, state.switched
        stamp_us = self._namer.stamp(kind, iteration)
        statistics = calculator.measure_tensor(source, kind.layout)
        # This equals `TensorStatisticsRow(...)` in a third of the time.
        fields = kind, stamp_us, statistics, iteration, switched, degraded
        return tuple.__new__(TensorStatisticsRow, fields)

    def _take_sample(self, source: TensorSource, count: int) -> TensorSource:
        return source.make_head_source(count) if count < math.prod(source.shape) else source


_MAX_ARGUMENTS_AT_ONCE = 500

OperatorItem: TypeAlias = "BuildResult | OperatorArguments"
"""Any item that can be kept of an operator."""


class RecordSender:
    """Sends the items of operators in the order of the calls of `send`; safe to use from several
    threads.
    """

    def __init__(
        self,
        *,
        iteration_state: IterationState,
        counters: IterationCounters,
        stalls: StallTimer,
        staging: StagingBuffer,
        calculator: StatisticsCalculator | None,
        send_buffer: SendBuffer,
        on_lost: Callable[[str, str], None],
        batch_rows: int,
    ) -> None:
        """Rows of statistics wait until there are `batch_rows` of them, or until the iteration
        ends.
        """
        self._iteration_state, self._counters = iteration_state, counters
        self._stalls = stalls
        self._staging = staging
        self._send_buffer = send_buffer
        self._on_lost = on_lost
        self.use_calculator(calculator, batch_rows)
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._arguments: list[OperatorArguments] = []

    def use_calculator(self, calculator: StatisticsCalculator | None, batch_rows: int) -> None:
        """Compute statistics with another calculator from now on; called while no row waits."""
        self._calculator = calculator
        self._batch = RowBatch(batch_rows)

    def send(self, item: OperatorItem) -> None:
        """Send an item of an operator of the running iteration."""
        if isinstance(item, TensorStatisticsRow):
            if self._batch.add(item):
                self._send_rows()
        elif isinstance(item, RecordHead):
            self._counters.count_sent(item.iteration)
        elif isinstance(item, StagedRecord):
            self._counters.count_sent(item.head.iteration)
            self._send_buffer.submit(item)
        elif isinstance(item, LostTensor):
            self._count_loss(item)
        else:
            with self._lock:
                self._arguments.append(item)
                if len(self._arguments) >= _MAX_ARGUMENTS_AT_ONCE:
                    self._send_arguments()

    def release_items(self, items: Iterable[object]) -> None:
        """Release the reserved space of records that are not sent."""
        for item in items:
            if isinstance(item, StagedRecord):
                self._staging.release(item)

    def flush(self) -> None:
        """Send the rows and arguments that waited for the end of the iteration."""
        self._send_rows()
        with self._lock:
            self._send_arguments()

    def _send_rows(self) -> None:
        if self._calculator is None:
            return
        with self._stalls.measure_stall(), self._in_turn:
            for rows in self._batch.drain_rows(self._calculator):
                if isinstance(rows, LostTensor):
                    self._count_loss(rows)
                elif self._staging.admit(rows):
                    self._counters.count_sent(rows.iteration, len(rows))
                    self._send_buffer.submit(rows)
                else:
                    self._counters.count_lost(rows.iteration, BUFFER_FULL, len(rows))
                    self._on_lost(BUFFER_FULL, rows.kinds[0].op_name)

    def _count_loss(self, lost: LostTensor) -> None:
        self._counters.count_lost(lost.iteration, lost.reason)
        self._on_lost(lost.reason, lost.op_name)

    def _send_arguments(self) -> None:
        operators, self._arguments = tuple(self._arguments), []
        if operators:
            iteration = self._iteration_state.iteration
            self._send_buffer.submit(KernelArguments(iteration, operators))

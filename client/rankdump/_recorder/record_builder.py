"""Builder and sender of records: an observed tensor becomes a record, a row of statistics, or a
loss with its reason, and is counted and submitted at once or in batches.

Every attempt ends in exactly one item; building never raises.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from rankdump._core.element_types import ELEMENT_TYPES
from rankdump._core.plan import DumpPlan
from rankdump._core.record import StatisticRows, TensorKind
from rankdump._core.recorder_protocol import StagedRecord, TensorObservation, TensorSource
from rankdump._core.session_protocol import KernelArguments, OperatorArguments
from rankdump._recorder.iteration_state import IterationCounters, IterationState, StallTimer
from rankdump._recorder.plan_settings import is_statistics_only
from rankdump._recorder.record_namer import RecordNamer
from rankdump._recorder.staging_buffer import StagingBuffer
from rankdump._recorder.tensor_statistics import (
    RowBatch,
    StatisticsCalculator,
    TensorStatisticsRow,
    UnreadRow,
)
from rankdump._transport.send_buffer import SendBuffer

_logger = logging.getLogger(__name__)

BUFFER_FULL = "buffer_full"
COPY_FAILED = "copy_failed"
NO_STATISTICS = "no_statistics"
UNSUPPORTED_DTYPE = "unsupported_dtype"


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A selected tensor that was not recorded, with the reason."""

    iteration: int
    op_name: str
    reason: str


BuildResult: TypeAlias = "StagedRecord | TensorStatisticsRow | LostTensor"
"""Result of an observation."""


class RecordBuilder:
    """Builds records, rows or losses by the plan; safe to use from several threads."""

    def __init__(
        self,
        plan: DumpPlan,
        iteration_state: IterationState,
        *,
        namer: RecordNamer,
        staging: StagingBuffer,
        calculator: StatisticsCalculator | None,
        stalls: StallTimer,
    ) -> None:
        self._sample_elements = plan.content.sample_elements
        self._no_elements = is_statistics_only(plan)
        self._iteration_state = iteration_state
        self._namer = namer
        self.end_call = namer.end_call
        """Ends a call: later tensors of its name belong to another call."""
        self._staging = staging
        self._calculator = calculator
        self._stalls = stalls

    def build_record(self, observation: TensorObservation) -> BuildResult:
        """Copy or measure a tensor now."""
        self._stalls.begin()
        try:
            return self._read(observation)
        except Exception:  # a tensor that cannot be read must not end the training
            _logger.debug("copy failed", exc_info=True)
            return self.make_loss(observation.op_name, COPY_FAILED)
        finally:
            self._stalls.end()

    def rebuild_record(self, observation: TensorObservation) -> BuildResult:
        """Copy or measure a tensor that was kept by reference, as it is now."""
        try:
            tensor = observation.tensor.read_again()
        except Exception:  # as above
            _logger.debug("tensor unknown", exc_info=True)
            return self.make_loss(observation.op_name, COPY_FAILED)
        if isinstance(tensor, str):
            return self.make_loss(observation.op_name, tensor)
        return self.build_record(observation._replace(tensor=tensor))

    def make_loss(self, op_name: str, reason: str) -> LostTensor:
        """Return the loss of a tensor of the running iteration."""
        return LostTensor(self._iteration_state.iteration, op_name, reason)

    def _read(self, observation: TensorObservation) -> BuildResult:
        source = observation.tensor
        if source.dtype not in ELEMENT_TYPES:
            return self.make_loss(observation.op_name, UNSUPPORTED_DTYPE)
        if self._sample_elements:
            source = self._sampled(source)
        kind = self._namer.find_kind(observation, source)
        if self._no_elements:
            row = self._row(kind, source)
            return self.make_loss(kind.op_name, NO_STATISTICS) if row is None else row
        state = self._iteration_state
        head = self._namer.make_head(kind, iteration=state.iteration, switched_on=state.switched)
        record = self._staging.keep(head, source)
        if record is not None:
            return record
        row = self._row(kind, source, degraded=True)
        return self.make_loss(kind.op_name, BUFFER_FULL) if row is None else row

    def _row(
        self, kind: TensorKind, source: TensorSource, *, degraded: bool = False
    ) -> TensorStatisticsRow | None:
        """Return the tensor's statistics; None if the plan keeps none, or its type has none."""
        if self._calculator is None or not self._calculator.can_measure(kind.dtype):
            return None
        state = self._iteration_state
        return TensorStatisticsRow(
            kind,
            self._namer.stamp(kind, state.iteration),
            self._calculator.measure_tensor(source),
            state.iteration,
            state.switched,
            degraded,
        )

    def _sampled(self, source: TensorSource) -> TensorSource:
        count = self._sample_elements
        return source.make_head_source(count) if count < math.prod(source.shape) else source


STATISTICS_FAILED = "figures_failed"
_MAX_ARGUMENTS_AT_ONCE = 500

OperatorItem: TypeAlias = "BuildResult | OperatorArguments"
"""Anything that can be kept of an operator."""


class RecordSender:
    """Sends items in the order in which they are given; safe to use from several threads."""

    def __init__(
        self,
        *,
        counters: IterationCounters,
        stalls: StallTimer,
        staging: StagingBuffer,
        calculator: StatisticsCalculator | None,
        send_buffer: SendBuffer,
        on_lost: Callable[[str, str], None],
        batch_rows: int,
    ) -> None:
        """Rows wait for the end of the iteration, or until `batch_rows` wait."""
        self._counters = counters
        self._stalls = stalls
        self._staging = staging
        self._calculator = calculator
        self._send_buffer = send_buffer
        self._on_lost = on_lost
        self._batch = RowBatch(batch_rows)
        self._lock = threading.Lock()
        self._in_turn = threading.Lock()
        self._arguments: list[OperatorArguments] = []

    def send(self, item: OperatorItem, iteration: int) -> None:
        """Send an item of an operator of the running iteration."""
        if isinstance(item, TensorStatisticsRow):
            if self._batch.add(item):
                self._send_rows()
        elif isinstance(item, StagedRecord):
            self._counters.count_sent(item.head.iteration)
            if not item.is_in_shared_memory:
                self._send_buffer.submit(item)
        elif isinstance(item, LostTensor):
            self._lose(item)
        else:
            self._collect(item, iteration)

    def release_items(self, items: Iterable[object]) -> None:
        """Release the staged space of records that are not sent."""
        for item in items:
            if isinstance(item, StagedRecord):
                self._staging.release(item)

    def flush(self, iteration: int) -> None:
        """Send the items that waited for the end of the iteration."""
        self._send_rows()
        with self._lock:
            self._send_arguments(iteration)

    def _send_rows(self) -> None:
        if self._calculator is None:
            return
        with self._stalls.measure_stall(), self._in_turn:
            for rows in self._batch.drain_rows(self._calculator):
                if isinstance(rows, UnreadRow):
                    self._lose(LostTensor(rows.iteration, rows.op_name, STATISTICS_FAILED))
                elif self._staging.admit(rows):
                    self._counters.count_sent(rows.iteration, len(rows))
                    self._send_buffer.submit(rows)
                else:
                    self._lose_rows(rows)

    def _lose_rows(self, rows: StatisticRows) -> None:
        self._counters.count_lost(rows.iteration, BUFFER_FULL, len(rows))
        self._on_lost(BUFFER_FULL, rows.kinds[0].op_name)

    def _lose(self, lost: LostTensor) -> None:
        self._counters.count_lost(lost.iteration, lost.reason)
        self._on_lost(lost.reason, lost.op_name)

    def _collect(self, arguments: OperatorArguments, iteration: int) -> None:
        with self._lock:
            self._arguments.append(arguments)
            if len(self._arguments) >= _MAX_ARGUMENTS_AT_ONCE:
                self._send_arguments(iteration)

    def _send_arguments(self, iteration: int) -> None:
        operators, self._arguments = tuple(self._arguments), []
        if operators:
            self._send_buffer.submit(KernelArguments(iteration, operators))

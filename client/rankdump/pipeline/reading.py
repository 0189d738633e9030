"""Makes a record of an observation, or says why there is none: heads, stage and measure together.

Every attempt ends in exactly one item; nothing raises.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.accounts import Accounts
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.exchange import RecordHead
from rankdump.contract.plan import DumpPlan
from rankdump.contract.statistics import countable
from rankdump.heads import Heads
from rankdump.measure import Measure, Measured
from rankdump.pipeline.course import Course
from rankdump.stage import Stage
from rankdump.values import Observation, Staged, TensorSource

logger = logging.getLogger(__name__)

BUFFER_FULL = "buffer_full"
COPY_FAILED = "copy_failed"
NO_STATISTICS = "no_statistics"
UNSUPPORTED_DTYPE = "unsupported_dtype"


@dataclass(frozen=True, slots=True)
class Lost:
    """A selected tensor that is no record."""

    iteration: int
    op_name: str
    reason: str


Read: TypeAlias = "Staged | Measured | Lost"
"""What becomes of an observation."""


class Reading:
    """Reads tensors as the plan wants them; safe to use from several threads."""

    def __init__(
        self,
        plan: DumpPlan,
        course: Course,
        *,
        heads: Heads,
        stage: Stage,
        measure: Measure | None,
        accounts: Accounts,
    ) -> None:
        self._sample_elements = plan.content.sample_elements
        self._course = course
        self._heads = heads
        self._stage = stage
        self._measure = measure
        self._accounts = accounts

    def read(self, observation: Observation) -> Read:
        """Copy or measure a tensor now."""
        begun_ns = time.perf_counter_ns()
        try:
            return self._read(observation)
        except Exception:  # a tensor that cannot be read must not end the training
            logger.debug("copy failed", exc_info=True)
            return self.lost(observation.op_name, COPY_FAILED)
        finally:
            stall_ns = time.perf_counter_ns() - begun_ns
            self._accounts.stalled(self._course.iteration, stall_ns)

    def lost(self, op_name: str, reason: str) -> Lost:
        """Return the loss of a tensor of the running iteration."""
        return Lost(self._course.iteration, op_name, reason)

    def _read(self, observation: Observation) -> Read:
        reason = self._unreadable(observation.tensor.dtype)
        if reason:
            return self.lost(observation.op_name, reason)
        source = self._sampled(observation.tensor)
        course = self._course
        head = self._heads.of(
            observation,
            source,
            iteration=course.iteration,
            switched_on=course.switched,
            measured=self._measure is not None,
        )
        if self._measure is None:
            record = self._stage.keep(head, source)
            return self.lost(observation.op_name, BUFFER_FULL) if record is None else record
        if not self._stage.admit(head):
            return self.lost(observation.op_name, BUFFER_FULL)
        return self._measured(self._measure, head, source)

    def _measured(
        self, measure: Measure, head: RecordHead, source: TensorSource
    ) -> Staged | Measured:
        """Put figures into an admitted record, or give its room back."""
        record = None
        try:
            record = measure.take(head, source)
            return record
        finally:
            if record is None:
                self._stage.release(head)

    def _unreadable(self, dtype: str) -> str:
        if dtype not in ELEMENT_TYPES:
            return UNSUPPORTED_DTYPE
        return NO_STATISTICS if self._measure is not None and not countable(dtype) else ""

    def _sampled(self, source: TensorSource) -> TensorSource:
        count = self._sample_elements
        return source.head(count) if 0 < count < math.prod(source.shape) else source

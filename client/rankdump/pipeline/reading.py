"""Makes a record of an observation, or says why there is none: heads, stage and measure together.

Every attempt ends in exactly one item; nothing raises.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TypeAlias

from rankdump.accounts import Stalls
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.plan import DumpPlan
from rankdump.heads import Heads
from rankdump.measure import Measure, Row
from rankdump.pipeline.choices import in_place_of_elements
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


Read: TypeAlias = "Staged | Row | Lost"
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
        stalls: Stalls,
    ) -> None:
        self._sample_elements = plan.content.sample_elements
        self._no_elements = in_place_of_elements(plan)
        self._course = course
        self._heads = heads
        self.over = heads.over
        """Hears that a call is over: what comes under its name from now on is another one."""
        self._stage = stage
        self._measure = measure
        self._stalls = stalls

    def read(self, observation: Observation) -> Read:
        """Copy or measure a tensor now."""
        self._stalls.begin()
        try:
            return self._read(observation)
        except Exception:  # a tensor that cannot be read must not end the training
            logger.debug("copy failed", exc_info=True)
            return self.lost(observation.op_name, COPY_FAILED)
        finally:
            self._stalls.end()

    def read_again(self, observation: Observation) -> Read:
        """Copy or measure a tensor that was referred to, as it is now."""
        try:
            tensor = observation.tensor.again()
        except Exception:  # as above
            logger.debug("tensor unknown", exc_info=True)
            return self.lost(observation.op_name, COPY_FAILED)
        if isinstance(tensor, str):
            return self.lost(observation.op_name, tensor)
        return self.read(observation._replace(tensor=tensor))

    def lost(self, op_name: str, reason: str) -> Lost:
        """Return the loss of a tensor of the running iteration."""
        return Lost(self._course.iteration, op_name, reason)

    def _read(self, observation: Observation) -> Read:
        source = observation.tensor
        if source.dtype not in ELEMENT_TYPES:
            return self.lost(observation.op_name, UNSUPPORTED_DTYPE)
        if self._sample_elements:
            source = self._sampled(source)
        kind = self._heads.kind(observation, source)
        if self._no_elements:
            row = self._row(kind, source)
            return self.lost(kind.op_name, NO_STATISTICS) if row is None else row
        course = self._course
        head = self._heads.of(kind, iteration=course.iteration, switched_on=course.switched)
        record = self._stage.keep(head, source)
        if record is not None:
            return record
        row = self._row(kind, source, degraded=True)
        return self.lost(kind.op_name, BUFFER_FULL) if row is None else row

    def _row(self, kind: TensorKind, source: TensorSource, *, degraded: bool = False) -> Row | None:
        """Return the tensor's figures; None when the plan wants none, or it has none."""
        if self._measure is None or not self._measure.can(kind.dtype):
            return None
        course = self._course
        return Row(
            kind,
            self._heads.stamp(kind, course.iteration),
            self._measure.take(source),
            course.iteration,
            course.switched,
            degraded,
        )

    def _sampled(self, source: TensorSource) -> TensorSource:
        count = self._sample_elements
        return source.head(count) if count < math.prod(source.shape) else source

"""Recorder that records nothing: where calls are only counted, and as the base of one that keeps
little.
"""

from __future__ import annotations

from collections.abc import Mapping

from rankdump._core.events import CallOutcome, UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    CardRecorder,
    CollectiveCall,
    ForwardPass,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.timeouts import GroupTimeout


class NullRecorder:
    """A `Recorder` that records nothing."""

    armed: bool = False
    is_describing: bool = False
    wants_arguments: bool = False
    declared_pass: ForwardPass = UNDIVIDED_PASS
    card: CardRecorder | None = None

    def begin_call(self, graph: int, op_name: str) -> None:
        """Do nothing."""

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return False."""
        return False

    def names_operators(self, graph: int) -> bool:
        """Return False."""
        return False

    def observe(self, observation: TensorObservation) -> None:
        """Do nothing."""

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Do nothing."""

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Do nothing."""

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Do nothing."""

    def describe(self, graph: int, node: GraphNode) -> None:
        """Do nothing."""

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Do nothing."""

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        """Do nothing."""

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Do nothing."""

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Return an event that nobody keeps."""
        return StartedEvent(0, 0, graph, name, collective, 0)

    def record_event(self, *, graph: int, name: str) -> None:
        """Do nothing."""

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> None:
        """Do nothing."""

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Do nothing."""

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        """Do nothing."""

    def warn_once(self, message: str) -> None:
        """Do nothing."""

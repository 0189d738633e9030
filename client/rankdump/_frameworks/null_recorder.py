"""Recorders that keep little: nothing, where calls are only counted; or nothing but the digest of
each tensor that an adapter observes, in order, to compare two runs in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import xxhash

from rankdump._core.determinism import RunDigests, TensorDigest
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
    TensorSource,
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


class DigestRecorder(NullRecorder):
    """Recorder of one run; takes all tensors but those of collectives."""

    armed: bool = True

    def __init__(self, find_source: Callable[[], str]) -> None:
        """`find_source` returns `file:line` of the script's innermost call."""
        self.run = RunDigests()
        self._find_source = find_source

    def add_value(self, op_type: str, name: str, slot: int, value: object) -> None:
        """Keep a value that is no tensor."""
        self.add_digest(op_type, name, slot, xxhash.xxh3_64_hexdigest(repr(value).encode()))

    def add_digest(self, op_type: str, name: str, slot: int, digest: str) -> None:
        """Keep the digest of a value."""
        made = TensorDigest(op_type, name, TensorSide.OUTPUT, slot, "", "", digest)
        self.run.digests.append(made)

    def begin_call(self, graph: int, op_name: str) -> None:
        """Keep the line of the script that made the call."""
        self.run.sources.setdefault(op_name, self._find_source())

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return True."""
        return True

    def observe(self, observation: TensorObservation) -> None:
        """Keep the digest of a tensor."""
        about, source = observation, observation.tensor
        kind = f"{source.dtype} ({','.join(map(str, source.shape))})"
        made = TensorDigest(
            about.op_type,
            about.op_name,
            about.side,
            about.slot,
            about.argument,
            kind,
            digest_source(source),
        )
        self.run.digests.append(made)

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count a tensor that cannot be read."""
        self.run.unread += 1


def digest_source(source: TensorSource) -> str:
    """Return the xxh3-64 of the elements of a tensor, in C order."""
    elements = source.elements()
    return xxhash.xxh3_64_hexdigest(source.copy_elements() if elements is None else elements)

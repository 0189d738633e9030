"""A recorder double that keeps copies in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from rankdump._core.element_types import get_element_type
from rankdump._core.events import UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    UNDIVIDED_PASS,
    CardRecorder,
    CollectiveCall,
    ForwardPass,
    IterationHook,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.timeouts import GroupTimeout
from rankdump._frameworks.torch.communication import collective_recorder
from rankdump._frameworks.torch.model_hook import attach_model


@dataclass(frozen=True)
class TakenTensor:
    """One tensor, copied."""

    op_type: str
    op_name: str
    side: TensorSide
    slot: int
    argument: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes
    constant: bool = False
    forward_pass: ForwardPass = UNDIVIDED_PASS

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, get_element_type(self.dtype).descr).reshape(self.shape)


@dataclass(frozen=True)
class FinishedEvent:
    """One event."""

    position: int
    end_position: int
    name: str
    graph: int
    collective: CollectiveCall | None


@dataclass
class FakeRecorder:
    """Keeps what an adapter hands over."""

    armed: bool = True
    wanted: Callable[[str, TensorSide], bool] = lambda name, side: True
    taken: list[TakenTensor] = field(default_factory=list)
    events: list[FinishedEvent] = field(default_factory=list)
    lost: list[tuple[str, TensorSide, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    """Forward calls that began."""
    settlements: list[tuple[str, bool]] = field(default_factory=list)
    settled_with: dict[str, int] = field(default_factory=dict)
    """Tensors of an operator that were there when it was settled."""
    unseen: list[tuple[str, UnseenReason, int]] = field(default_factory=list)
    marks: list[frozenset[str]] = field(default_factory=list)
    is_describing: bool = False
    nodes: dict[str, GraphNode] = field(default_factory=dict)
    parameters: dict[str, GraphParameter] = field(default_factory=dict)
    wants_arguments: bool = False
    declared_pass: ForwardPass = UNDIVIDED_PASS
    card: CardRecorder | None = None
    configured: dict[str, dict[str, str]] = field(default_factory=dict)
    asked: int = 0
    lists_operators: bool = False
    """Whether the plan has a list of operators."""
    position: int = 0
    open: dict[int, StartedEvent] = field(default_factory=dict)
    """What began and is not complete, by position."""
    limits: dict[str, GroupTimeout] = field(default_factory=dict)
    stacks: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Where calls of an API came from."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def wait_for_ends(self) -> None:
        """Wait until every event is complete; a thread of gloo ends the last collectives."""
        deadline_s = time.monotonic() + 300
        while self.open:
            assert time.monotonic() < deadline_s, f"no end was reported of {self.open}"
            time.sleep(0.01)

    def begin_call(self, graph: int, op_name: str) -> None:
        self.entries.append(op_name)

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        self.asked += 1
        return self.armed and self.wanted(op_name, side)

    def names_operators(self, graph: int) -> bool:
        return self.lists_operators

    def observe(self, observation: TensorObservation) -> None:
        source = observation.tensor
        data = bytearray(source.byte_count)
        source.copy_into(memoryview(data))
        with self.lock:
            self.taken.append(
                TakenTensor(
                    observation.op_type,
                    observation.op_name,
                    observation.side,
                    observation.slot,
                    observation.argument,
                    source.dtype,
                    source.shape,
                    bytes(data),
                    observation.constant,
                    observation.forward_pass,
                )
            )

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        self.lost.append((op_name, side, reason))

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        with self.lock:
            self.settlements.append((op_name, raised))
            self.settled_with[op_name] = sum(taken.op_name == op_name for taken in self.taken)

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        self.marks.append(names)

    def describe(self, graph: int, node: GraphNode) -> None:
        self.nodes.setdefault(node.name, node)

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        self.parameters.setdefault(parameter.name, parameter)

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        assert op_name not in self.configured
        self.configured[op_name] = dict(values)

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        self.stacks[op_name] = stack

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        with self.lock:
            self.position += 1
            begun = StartedEvent(self.position, self.position, graph, name, collective, 0)
            self.open[begun.position] = begun
            return begun

    def record_event(self, *, graph: int, name: str) -> None:
        self.finish_event(self.start_event(graph=graph, name=name))

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = 0,
    ) -> None:
        with self.lock:
            del self.open[begun.position]
            what = collective or begun.collective
            name = name or begun.name
            self.events.append(
                FinishedEvent(begun.position, self.position, name, begun.graph, what)
            )

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        self.limits[timeout.group] = timeout

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        self.unseen.append((group, reason, count))

    def warn_once(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    # -- what tests ask

    @property
    def keys(self) -> list[tuple[str, str, int]]:
        return [(taken.op_name, taken.side.value, taken.slot) for taken in self.taken]

    @property
    def names(self) -> list[str]:
        """Events in program order."""
        return [event.name for event in sorted(self.events, key=lambda event: event.position)]

    @property
    def names_by_end(self) -> list[str]:
        """Events in the order in which they completed."""
        return [event.name for event in self.events if not event.name.startswith("Gradients/")]

    def one(self, op_name: str, side: str, slot: int = 0) -> TakenTensor:
        found = [t for t in self.taken if (t.op_name, t.side, t.slot) == (op_name, side, slot)]
        assert len(found) == 1, f"{len(found)} of {op_name} {side} {slot} in {self.keys}"
        return found[0]


@dataclass
class DecidingRecorder(FakeRecorder):
    """The smallest recorder that decides by how a call ended.

    It notes which operators overflowed. By reference, it reads what an operator that raised was
    given, and forgets the rest.
    """

    held: dict[str, list[TensorObservation]] = field(default_factory=dict)
    overflowed: set[str] = field(default_factory=set)
    raised: list[str] = field(default_factory=list)
    by_reference: bool = False

    def observe(self, observation: TensorObservation) -> None:
        name = observation.op_name
        if self.by_reference:
            self.held.setdefault(name, []).append(observation)
            return
        super().observe(observation)
        written = observation.side is TensorSide.OUTPUT and not observation.state
        if written and not observation.tensor.is_finite():
            self.overflowed.add(name)

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        for observation in self.held.pop(op_name, []):
            if raised and not observation.tensor.has_changed():
                super().observe(observation)
            elif raised:
                self.count_loss(*observation[:5], "changed_in_place")
        if raised:
            self.raised.append(op_name)
        super().end_call(graph, op_name, raised=raised)


@pytest.fixture
def recorder() -> FakeRecorder:
    return FakeRecorder()


@pytest.fixture
def deciding() -> DecidingRecorder:
    return DecidingRecorder()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that a test leaves attached listens to no collective of another test."""
    monkeypatch.setattr(collective_recorder, "_listeners", [])


@contextmanager
def observed(model: torch.nn.Module, recorder: FakeRecorder) -> Generator[IterationHook]:
    """Attach for the length of one armed iteration."""
    hook = attach_model(model, recorder, 0)
    try:
        hook.iteration_begins(0, armed=True)
        yield hook
        hook.iteration_ends(0, armed=True)
    finally:
        hook.detach()


Observed = Callable[[torch.nn.Module, FakeRecorder], AbstractContextManager[IterationHook]]


@pytest.fixture(name="observed")
def observed_fixture() -> Observed:
    return observed

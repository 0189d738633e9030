"""Triggers of a plan: an operator is always kept, or kept if it overflowed, if it raised, or if it
is watched for writes by others (MindSpore 2.3, Dump guide).

Weights, buffers and constants are not operators: only the trigger `always` keeps them. The gradient
of a weight is an output of a backward operator, as in MindSpore. Items that wait for the end of
their operator are released if the operator is not kept. Outputs of a watched operator are kept by
reference until the iteration ends, so their memory stays in use. Tensors of the job are never
changed.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from rankdump._core.plan import DumpPlan, WatchedOperators
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import TensorObservation
from rankdump._core.selection import is_named_in, make_watch_name
from rankdump._core.session_protocol import OperatorArguments
from rankdump._recorder.iteration_state import LostTensor
from rankdump._recorder.record_builder import OperatorItem, RecordBuilder, RecordSender
from rankdump._recorder.record_filter import RecordFilter

_logger = logging.getLogger(__name__)

CHANGED_IN_PLACE = "changed_in_place"


class DumpTrigger(ABC):
    """Decides which operators are kept; some triggers decide only after an operator has ended."""

    def __init__(
        self, selection: RecordFilter, record_builder: RecordBuilder, record_sender: RecordSender
    ) -> None:
        self._filter = selection
        self._record_builder = record_builder
        self._record_sender = record_sender
        self.needs_call_ends = True
        """Whether the trigger must be told when a call ends."""

    def is_wanted(self, op_name: str, side: TensorSide, graph: int) -> bool:
        """Return whether tensors on this side of an operator are to be passed to the trigger; by
        default, whether the plan selects them.
        """
        return self._filter.decide(op_name, side, graph).is_kept

    @abstractmethod
    def handle_tensor(self, observation: TensorObservation) -> None:
        """Handle a tensor on a wanted side."""

    def handle_item(self, graph: int, op_name: str, item: LostTensor | OperatorArguments) -> None:
        """Handle a loss or the arguments of a wanted operator."""
        self._record_sender.send(item)

    def end_call(self, graph: int, op_name: str, *, raised: bool) -> None:
        """End a call of an operator."""
        self._record_builder.end_call(graph, op_name)

    @abstractmethod
    def end_all_calls(self) -> None:
        """End every open call."""


class AlwaysTrigger(DumpTrigger):
    """Keeps what the plan selects."""

    def __init__(
        self, selection: RecordFilter, record_builder: RecordBuilder, record_sender: RecordSender
    ) -> None:
        super().__init__(selection, record_builder, record_sender)
        self.needs_call_ends = record_builder.needs_call_ends

    def handle_tensor(self, observation: TensorObservation) -> None:
        """Read the tensor and send it."""
        if not (self._filter.excludes and self._filter.is_excluded(observation[:5])):
            self._record_sender.send(self._record_builder.build_record(observation))

    def end_all_calls(self) -> None:
        """Do nothing, because all tensors were sent when they were observed."""


_MAX_WATCHED_OPERATORS = 1 << 12
"""Limit for a training loop that never calls `step`, in which every call number makes a
new name.
"""


@dataclass(slots=True)
class _WatchedOutputs:
    """The latest outputs of a watched operator in the running iteration."""

    outputs: dict[int, TensorObservation] = field(default_factory=dict[int, TensorObservation])
    lost: list[LostTensor] = field(default_factory=list[LostTensor])


class WatchTrigger(DumpTrigger):
    """Keeps the outputs of watched operators, and keeps them again after each later layer of the
    model.
    """

    def __init__(
        self,
        watched: WatchedOperators,
        selection: RecordFilter,
        record_builder: RecordBuilder,
        record_sender: RecordSender,
    ) -> None:
        super().__init__(selection, record_builder, record_sender)
        self._layers = watched.layers
        self._lock = threading.Lock()
        self._ran: dict[tuple[int, str], _WatchedOutputs] = {}

    def handle_tensor(self, observation: TensorObservation) -> None:
        """Read the tensor, send it, and keep a reference to it until the iteration is over."""
        if self._filter.is_excluded(observation[:5]):
            return
        self._record_sender.send(self._record_builder.build_record(observation))
        lasting = observation._replace(tensor=observation.tensor.make_memory_source())
        with self._lock:
            outputs = self._get_outputs(observation.graph, observation.op_name).outputs
            outputs[observation.slot] = lasting

    def handle_item(self, graph: int, op_name: str, item: LostTensor | OperatorArguments) -> None:
        """Send the loss of an output, and repeat it after every layer."""
        if isinstance(item, LostTensor):
            self._record_sender.send(item)
            with self._lock:
                self._get_outputs(graph, op_name).lost.append(item)

    def end_call(self, graph: int, op_name: str, *, raised: bool) -> None:
        """If the ended operator is a layer, read the outputs of the other watched operators again,
        however the call ended.
        """
        self._record_builder.end_call(graph, op_name)
        if self._layers and not is_named_in(self._layers, op_name):
            return
        with self._lock:
            ran = [
                (name, list(found.outputs.values()), list(found.lost))
                for (of_graph, name), found in self._ran.items()
                if of_graph == graph and name != op_name
            ]
        for name, outputs, lost in ran:
            again = make_watch_name(op_name, name)
            for output in outputs:
                item = self._record_builder.rebuild_record(output._replace(op_name=again))
                self._record_sender.send(item)
            for item in lost:
                self._record_sender.send(self._record_builder.make_loss(again, item.reason))
            self._record_builder.end_call(graph, again)

    def end_all_calls(self) -> None:
        """Release all outputs."""
        with self._lock:
            self._ran.clear()

    def _get_outputs(self, graph: int, op_name: str) -> _WatchedOutputs:
        found = self._ran.get((graph, op_name))
        if found is None:
            if len(self._ran) >= _MAX_WATCHED_OPERATORS:
                self._ran.pop(next(iter(self._ran)))
            found = self._ran[graph, op_name] = _WatchedOutputs()
        return found


ItemT = TypeVar("ItemT")
OperatorCallKey: TypeAlias = "tuple[int, str]"
"""Graph and operator name: two models may have operators of the same name."""

# Limit for a training loop that never calls `step` and whose operators never end.
_MAX_OPEN_OPERATORS = 1 << 14


@dataclass(slots=True)
class _OpenOperator(Generic[ItemT]):
    """Waiting items of an operator that has not ended."""

    kept: bool = False
    items: list[ItemT] = field(default_factory=list[ItemT])


class DeferredItems(Generic[ItemT]):
    """Items that wait for the end of their operator; safe to use from several threads."""

    def __init__(self, limit: int = 0) -> None:
        self._lock = threading.Lock()
        self._limit = limit
        self._open: dict[OperatorCallKey, _OpenOperator[ItemT]] = {}
        self._kept = 0

    @property
    def full(self) -> bool:
        """Whether the maximum number of kept operators is reached; a limit of 0 allows
        any number.
        """
        return 0 < self._limit <= self._kept

    def is_kept(self, call: OperatorCallKey) -> bool:
        """Return whether it was decided to keep an operator that has not ended."""
        found = self._open.get(call)
        return found is not None and found.kept

    def add_item(self, call: OperatorCallKey, item: ItemT) -> list[ItemT]:
        """Add an item that waits for its operator; return the items that need not wait
        any longer.
        """
        with self._lock:
            self._open.setdefault(call, _OpenOperator()).items.append(item)
            if len(self._open) <= _MAX_OPEN_OPERATORS:
                return []
            return self._open.pop(next(iter(self._open))).items

    def keep_operator(self, call: OperatorCallKey) -> list[ItemT]:
        """Decide to keep an operator, if the limit allows it; return the items that
        waited for it.
        """
        with self._lock:
            operator = self._open.setdefault(call, _OpenOperator())
            if self.full and not operator.kept:
                return []
            self._kept += not operator.kept
            operator.kept = True
            items, operator.items = operator.items, []
            return items

    def end_operator(self, call: OperatorCallKey) -> list[ItemT]:
        """End an operator; return its items if the operator was not kept."""
        with self._lock:
            operator = self._open.pop(call, None)
            return operator.items if operator is not None else []

    def end_all_operators(self) -> list[ItemT]:
        """End every operator; return the items of all operators that were not kept."""
        with self._lock:
            waiting, self._open = self._open, {}
        return [item for operator in waiting.values() for item in operator.items]


class OverflowTrigger(DumpTrigger):
    """Keeps operators with an output that is not finite, with copies of their inputs.

    Tensors are copied where they are observed, because operators may write in place.
    """

    def __init__(
        self,
        selection: RecordFilter,
        record_builder: RecordBuilder,
        record_sender: RecordSender,
        *,
        limit: int,
        on_limit: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        """`on_limit` is called when the limit of kept operators is reached."""
        super().__init__(selection, record_builder, record_sender)
        self._on_limit, self._warn = on_limit, warn
        self._held: DeferredItems[OperatorItem] = DeferredItems(limit)

    def is_wanted(self, op_name: str, side: TensorSide, graph: int) -> bool:
        """Return whether the plan selects the side, or the side is output, whose values are
        checked.
        """
        if self._held.full and not self._held.is_kept((graph, op_name)):
            return False
        if self._filter.decide(op_name, side, graph).is_kept:
            return True
        return (
            side is TensorSide.OUTPUT
            and self._filter.decide(op_name, TensorSide.INPUT, graph).is_kept
        )

    def handle_tensor(self, observation: TensorObservation) -> None:
        """Hold a copy of the tensor until its operator overflows or ends."""
        graph, _, name, side = observation[:4]
        call = (graph, name)
        if observation.state:
            return
        if (
            side is TensorSide.OUTPUT
            and not self._held.is_kept(call)
            and not self._is_finite(observation)
        ):
            self._keep_operator(call)
        kept = self._filter.decide(name, side, graph).is_kept
        if kept and not self._filter.is_excluded(observation[:5]):
            self._hold_item(call, self._record_builder.build_record(observation))

    def handle_item(self, graph: int, op_name: str, item: LostTensor | OperatorArguments) -> None:
        """Hold the item together with the tensors of its operator."""
        self._hold_item((graph, op_name), item)

    def end_call(self, graph: int, op_name: str, *, raised: bool) -> None:
        """Release the items of an operator that did not overflow."""
        self._record_sender.release_items(self._held.end_operator((graph, op_name)))
        self._record_builder.end_call(graph, op_name)

    def end_all_calls(self) -> None:
        """Release the items of every operator that has not overflowed."""
        self._record_sender.release_items(self._held.end_all_operators())

    def _hold_item(self, call: OperatorCallKey, item: OperatorItem) -> None:
        if self._held.is_kept(call):
            self._record_sender.send(item)
        else:
            self._record_sender.release_items(self._held.add_item(call, item))

    def _keep_operator(self, call: OperatorCallKey) -> None:
        for item in self._held.keep_operator(call):
            self._record_sender.send(item)
        if self._held.full:
            self._on_limit()

    def _is_finite(self, observation: TensorObservation) -> bool:
        try:
            return observation.tensor.is_finite()
        except Exception:  # a tensor that cannot be read must not end the training
            _logger.debug("finiteness unknown", exc_info=True)
            self._warn(f"{observation.op_name} could not be checked for an overflow")
            return True


class ExceptionTrigger(DumpTrigger):
    """Keeps the inputs of the operator that raised, which are read when it raises.

    Before that, inputs are kept by reference, so operators that do not raise cost no copy. A tensor
    that is known to have changed since it was observed is lost.
    """

    def __init__(
        self, selection: RecordFilter, record_builder: RecordBuilder, record_sender: RecordSender
    ) -> None:
        super().__init__(selection, record_builder, record_sender)
        self._held: DeferredItems[TensorObservation | LostTensor | OperatorArguments]
        self._held = DeferredItems()

    def is_wanted(self, op_name: str, side: TensorSide, graph: int) -> bool:
        """Return whether the side is input and selected: an operator that raised has no outputs."""
        return side is TensorSide.INPUT and self._filter.decide(op_name, side, graph).is_kept

    def handle_tensor(self, observation: TensorObservation) -> None:
        """Keep a reference to the tensor until its operator ends."""
        if not (observation.state or self._filter.is_excluded(observation[:5])):
            self._held.add_item((observation.graph, observation.op_name), observation)

    def handle_item(self, graph: int, op_name: str, item: LostTensor | OperatorArguments) -> None:
        """Hold the item until its operator ends."""
        self._held.add_item((graph, op_name), item)

    def end_call(self, graph: int, op_name: str, *, raised: bool) -> None:
        """Send the inputs of an operator that raised; release those of any other operator."""
        for item in self._held.end_operator((graph, op_name)):
            if raised:
                self._record_sender.send(self._build_item(item))
        self._record_builder.end_call(graph, op_name)

    def end_all_calls(self) -> None:
        """Release the items of operators that did not raise."""
        self._held.end_all_operators()

    def _build_item(self, item: TensorObservation | LostTensor | OperatorArguments) -> OperatorItem:
        if not isinstance(item, TensorObservation):
            return item
        try:
            if item.tensor.has_changed():
                return self._record_builder.make_loss(item.op_name, CHANGED_IN_PLACE)
        except Exception:  # treated as unchanged: reading it shows whether it can be read at all
            _logger.debug("change unknown", exc_info=True)
        return self._record_builder.rebuild_record(item)


def make_trigger(
    plan: DumpPlan,
    selection: RecordFilter,
    record_builder: RecordBuilder,
    record_sender: RecordSender,
    *,
    on_limit: Callable[[], None],
    warn: Callable[[str], None],
) -> DumpTrigger:
    """Return the trigger of the plan; `on_limit` is called when the trigger has kept as many
    operators as it may.
    """
    parts = selection, record_builder, record_sender
    if plan.selection.watched is not None:
        return WatchTrigger(plan.selection.watched, *parts)
    if plan.selection.trigger == "overflow":
        limit = plan.selection.overflow_limit
        return OverflowTrigger(*parts, limit=limit, on_limit=on_limit, warn=warn)
    return (
        ExceptionTrigger(*parts) if plan.selection.trigger == "exception" else AlwaysTrigger(*parts)
    )

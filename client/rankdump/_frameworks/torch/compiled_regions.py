"""Observation of the operators inside compiled regions of an attached model: custom operators of
torch pass tensors from inside a region to the observer of the model, where they become calls and
gradients like those of modules outside. This module is imported only if a script asks for it,
because it loads torch's compiler.

While Dynamo traces the hooks of a module, `rankdump::observe` enters the graph before and after the
module's own operators. It returns only a number and nothing of its inputs, so no tensor is copied
or aliased and no result depends on it. torch does not move it, because it is registered as an
operator with an effect (`torch.library`, effect tokens). The number, called ticket, identifies the
call that was observed. A hook on each tensor that needs a gradient passes the gradient on with this
ticket in the compiled backward, so gradients belong to the right one of several forward calls.

The graph is the same in every iteration, so nothing is compiled again, and results do not depend on
which iterations are dumped. Outside of armed iterations the operator only reads a flag.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from rankdump._core.record import TensorSide
from rankdump._frameworks.model_observer import BACKWARD_SIDE
from rankdump._frameworks.operator_names import MAX_DEPTH, CallLeaf
from rankdump._frameworks.torch.internals import find_untraceable_scope, register_effect
from rankdump._frameworks.torch.model_hook import ModuleCallObserver, ModuleGradientObserver
from rankdump._frameworks.torch.module_hooks import run_shielded
from rankdump._frameworks.torch.module_tree import ModuleOperator, ModuleTree
from rankdump._frameworks.torch.recomputation import ForwardCallLog, TorchOperatorCall
from rankdump._frameworks.torch.tensors import UNREADABLE_TENSOR, TorchObserver

# torch's stubs leave its libraries of operators untyped, and a traced function has no casts.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

_READABLE, _WATCHED, _UNREADABLE = "r", "g", "u"
"""States of a traced leaf: read; read together with its gradient; and unreadable, because it is of
a class of its own.
"""


class TracedLeaf(NamedTuple):
    """One tensor of a traced call, as the text in the graph describes it."""

    slot: int
    argument: str
    state: str


@dataclass(frozen=True, slots=True)
class TracedSide:
    """One side of a module call in the graph."""

    graph: int
    path: str
    side: TensorSide
    has_grad: bool
    """Whether gradients were enabled when the call was traced; they are disabled while compiled
    code runs.
    """
    leaves: tuple[TracedLeaf, ...]


compiled_call_receivers: dict[int, CompiledRegionObserver] = {}
"""Observers of this process by the number of their model; the last observer for a number counts."""
ticket_numbers = itertools.count(1)
"""Source of tickets of this process; no ticket is used twice."""


def format_side(
    graph: int, path: str, side: str, has_grad: bool, leaves: Sequence[TracedLeaf]
) -> str:
    """Return the text that identifies one side of a module call in the graph."""
    lines = [f"{graph} {side} {'grad' if has_grad else 'plain'} {path}"]
    for slot, argument, state in leaves:
        lines.append(f"{slot} {state} {argument}")
    return "\n".join(lines)


@lru_cache(maxsize=1 << 14)
def parse_side(text: str) -> TracedSide:
    """Parse a text that `format_side` made."""
    head, *lines = text.split("\n")
    graph, side, grad, path = head.split(" ", 3)
    leaves: list[TracedLeaf] = []
    for line in lines:
        slot, state, argument = line.split(" ", 2)
        leaves.append(TracedLeaf(int(slot), argument, state))
    return TracedSide(int(graph), path, TensorSide(side), grad == "grad", tuple(leaves))


def list_watched(traced: TracedSide) -> tuple[int, ...]:
    """Return the slots whose gradients the compiled backward passes on."""
    return tuple(leaf.slot for leaf in traced.leaves if leaf.state == _WATCHED)


def pair_leaves(traced: TracedSide, tensors: Sequence[Tensor]) -> list[CallLeaf]:
    """Return the tensors as leaves of the call; unreadable tensors become `UNREADABLE_TENSOR`."""
    given = iter(tensors)
    return [
        CallLeaf(
            leaf.slot,
            leaf.argument,
            UNREADABLE_TENSOR if leaf.state == _UNREADABLE else next(given),
        )
        for leaf in traced.leaves
    ]


class CompiledRegionObserver:
    """Receives the tensors that the compiled regions of one model observe."""

    def __init__(
        self,
        observer: TorchObserver,
        calls: ModuleCallObserver,
        gradients: ModuleGradientObserver,
        call_log: ForwardCallLog,
    ) -> None:
        self._observer = observer
        self._calls = calls
        self._gradients = gradients
        self._call_log = call_log
        self._operators: dict[str, ModuleOperator] = {}
        self._tickets: dict[int, tuple[TorchOperatorCall, TensorSide]] = {}
        self._lock = threading.Lock()
        self._unseen_scopes: set[str] = set()
        compiled_call_receivers[observer.graph] = self

    @property
    def armed(self) -> bool:
        """Whether anything is recorded now."""
        return self._observer.armed

    def set_operators(self, tree: ModuleTree) -> None:
        """Receive calls of these modules from now on."""
        self._operators = {o.scope.path: o for o in tree.operators if not o.boundary}

    def make_tracer(self, operator: ModuleOperator) -> ModuleCallTracer | None:
        """Return the tracer of a module inside compiled regions; None for a boundary of
        a region.
        """
        if operator.boundary:
            return None
        return ModuleCallTracer(self._observer.graph, operator.scope.path)

    def restart(self) -> None:
        """Forget the calls of the last iteration; gradients of these calls that still arrive are
        not recorded.
        """
        with self._lock:
            self._tickets.clear()

    def detach(self) -> None:
        """Receive nothing from now on; compiled code keeps running."""
        if compiled_call_receivers.get(self._observer.graph) is self:
            del compiled_call_receivers[self._observer.graph]
        self.restart()

    def receive_side(self, traced: TracedSide, tensors: Sequence[Tensor]) -> int:
        """Record one side of a call; return the ticket of its gradients, or 0 if none
        are expected.
        """
        return run_shielded(self._record_side, self._observer.report_failure, traced, tensors) or 0

    def receive_gradient(self, ticket: int, leaf: CallLeaf) -> bool:
        """Record a gradient; return whether the ticket belongs to this model."""
        with self._lock:
            known = self._tickets.get(ticket)
        if known is None:
            return False
        failed = self._observer.report_failure
        run_shielded(partial(self._gradients.record_gradient, compiled=True), failed, *known, leaf)
        return True

    def report_scope(self, path: str, scope: str) -> None:
        """Warn that a module is not observed, because torch allows no operator with an effect in
        that scope.
        """
        if scope in self._unseen_scopes:
            return
        self._unseen_scopes.add(scope)
        self._observer.recorder.warn_once(
            f"operators of a compiled region below {scope} are not seen, because torch allows no "
            f"custom operator there; the first one is {path}"
        )

    def check_regions(self, tree: ModuleTree) -> None:
        """Warn about regions that were compiled before the model was attached."""
        for region in tree.operators:
            path = f"{region.scope.path}/"
            inside = [o for o in tree.operators if o.scope.path.startswith(path)]
            if (
                region.boundary
                and inside
                and not self._unseen_scopes
                and self._call_log.has_calls(region.scope)
                and not any(self._call_log.has_calls(o.scope) for o in inside)
            ):
                self._observer.recorder.warn_once(
                    f"the compiled region {region.scope.path} ran without observing its operators: "
                    "attach the model before the first call of the region, or call "
                    "torch.compiler.reset() after attaching"
                )

    def _record_side(self, traced: TracedSide, tensors: Sequence[Tensor]) -> int:
        operator = self._operators.get(traced.path)
        if operator is None:
            return 0
        leaves = pair_leaves(traced, tensors)
        if traced.side is TensorSide.INPUT:
            frame = self._calls.open_call(operator, leaves, has_grad=traced.has_grad, compiled=True)
        else:
            frame = self._calls.close_compiled_call(operator, leaves)
        if frame is None or frame.call is None:
            return 0
        return self._expect_gradients(frame.call, traced, leaves)

    def _expect_gradients(
        self, call: TorchOperatorCall, traced: TracedSide, leaves: Sequence[CallLeaf]
    ) -> int:
        """Return a new ticket for the gradients of one side; 0 if none are wanted.

        A region that is recomputed gets new tickets, and its backward passes on gradients with only
        these.
        """
        watched = list_watched(traced)
        side, name = traced.side, call.names.gradient
        is_input = side is TensorSide.INPUT
        if not watched or (
            is_input and not self._observer.is_selected(name, BACKWARD_SIDE[TensorSide.INPUT])
        ):
            return 0
        for leaf in leaves:
            if leaf.slot in watched:
                call.arrivals.watch_slot(side, leaf.slot)
                address = cast("Tensor", leaf.value).data_ptr()
                call.arrivals.expect_gradient(side, leaf.slot, address)
        ticket = next(ticket_numbers)
        with self._lock:
            self._tickets[ticket] = (call, side)
        return ticket


# Section: functions that Dynamo traces. They use plain loops and types that Dynamo knows, and
# change nothing outside, because Dynamo would guard on that and compile again.


class ModuleCallTracer:
    """Inserts the observation of one module's calls into the graph that is being traced."""

    def __init__(self, graph: int, path: str) -> None:
        self._graph = graph
        self._path = path

    def trace_arguments(self, args: Sequence[object], kwargs: Mapping[str, object] | None) -> None:
        """Observe the arguments of the module's call."""
        found: list[tuple[str, object]] = []
        for index, value in enumerate(args):
            _collect_traced(value, f"args.{index}", found, 0)
        if kwargs:
            for name, value in kwargs.items():
                _collect_traced(value, f"kwargs.{name}", found, 0)
        self._insert("input", found)

    def trace_result(self, result: object) -> None:
        """Observe the result of the module's call."""
        found: list[tuple[str, object]] = []
        _collect_traced(result, "out", found, 0)
        self._insert("output", found)

    def _insert(self, side: str, found: list[tuple[str, object]]) -> None:
        if not _may_insert(self._graph, self._path):
            return
        has_grad = torch.is_grad_enabled()
        leaves: list[TracedLeaf] = []
        tensors: list[Tensor] = []
        watched: list[tuple[Tensor, int, str]] = []
        for slot, (argument, value) in enumerate(found):
            if not isinstance(value, Tensor):
                continue
            state = _choose_state(value, has_grad)
            leaves.append(TracedLeaf(slot, argument, state))
            if state != _UNREADABLE:
                tensors.append(value)
            if state == _WATCHED:
                watched.append((value, slot, argument))
        text = format_side(self._graph, self._path, side, has_grad, leaves)
        ticket = torch.ops.rankdump.observe(tensors, text)
        for tensor, slot, argument in watched:
            _watch_gradient(tensor, ticket, slot, argument)


def _choose_state(value: Tensor, has_grad: bool) -> str:
    # torch has no rule for how custom operators treat tensors of other classes, such as DTensors.
    if type(value) is not Tensor and type(value) is not Parameter:
        return _UNREADABLE
    if has_grad and value.requires_grad and not isinstance(value, Parameter):
        return _WATCHED
    return _READABLE


def _collect_traced(
    value: object, argument: str, found: list[tuple[str, object]], depth: int
) -> None:
    """Collect leaves in the order and with the names of `list_call_leaves`."""
    if depth >= MAX_DEPTH or isinstance(value, Tensor):
        found.append((argument, value))
    elif isinstance(value, (tuple, list)):
        names = getattr(value, "_fields", ())
        for index, part in enumerate(value):
            name = names[index] if len(names) == len(value) else str(index)
            _collect_traced(part, f"{argument}.{name}", found, depth + 1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            part = getattr(value, field.name, None)
            _collect_traced(part, f"{argument}.{field.name}", found, depth + 1)
    elif isinstance(value, dict):
        for index, (key, part) in enumerate(value.items()):
            name = str(key) if isinstance(key, (str, int)) else str(index)
            _collect_traced(part, f"{argument}.{name}", found, depth + 1)
    else:
        found.append((argument, value))


# Section: functions that run while Dynamo traces, outside of the graph.


@torch.compiler.assume_constant_result
def _may_insert(graph: int, path: str) -> bool:
    try:
        scope = find_untraceable_scope()
    except Exception as error:  # an error here would end the compilation, and the training with it
        scope = f"code that cannot be examined ({type(error).__name__}: {error})"
    if not scope:
        return True
    receiver = compiled_call_receivers.get(graph)
    if receiver is not None:
        receiver.report_scope(path, scope)
    return False


@torch.compiler.allow_in_graph
def _watch_gradient(tensor: Tensor, ticket: Tensor, slot: int, argument: str) -> None:
    """Add a gradient hook to a tensor; AOTAutograd traces the hook into the backward, other
    backends call it.
    """

    def hand_over(gradient: Tensor) -> None:
        torch.ops.rankdump.observe_gradient(gradient, ticket, slot, argument)

    tensor.register_hook(hand_over)


# Section: the operators as compiled code runs them. They must not raise.


_NO_TICKET = torch.zeros((), dtype=torch.int64, device="cpu")


def _list_armed() -> list[CompiledRegionObserver]:
    # The values are copied, because another thread may attach a model.
    return [receiver for receiver in tuple(compiled_call_receivers.values()) if receiver.armed]


def _observe(tensors: Sequence[Tensor], text: str) -> Tensor:
    if not _list_armed():
        return _NO_TICKET.clone()
    traced = parse_side(text)
    receiver = compiled_call_receivers.get(traced.graph)
    ticket = 0 if receiver is None or not receiver.armed else receiver.receive_side(traced, tensors)
    return torch.tensor(ticket, dtype=torch.int64, device="cpu")


def _observe_gradient(gradient: Tensor, ticket: Tensor, slot: int, argument: str) -> None:
    armed = _list_armed()
    if not armed:
        return
    number = int(ticket.item())
    if number:
        leaf = CallLeaf(slot, argument, gradient)
        any(receiver.receive_gradient(number, leaf) for receiver in armed)


def _observe_fake(tensors: Sequence[Tensor], text: str) -> Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _observe_gradient_fake(gradient: Tensor, ticket: Tensor, slot: int, argument: str) -> None:
    return None


def _define(library: Any, schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> None:
    # An operator that records cannot be part of a CUDA graph, and it reads tensors of any layout.
    tags = (torch.Tag.cudagraph_unsafe, torch.Tag.flexible_layout)
    library.define(schema, tags=tags)
    name = f"rankdump::{schema.partition('(')[0]}"
    library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    register_effect(library, name)


_library = torch.library.Library("rankdump", "DEF")
_define(_library, "observe(Tensor[] tensors, str side) -> Tensor", _observe, _observe_fake)
_define(
    _library,
    "observe_gradient(Tensor gradient, Tensor ticket, int slot, str argument) -> ()",
    _observe_gradient,
    _observe_gradient_fake,
)

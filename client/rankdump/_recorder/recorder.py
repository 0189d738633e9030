"""Recorder that framework adapters call from any thread: resolves names, applies the plan, and
passes tensors, graphs, call stacks and events to the parts that send them. It implements the
protocol `Recorder`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rankdump._core.events import CallOutcome, UnseenReason
from rankdump._core.graph import GraphNode, GraphParameter
from rankdump._core.record import TensorSide
from rankdump._core.recorder_protocol import (
    CardRecorder,
    CollectiveCall,
    ForwardPass,
    StartedEvent,
    TensorObservation,
)
from rankdump._core.session_protocol import OperatorArguments
from rankdump._core.timeouts import GroupTimeout
from rankdump._layout.profile import OperatorAliases, make_gradient_alias
from rankdump._recorder.declared_layouts import DeclaredLayouts
from rankdump._recorder.event_trace import EventTrace
from rankdump._recorder.iteration_state import IterationState, LostTensor
from rankdump._recorder.metadata_sender import CallStackSender, GraphBuilder
from rankdump._recorder.record_filter import OperatorRanges, RecordFilter
from rankdump._recorder.session_logger import SessionLogger
from rankdump._recorder.triggers import DumpTrigger


class DumpRecorder:
    """Recorder of one rank; safe to use from several threads."""

    def __init__(
        self,
        iteration_state: IterationState,
        selection: RecordFilter,
        trigger: DumpTrigger,
        ranges: OperatorRanges,
        *,
        trace: EventTrace,
        graph_builder: GraphBuilder,
        aliases: OperatorAliases | None,
        stack_sender: CallStackSender | None,
        keeps_arguments: bool,
        session_logger: SessionLogger,
        on_events: Callable[[], None],
        on_limit: Callable[[GroupTimeout], None],
    ) -> None:
        """`on_events` is called when many events wait to be sent, `on_limit` for each process group
        in use.
        """
        self._iteration_state = iteration_state
        self._filter = selection
        self._trigger = trigger
        self._needs_call_ends = trigger.needs_call_ends
        self._ranges = ranges
        self._trace = trace
        self._graph_builder = graph_builder
        self._aliases = aliases
        self._stack_sender = stack_sender
        self._keeps_arguments = keeps_arguments
        self._session_logger = session_logger
        self._on_events = on_events
        self._on_limit = on_limit
        self.declared_layouts = DeclaredLayouts(self.warn_once)
        """Layouts that the script declared for tensors."""
        self.card: CardRecorder | None = None
        """The run card of the running iteration; None if no card is kept."""
        self._constants: set[tuple[int, str]] = set()
        self._lock = threading.Lock()

    @property
    def armed(self) -> bool:
        """Whether the plan selects the running iteration on this rank."""
        return self._iteration_state.armed

    @property
    def is_describing(self) -> bool:
        """Whether operators are to be described for the graph; true in the first armed
        iteration.
        """
        return self._iteration_state.is_describing

    @property
    def wants_arguments(self) -> bool:
        """Whether arguments of operators are kept in the running iteration."""
        return self._keeps_arguments and self._iteration_state.armed

    @property
    def declared_pass(self) -> ForwardPass:
        """The micro-batch that the script declared last in this iteration, if any."""
        return self._iteration_state.declared_pass

    # -- tensors

    def begin_call(self, graph: int, op_name: str) -> None:
        """Report that a forward call of an operator begins; called before its tensors
        are observed.
        """
        if self._ranges.has_ranges:
            self._ranges.enter_operator(graph, self._resolve_name(op_name))

    def is_wanted(self, graph: int, op_name: str, side: TensorSide) -> bool:
        """Return whether tensors on this side of an operator are kept in the running iteration."""
        state = self._iteration_state
        state.active = True
        if not state.armed:
            return False
        name = op_name if self._aliases is None else self._resolve_name(op_name)
        return self._trigger.is_wanted(name, side, graph)

    def names_operators(self, graph: int) -> bool:
        """Return whether the plan selects operators of a graph individually instead of
        all of them.
        """
        return self._filter.names_operators(graph)

    def observe(self, observation: TensorObservation) -> None:
        """Record a tensor on a side for which `is_wanted` has just returned True."""
        # MindSpore writes nothing for a tensor without elements.
        if not (observation.tensor.byte_count and self._iteration_state.armed):
            return
        if self.declared_layouts.declarations:
            self.declared_layouts.apply_to(observation)
        if self._aliases is not None:
            observation = observation._replace(op_name=self._resolve_name(observation.op_name))
        if observation.constant and not self._is_first(observation.graph, observation.op_name):
            return
        self._trigger.handle_tensor(observation)

    def count_loss(
        self, graph: int, op_type: str, op_name: str, side: TensorSide, slot: int, reason: str
    ) -> None:
        """Count an unreadable tensor on a side for which `is_wanted` has just returned True."""
        name = self._resolve_name(op_name)
        left_out = self._filter.is_excluded((graph, op_type, name, side, slot))
        if self._iteration_state.armed and not left_out:
            self._trigger.handle_item(
                graph, name, LostTensor(self._iteration_state.iteration, name, reason)
            )

    def end_call(self, graph: int, op_name: str, *, raised: bool = False) -> None:
        """Report that a call of an operator has ended; called after its tensors are observed."""
        if self._needs_call_ends and self._iteration_state.armed:
            name = op_name if self._aliases is None else self._resolve_name(op_name)
            self._trigger.end_call(graph, name, raised=raised)

    def set_marks(self, graph: int, names: frozenset[str]) -> None:
        """Set the operators of a graph that the script marked with `set_dump`."""
        if self._aliases is not None:
            names = names.union(map(make_gradient_alias, names))
        self._filter.set_marks(graph, names)

    def record_arguments(
        self, graph: int, op_type: str, op_name: str, values: Mapping[str, str]
    ) -> None:
        """Record the arguments of an operator, if the plan selects it."""
        if not self.wants_arguments:
            return
        name = self._resolve_name(op_name)
        if any(self._trigger.is_wanted(name, side, graph) for side in TensorSide):
            self._trigger.handle_item(
                graph, name, OperatorArguments(graph, op_type, name, dict(values))
            )

    def record_call_stack(self, graph: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Record the call stack of a selected API call: its lines, innermost call first."""
        if self._stack_sender is not None and self._iteration_state.armed:
            self._stack_sender.add(self._iteration_state.iteration, op_name, stack)

    # -- graphs

    def describe(self, graph: int, node: GraphNode) -> None:
        """Add an operator to its graph; the first description of a name counts."""
        if not self._iteration_state.is_describing:
            return
        if self._aliases is not None:
            inputs = tuple(map(self._resolve_name, node.inputs))
            node = replace(node, name=self._resolve_name(node.name), inputs=inputs)
        if not self._graph_builder.add(graph, node):
            self._session_logger.warn_once(
                f"graph {graph} is too large: only part of it will be drawn",
                about=f"large graph {graph}",
            )

    def describe_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Add a parameter to its graph."""
        if self._iteration_state.is_describing:
            named = replace(parameter, name=self._resolve_name(parameter.name))
            self._graph_builder.add_parameter(graph, named)

    def set_compiled_order(self, graph: int, nodes: Sequence[GraphNode]) -> None:
        """Set the order of a graph's operators that the framework determined when it compiled the
        graph.
        """
        self._graph_builder.set_compiled_order(
            graph, [replace(n, name=self._resolve_name(n.name)) for n in nodes]
        )

    # -- events and warnings

    def start_event(
        self, *, graph: int, name: str, collective: CollectiveCall | None = None
    ) -> StartedEvent:
        """Start an event of the rank; the caller must finish it in any case."""
        self._iteration_state.active = True
        if self._aliases is not None:
            name = self._resolve_name(name)
        return self._trace.start_event(graph=graph, name=name, collective=collective)

    def record_event(self, *, graph: int, name: str) -> None:
        """Record an event without a duration."""
        self._iteration_state.active = True
        if self._aliases is not None:
            name = self._resolve_name(name)
        if self._trace.record_event(graph=graph, name=name):
            self._on_events()

    def finish_event(
        self,
        begun: StartedEvent,
        *,
        name: str = "",
        collective: CollectiveCall | None = None,
        outcome: int = CallOutcome.UNKNOWN,
    ) -> None:
        """Record that a started event has completed or failed now; may be called from
        any thread.
        """
        if name and self._aliases is not None:
            name = self._resolve_name(name)
        if self._trace.finish_event(begun, name=name, collective=collective, outcome=outcome):
            self._on_events()

    def record_group_timeout(self, timeout: GroupTimeout) -> None:
        """Record the timeout of a process group in use."""
        self._on_limit(timeout)

    def report_unseen_collectives(self, group: str, reason: UnseenReason, count: int) -> None:
        """Note collectives of the running iteration for which there is no event."""
        self._trace.add_unseen(group, reason, count)

    def warn_once(self, message: str) -> None:
        """Log a warning, but only the first time."""
        self._session_logger.warn_once(message)

    def _is_first(self, graph: int, name: str) -> bool:
        """Return whether the constant is observed for the first time."""
        with self._lock:
            known = (graph, name) in self._constants
            self._constants.add((graph, name))
            return not known

    def _resolve_name(self, name: str) -> str:
        """Return an operator's name as the plan's profile spells it."""
        if self._aliases is None:
            return name
        alias = self._aliases.find_alias(name)
        if alias is not None:
            return alias
        with self._lock:
            alias = self._aliases.get_alias(name)
        if self._aliases.is_full:
            self._session_logger.warn_once(
                "there are too many operator names: shortened names are no longer unique"
            )
        return alias

"""Metadata of a rank and its senders: events, graphs and ends of iterations in order, call stacks
in batches, and timeouts of communication when a new one is known. No sender waits for space or
reads a tensor.

Graphs are built from descriptions of operators, of which the first one for each name counts, and
are sent in parts that fit into messages.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from numbers import Real
from typing import cast

from rankdump._core.graph import GraphNode, GraphParameter, GraphPart, OperatorGraph
from rankdump._core.record import MAX_FRAME_ROWS
from rankdump._core.session_protocol import CallStacks
from rankdump._core.timeouts import GroupTimeout, RankTimeouts, find_tightest_us
from rankdump._recorder.event_trace import EventTrace
from rankdump._recorder.iteration_state import IterationCounters, StallTimer
from rankdump._recorder.record_builder import StagingBuffer
from rankdump._transport.send_buffer import SendBuffer

MAX_PART_NODES = 500
MAX_PART_CHARACTERS = 1 << 19
"""Maximum characters of a part of a graph, well below the size limit of a message."""
# A training loop that never calls `step` creates new operator names without end.
MAX_NODES = 1 << 16


class _GraphDraft:
    """One graph, as far as it has been described."""

    def __init__(self) -> None:
        self.nodes: dict[str, GraphNode] = {}
        self.parameters: dict[str, GraphParameter] = {}
        self.compiled = False
        self.has_changed = False

    def compile(self, nodes: Sequence[GraphNode]) -> None:
        described, self.nodes = self.nodes, {}
        for node in nodes:
            self.nodes.setdefault(node.name, described.get(node.name, node))
        self.compiled = self.has_changed = True

    def add(self, node: GraphNode) -> None:
        before = self.nodes.get(node.name)
        if self.compiled and (before is None or before.outputs or before.source):
            # The nodes of a compiled graph come from the framework, without outputs and source
            # lines. An operator that is not among them is not part of the graph, and a node that
            # has outputs or source lines was described already.
            return
        if self.compiled or before is None:
            self.nodes[node.name] = node
            self.has_changed = True


class GraphBuilder:
    """The graphs of one rank; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._graphs: dict[int, _GraphDraft] = {}

    def add(self, graph: int, node: GraphNode) -> bool:
        """Add an operator; return False if the graph has no space for it."""
        with self._lock:
            draft = self._graphs.setdefault(graph, _GraphDraft())
            if len(draft.nodes) >= MAX_NODES and node.name not in draft.nodes:
                return False
            draft.add(node)
            return True

    def add_parameter(self, graph: int, parameter: GraphParameter) -> None:
        """Add a weight or constant."""
        with self._lock:
            draft = self._graphs.setdefault(graph, _GraphDraft())
            if parameter.name not in draft.parameters:
                draft.parameters[parameter.name] = parameter
                draft.has_changed = True

    def set_compiled_order(self, graph: int, nodes: Sequence[GraphNode]) -> None:
        """Set the framework's own order of a graph; descriptions of its nodes complete it."""
        with self._lock:
            self._graphs.setdefault(graph, _GraphDraft()).compile(nodes)

    def take_parts(self) -> list[GraphPart]:
        """Return every graph that changed since the last call; each is complete and split into
        parts.
        """
        with self._lock:
            changed = [(n, draft) for n, draft in self._graphs.items() if draft.has_changed]
            graphs = [
                OperatorGraph(
                    number=number,
                    nodes=tuple(draft.nodes.values()),
                    parameters=tuple(draft.parameters.values()),
                    compiled=draft.compiled,
                )
                for number, draft in changed
            ]
            for _, draft in changed:
                draft.has_changed = False
        return [part for graph in graphs for part in split_graph(graph)]


def split_graph(graph: OperatorGraph) -> Iterator[GraphPart]:
    """Yield the parts of a graph, each of which fits into a message; a graph without nodes is one
    part.
    """
    named, most = graph.parameters, MAX_PART_NODES
    parameters = (named[at : at + most] for at in range(0, len(named), most))
    pieces = list(zip_longest(_split_nodes(graph.nodes), parameters, fillvalue=()))
    for at, (nodes, some) in enumerate(pieces or [((), ())]):
        piece = OperatorGraph(graph.number, nodes, some, graph.compiled)
        yield GraphPart(piece, first=at == 0, last=at >= len(pieces) - 1)


def _split_nodes(nodes: Sequence[GraphNode]) -> Iterator[tuple[GraphNode, ...]]:
    piece: list[GraphNode] = []
    size = 0
    for node in nodes:
        weight = _count_characters(node)
        if piece and (len(piece) == MAX_PART_NODES or size + weight > MAX_PART_CHARACTERS):
            yield tuple(piece)
            piece, size = [], 0
        piece.append(node)
        size += weight
    if piece:
        yield tuple(piece)


def _count_characters(node: GraphNode) -> int:
    """Return the approximate number of characters of a node as text."""
    lines = sum(len(line.file) + len(line.function) + len(line.code) for line in node.source)
    pairs = sum(len(name) + len(text) for name, text in node.attributes.items())
    return len(node.name) + len(node.op_type) + sum(map(len, node.inputs)) + lines + pairs


class MetadataSender:
    """Sends events, graphs and ends of iterations; safe to use from several threads."""

    def __init__(
        self,
        *,
        trace: EventTrace,
        graph_builder: GraphBuilder,
        counters: IterationCounters,
        stalls: StallTimer,
        send_buffer: SendBuffer,
    ) -> None:
        self._trace = trace
        self._graph_builder = graph_builder
        self._counters = counters
        self._stalls = stalls
        self._send_buffer = send_buffer
        self._in_order = threading.Lock()
        self._silent = False

    def disarm(self) -> None:
        """Send nothing from now on, in a forked child; takes no lock, because another thread may
        have held it during the fork.
        """
        self._silent = True

    def send_events(self) -> None:
        """Send all events that wait."""
        if self._silent:
            return
        # Events are taken and sent under one lock, because the end of an iteration must come after
        # its events.
        with self._in_order:
            events = self._trace.take_events()
            if events is not None:
                self._send_buffer.submit(events)

    def send_graphs(self) -> None:
        """Send the graphs that changed since they were last sent."""
        for part in self._graph_builder.take_parts():
            self._send_buffer.submit(part)

    def end_iteration(self, iteration: int, span: tuple[int, int], card: bytes = b"") -> None:
        """Send all metadata of an iteration, then the frame that ends it, with the run card."""
        with self._stalls.measure_stall():
            self.send_events()
            self.send_graphs()
        self._counters.add_stall(iteration, self._stalls.take_ended_ns())
        end = self._counters.close_iteration(iteration, span)
        self._send_buffer.submit(replace(end, card=card) if card else end)


MAX_STACK_CHARACTERS = 1 << 18
"""Approximate limit of the characters of stacks in one frame: stacks of a deep program are long."""


class CallStackSender:
    """Sends call stacks of one rank, in order; safe to use from several threads."""

    def __init__(self, staging: StagingBuffer, send_buffer: SendBuffer) -> None:
        self._staging = staging
        self._send_buffer = send_buffer
        self._lock = threading.Lock()
        self._iteration = 0
        self._calls: list[str] = []
        self._places: list[int] = []
        self._known: dict[tuple[str, ...], int] = {}
        self._characters = 0
        self.lost_calls = 0
        """Calls whose stacks were dropped for lack of space."""

    def add(self, iteration: int, op_name: str, stack: tuple[str, ...]) -> None:
        """Add the stack of a call of an operator."""
        with self._lock:
            if iteration != self._iteration:
                self._send()
                self._iteration = iteration
            self._calls.append(op_name)
            place = self._known.get(stack)
            if place is None:
                place = self._known[stack] = len(self._known)
                self._characters += sum(map(len, stack))
            self._places.append(place)
            if len(self._calls) >= MAX_FRAME_ROWS or self._characters >= MAX_STACK_CHARACTERS:
                self._send()

    def flush(self) -> None:
        """Send the stacks that wait for the end of the iteration."""
        with self._lock:
            self._send()

    def _send(self) -> None:
        if not self._calls:
            return
        stacks = CallStacks(
            self._iteration, tuple(self._calls), tuple(self._places), tuple(self._known)
        )
        self._calls, self._places, self._known = [], [], {}
        self._characters = 0
        if self._staging.admit_at_once(stacks):
            self._send_buffer.submit(stacks)
        else:
            self.lost_calls += len(stacks.calls)


MAX_NAME_CHARACTERS = 64
MAX_TIMEOUT_S = 2**31


class TimeoutReporter:
    """Sends timeouts of communication of one session; safe to use from several threads."""

    def __init__(
        self,
        variables: Mapping[str, str],
        send_buffer: SendBuffer,
        warn: Callable[[str], None],
    ) -> None:
        """`variables` are the environment variables that set a timeout."""
        self._variables = dict(variables)
        self._send_buffer = send_buffer
        self._warn = warn
        self._groups: dict[tuple[str, str], GroupTimeout] = {}
        self._limits: dict[str, float] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Send the timeouts that the environment sets, if any."""
        if self._variables:
            self._send()

    def add_group(self, timeout: GroupTimeout) -> None:
        """Add the timeout of a process group in use."""
        place = (timeout.group, timeout.backend)
        if self._groups.get(place) != timeout:
            with self._lock:
                self._groups[place] = timeout
                self._send()

    def set_limit(self, name: str, seconds: float) -> None:
        """Set a timeout that no environment variable sets; warn if it is not allowed."""
        fault = _find_fault(name, seconds)
        if fault:
            self._warn(f"limit() was ignored: {fault}")
            return
        with self._lock:
            if self._limits.get(name) != seconds:
                self._limits[name] = float(seconds)
                self._send()

    def find_tightest_us(self) -> int:
        """Return the tightest timeout of communication that is known so far; 0 without one."""
        with self._lock:
            return find_tightest_us(self._list_timeouts())

    def _send(self) -> None:
        self._send_buffer.submit(self._list_timeouts())

    def _list_timeouts(self) -> RankTimeouts:
        groups = tuple(self._groups.values())
        return RankTimeouts(dict(self._variables), groups, dict(self._limits))


def _find_fault(name: object, seconds: object) -> str:
    """Return what is wrong with a timeout; empty if it is allowed."""
    if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
        return f"the name is {_format_value(name)}; allowed: letters, digits and _"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"the name has {len(name)} characters; allowed: up to {MAX_NAME_CHARACTERS}"
    number = cast("float", seconds) if isinstance(seconds, Real) else math.nan
    if isinstance(seconds, bool) or not 0 <= number < MAX_TIMEOUT_S:
        return (
            f"{name} is {_format_value(seconds)}; allowed: seconds from 0 (never) to "
            f"{MAX_TIMEOUT_S - 1}"
        )
    return ""


def _format_value(value: object) -> str:
    try:
        return repr(value)[:MAX_NAME_CHARACTERS]
    except Exception:  # the value comes from the job, and its own `__repr__` runs here
        return type(value).__name__

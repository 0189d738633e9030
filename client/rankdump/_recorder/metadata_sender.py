"""Senders of a rank's metadata: events, graphs and ends of iterations in order, call stacks in
batches, and timeouts of communication when new ones are known. Never waits for space.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from numbers import Real
from typing import cast

from rankdump._core.record import MAX_FRAME_ROWS
from rankdump._core.session_protocol import CallStacks
from rankdump._core.timeouts import GroupTimeout, RankTimeouts, find_tightest_us
from rankdump._recorder.event_trace import EventTrace
from rankdump._recorder.graph_builder import GraphBuilder
from rankdump._recorder.iteration_state import IterationCounters, StallTimer
from rankdump._recorder.record_builder import StagingBuffer
from rankdump._transport.send_buffer import SendBuffer


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
        """Send nothing from now on, in a forked child; takes no lock, because it may be held."""
        self._silent = True

    def send_events(self) -> None:
        """Send the events that wait."""
        if self._silent:
            return
        # Taken and sent under one lock: the end of an iteration must come after its events.
        with self._in_order:
            events = self._trace.take_events()
            if events is not None:
                self._send_buffer.submit(events)

    def send_graphs(self) -> None:
        """Send the graphs that changed."""
        for part in self._graph_builder.take_parts():
            self._send_buffer.submit(part)

    def end_iteration(self, iteration: int, span: tuple[int, int], card: bytes = b"") -> None:
        """Send all metadata of an iteration, then its end with the run card."""
        with self._stalls.measure_stall():
            self.send_events()
            self.send_graphs()
        self._counters.add_stall(iteration, self._stalls.take_ended_ns())
        end = self._counters.close_iteration(iteration, span)
        self._send_buffer.submit(replace(end, card=card) if card else end)


MAX_STACK_CHARACTERS = 1 << 18
"""Approximate limit to the stacks of one frame: stacks of a deep program are long."""


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
        """Add the stack of a call."""
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
    except Exception:  # the object's own code runs here
        return type(value).__name__

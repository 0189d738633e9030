"""Names and time stamps of records: the part of a tensor's description that is the same in every
iteration, and the time that names its file or sorts its row. Never touches a tensor's elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump._core.bounded_cache import remember
from rankdump._core.plan import UNNAMED_MODEL
from rankdump._core.record import TensorKind, TensorSide
from rankdump._core.recorder_protocol import TensorObservation, TensorSource
from rankdump._core.selection import GRADIENTS_PREFIX
from rankdump._core.session_protocol import RecordHead
from rankdump._layout.tree_layouts import DEFAULT_LAYOUT, Layout

_MAX_REMEMBERED_NAMES = 1 << 14
"""Limit for a loop without steps: every call number makes a name."""


class TimestampAllocator:
    """Allocates times that name files and sort rows; safe to use from several threads.

    Each is later than all before, unless all tensors of a call share the time of the first one.
    """

    def __init__(self, clock_us: Callable[[], int], *, shared: bool) -> None:
        self._clock_us = clock_us
        self.shared = shared
        """Whether tensors of a call share the time of the first one."""
        self._lock = threading.Lock()
        self._last_us = 0
        self._iteration = -1
        self._calls: dict[tuple[int, str], tuple[int, set[int]]] = {}
        """Time of each call of the running iteration, and the tensors that have it."""

    def allocate(self, kind: TensorKind, iteration: int) -> int:
        """Return the time stamp of a tensor of that kind, in us since the epoch."""
        with self._lock:
            if not self.shared:
                return self._next_us()
            if iteration != self._iteration or len(self._calls) >= _MAX_REMEMBERED_NAMES:
                self._calls.clear()
                self._iteration = iteration
            call = kind.graph, kind.op_name
            place = -kind.slot - 1 if kind.side is TensorSide.OUTPUT else kind.slot
            known = self._calls.get(call)
            # A tensor that came before belongs to another call.
            if known is None or place in known[1]:
                known = self._calls[call] = self._next_us(), set[int]()
            known[1].add(place)
            return known[0]

    def end_call(self, graph: int, op_name: str) -> None:
        """End a forward call; a backward's end is ignored, for it may be reported too early."""
        if not op_name.startswith(GRADIENTS_PREFIX):
            with self._lock:
                self._calls.pop((graph, op_name), None)

    def _next_us(self) -> int:
        self._last_us = stamp_us = max(self._clock_us(), self._last_us + 1)
        return stamp_us


class RecordNamer:
    """Names tensors of one rank; safe to use from several threads."""

    def __init__(
        self,
        *,
        rank: int,
        net_name: str,
        clock_us: Callable[[], int],
        layout: Layout = DEFAULT_LAYOUT,
    ) -> None:
        """`net_name` is the plan's; if set, it is used instead of the names of models."""
        self._rank = rank
        self._net_name = net_name
        self._unknown_id = layout.unknown_id
        self._stamps = TimestampAllocator(clock_us, shared=layout.shares_timestamps)
        # In an API dump each call has its own name, so no name repeats.
        self._remembers = layout.api_files is None
        self._models: dict[int, str] = {}
        self._kinds: dict[tuple[int, str, TensorSide, int], TensorKind] = {}

    def name_model(self, graph: int, name: str) -> None:
        """Set the name of a graph's model; kinds with the old name are forgotten."""
        self._models[graph] = name
        self._kinds.clear()

    def get_model_name(self, graph: int) -> str:
        """Return the name of a graph's model."""
        return self._net_name or self._models.get(graph, UNNAMED_MODEL)

    def find_kind(self, observation: TensorObservation, source: TensorSource) -> TensorKind:
        """Return the kind of an observation's tensor, or of a sample of it, read by `source`.

        The same object is returned while type and shape stay the same, if names repeat.
        """
        if not self._remembers:
            return self._make_kind(observation, source)
        place = (observation.graph, observation.op_name, observation.side, observation.slot)
        known = self._kinds.get(place)
        if (
            known is not None
            and known.shape == source.shape
            and known.dtype == source.dtype
            and known.argument == observation.argument
            and known.op_type == observation.op_type
            and known.constant == observation.constant
        ):
            return known
        kind = self._make_kind(observation, source)
        return remember(self._kinds, place, kind, _MAX_REMEMBERED_NAMES)

    def stamp(self, kind: TensorKind, iteration: int) -> int:
        """Return the time in us that names the file of a tensor, or sorts its row."""
        return self._stamps.allocate(kind, iteration)

    def end_call(self, graph: int, op_name: str) -> None:
        """End a call: the next one of its name gets a new time."""
        if self._stamps.shared:
            self._stamps.end_call(graph, op_name)

    def make_head(
        self, kind: TensorKind, *, iteration: int, switched_on: bool = False
    ) -> RecordHead:
        """Return the head of a record of that kind, stamped now."""
        return RecordHead(
            kind,
            iteration,
            self._stamps.allocate(kind, iteration),
            self._rank,
            self._unknown_id,
            self._unknown_id,
            switched_on,
        )

    def _make_kind(self, observation: TensorObservation, source: TensorSource) -> TensorKind:
        graph, op_type, op_name, side, slot, argument, *_ = observation
        return TensorKind(
            graph,
            op_type,
            op_name,
            side,
            slot,
            source.dtype,
            source.shape,
            source.byte_count,
            argument,
            observation.constant,
            self.get_model_name(graph),
        )

"""Names a tensor: what of it is the same in every iteration, and a time stamp of its own.

Never touches a tensor's elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump.contract.exchange import RecordHead
from rankdump.contract.figure_rows import TensorKind
from rankdump.contract.key import Side, TensorKey
from rankdump.values import Observation, TensorSource

_REMEMBERED = 1 << 14
"""Call numbers make names; a loop without steps must not be remembered for ever."""


class Heads:
    """Names the tensors of one rank; safe to use from several threads."""

    def __init__(self, *, rank: int, net_name: str, clock_us: Callable[[], int]) -> None:
        self._rank = rank
        self._net_name = net_name
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._last_us = 0
        self._kinds: dict[tuple[int, str, Side, int], TensorKind] = {}

    def kind(self, observation: Observation, source: TensorSource) -> TensorKind:
        """Return the kind of what is kept of an observation: `source`, which may be a sample.

        It is the same object as long as the tensor looks the same: what is made of it is
        remembered by whoever makes it.
        """
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
        if len(self._kinds) >= _REMEMBERED:
            self._kinds.clear()
        kind = self._kinds[place] = TensorKind(
            graph=observation.graph,
            op_type=observation.op_type,
            op_name=observation.op_name,
            side=observation.side,
            slot=observation.slot,
            dtype=source.dtype,
            shape=source.shape,
            byte_count=source.byte_count,
            argument=observation.argument,
            constant=observation.constant,
        )
        return kind

    def stamp(self) -> int:
        """Return the time in us, but more than ever before: it names files and sorts rows."""
        now_us = self._clock_us()
        with self._lock:
            next_us = self._last_us + 1
            self._last_us = stamp = now_us if now_us > next_us else next_us
        return stamp

    def of(self, kind: TensorKind, *, iteration: int, switched_on: bool = False) -> RecordHead:
        """Return the head of a record of that kind, stamped now."""
        key = TensorKey(
            rank=self._rank,
            net_name=self._net_name,
            graph=kind.graph,
            iteration=iteration,
            timestamp_us=self.stamp(),
            op_type=kind.op_type,
            op_name=kind.op_name,
            side=kind.side,
            slot=kind.slot,
            constant=kind.constant,
        )
        return RecordHead(
            key=key,
            dtype=kind.dtype,
            shape=kind.shape,
            byte_count=kind.byte_count,
            argument=kind.argument,
            switched_on=switched_on,
        )

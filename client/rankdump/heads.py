"""Names a record: rank, network, and a time stamp that no other record of the rank has.

Never touches a tensor's elements.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from rankdump.contract.exchange import RecordHead
from rankdump.contract.key import TensorKey
from rankdump.values import Observation, TensorSource


class Heads:
    """Makes the heads of one rank's records; safe to use from several threads."""

    def __init__(self, *, rank: int, net_name: str, clock_us: Callable[[], int]) -> None:
        self._rank = rank
        self._net_name = net_name
        self._clock_us = clock_us
        self._lock = threading.Lock()
        self._last_us = 0

    def of(
        self,
        observation: Observation,
        source: TensorSource,
        *,
        iteration: int,
        switched_on: bool = False,
        measured: bool = False,
    ) -> RecordHead:
        """Return the head of what is kept of an observation: `source`, which may be a sample.

        One that is `measured` goes without its elements; its figures are still to come.
        """
        key = TensorKey(
            rank=self._rank,
            net_name=self._net_name,
            graph=observation.graph,
            iteration=iteration,
            timestamp_us=self._stamp(),
            op_type=observation.op_type,
            op_name=observation.op_name,
            side=observation.side,
            slot=observation.slot,
            constant=observation.constant,
        )
        return RecordHead(
            key=key,
            dtype=source.dtype,
            shape=source.shape,
            byte_count=source.byte_count,
            argument=observation.argument,
            figures=() if measured else None,
            switched_on=switched_on,
        )

    def _stamp(self) -> int:
        # Unique and rising even when the clock stands still or steps back: it names the file.
        with self._lock:
            self._last_us = max(self._last_us + 1, self._clock_us())
            return self._last_us

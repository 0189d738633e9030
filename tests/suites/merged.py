"""The merged order of a few events, for tests of what is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from suites.order_jobs import view_of

from rankdump.contract.events import Event, EventColumns, ProcessGroup
from rankdumpd.coordinator.merge import merge
from rankdumpd.coordinator.values import GlobalOrder


def merged(
    events: Mapping[int, Sequence[Event]], groups: tuple[ProcessGroup, ...], iteration: int
) -> GlobalOrder:
    """Return the order of one iteration, given the events of each rank."""
    batches = {rank: (EventColumns.of(list(of), groups),) for rank, of in events.items()}
    return merge(view_of(batches, iteration=iteration))

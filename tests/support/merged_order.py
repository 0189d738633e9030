"""Merged order of a few events, for tests of its writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from support.order_jobs import view_of

from rankdump._core.events import EventColumns, ProcessGroup, RankEvent
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration


def merged(
    events: Mapping[int, Sequence[RankEvent]], groups: tuple[ProcessGroup, ...], iteration: int
) -> GlobalOrder:
    """Return the order of one iteration, given the events of each rank."""
    batches = {rank: (EventColumns.from_events(list(of), groups),) for rank, of in events.items()}
    return merge_iteration(view_of(batches, iteration=iteration))

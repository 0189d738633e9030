"""Events of a batch one by one, and the ranks that wait in a call of a merged order."""

from __future__ import annotations

from rankdump._core.events import (
    OPEN_END_POSITION,
    TEXT_COLUMNS,
    EventColumns,
    EventKind,
    RankEvent,
)
from rankdumpd.coordinator.fleet_views import OrderedCalls


def list_events(columns: EventColumns) -> list[RankEvent]:
    """Return the events that a batch was made of."""
    lists = {field: column.tolist() for field, column in columns.columns.items()}
    for field in TEXT_COLUMNS:
        lists[field] = [columns.names[index] for index in lists[field]]
    lists["kind"] = [EventKind(kind) for kind in lists["kind"]]
    return [
        RankEvent(**dict(zip(lists, row, strict=True))) for row in zip(*lists.values(), strict=True)
    ]


def find_waiting_ranks(calls: OrderedCalls, call: int) -> tuple[int, ...]:
    """Return the ranks that have arrived at a call and wait in it."""
    members = slice(*calls.bounds[call : call + 2])
    opened = calls.members["end_position"][members] == OPEN_END_POSITION
    return tuple(calls.members["rank"][members][opened].tolist())

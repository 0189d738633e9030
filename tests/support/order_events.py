"""Hand-made programs of two process groups, to be merged."""

from __future__ import annotations

from typing import Any

from support.order_jobs import view_of

from rankdump._core.events import EventColumns, EventKind, ProcessGroup, RankEvent
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration

WORLD = ProcessGroup("world", (0, 1))
OTHER = ProcessGroup("other", (0, 1))


def op(position: int, name: str = "Default/Add-op1", **more: Any) -> RankEvent:
    return event(position, name, EventKind.OPERATOR, **more)


def coll(position: int, sequence: int, **more: Any) -> RankEvent:
    defaults: dict[str, Any] = {
        "group": "world",
        "element_count": 8,
        "dtype": "float32",
        "sequence": sequence,
    }
    kind = more.pop("kind", EventKind.ALL_REDUCE)
    return event(position, "AllReduce", kind, **(defaults | more))


def message(position: int, kind: EventKind, peer: int, sequence: int = 0, **more: Any) -> RankEvent:
    return event(position, "Msg", kind, group="world", sequence=sequence, peer=peer, **more)


def event(position: int, name: str, kind: EventKind, **more: Any) -> RankEvent:
    start = more.pop("start_us", position)
    fields: dict[str, Any] = {
        "end_position": position,
        "graph": 0,
        "iteration": 3,
        "end_us": start,
    } | more
    return RankEvent(position=position, name=name, kind=kind, start_us=start, **fields)


def merged(*programs: list[RankEvent], groups=(WORLD, OTHER), **more: Any) -> GlobalOrder:
    events = {
        rank: [EventColumns.from_events(program, groups)]
        for rank, program in enumerate(programs)
        if program
    }
    return merge_iteration(view_of(events, iteration=3, **more))

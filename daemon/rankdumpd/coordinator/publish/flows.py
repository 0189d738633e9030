"""Arrows of a trace: between the members of a collective, from a send to its receive. Pure."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column, EventKind, ProcessGroup
from rankdumpd.coordinator.publish.members import Members
from rankdumpd.coordinator.values import GlobalOrder

_Point = tuple[int, int, int]
"""Rank, thread and time of one end of an arrow; a slice is there."""
_Message = tuple[ProcessGroup, int, int, int]
"""Group, sender, receiver, sequence."""


def flow_events(
    order: GlobalOrder, members: Members, thread_of: Column, first_us: int
) -> Iterator[str]:
    """Yield the events of all flows, each flow's in the order of their times."""
    bounds = np.searchsorted(members.line, np.arange(len(members.lines) + 1)).tolist()
    start, end = members.start_us - first_us, members.end_us - first_us
    sends: defaultdict[_Message, list[_Point]] = defaultdict(list)
    for at, line in enumerate(members.lines.tolist()):
        part = slice(bounds[at], bounds[at + 1])
        points = list(_points(members.rank[part], thread_of[part], start[part]))
        call = int(order.columns["call"][line])
        kind = EventKind(int(order.calls.columns["kind"][call]))
        if kind.collective:
            arrived = sorted(points, key=lambda point: point[2])
            yield from _arrows("collective", kind.name.lower(), call, arrived)
        elif kind is EventKind.SEND:
            sends[_message(order, call, points[0][0], kind)].append(points[0])
        elif waiting := sends[_message(order, call, points[0][0], kind)]:
            # It ends within the receive, which may have begun long before.
            send, over = waiting.pop(0), int(end[part][0])
            if send[2] < over:
                receive = (*points[0][:2], over - 1)
                yield from _arrows("message", "message", call, [send, receive])


def _points(rank: Column, thread: Column, time_us: Column) -> Iterator[_Point]:
    return zip(rank.tolist(), thread.tolist(), time_us.tolist(), strict=True)


def _message(order: GlobalOrder, call: int, rank: int, kind: EventKind) -> _Message:
    columns = order.calls.columns
    peer, sequence = int(columns["peer"][call]), int(columns["sequence"][call])
    ends = (rank, peer) if kind is EventKind.SEND else (peer, rank)
    return order.groups[int(columns["group"][call])], *ends, sequence


def _arrows(cat: str, name: str, flow: int, points: list[_Point]) -> Iterator[str]:
    if len(points) < 2:
        return
    last = len(points) - 1
    for at, (rank, thread, time) in enumerate(points):
        step = {0: "s", last: "f"}.get(at, "t")
        event = {"ph": step, "cat": cat, "name": name, "id": flow, "pid": rank, "tid": thread}
        bound = {"bp": "e"} if step == "f" else {}
        yield json.dumps(event | {"ts": time} | bound)

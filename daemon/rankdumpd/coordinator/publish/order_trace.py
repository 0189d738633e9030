"""Trace of the merged order of an iteration, for Perfetto and chrome://tracing. Pure.

Ranks are shown as processes, streams as threads. Calls of a stream have separate threads, because
they continue while operators run, and slices that overlap get separate lanes. A flow connects the
members of a collective in the order of their arrival, or a send and its receive. Times are
microseconds since the first event of the iteration, on the coordinator's clock.
"""

from __future__ import annotations

import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rankdump._core.events import OPEN_END_POSITION, EventColumn, EventKind, ProcessGroup
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.publish.order_lines import (
    CellPiece,
    TextCells,
    format_digits,
    iter_line_blocks,
    iter_rows,
    lay_out_rows,
    pack_rows,
)

_MAX_NESTED_LANES = 16
"""Largest number of lanes for nested slices per track; a slice that fits into none of them overlaps
others.
"""


def assign_separate_lanes(
    track: EventColumn, start_us: EventColumn, end_us: EventColumn
) -> EventColumn:
    """Return a lane for each slice: the lowest lane of its track in which it overlaps no other
    slice.
    """
    lanes = np.zeros(len(track), "i4")
    of, used = -1, 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []
    for at, number, start, end in _iter_by_start(track, start_us, end_us):
        if number != of:
            of, free, busy, used = number, [], [], 0
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(used)
            used += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (end, lane))
        lanes[at] = lane
    return lanes


def assign_nested_lanes(
    track: EventColumn, start_us: EventColumn, end_us: EventColumn
) -> EventColumn:
    """Return a lane for each slice: the lowest lane of its track in which it nests with
    all others.
    """
    lanes = np.zeros(len(track), "i4")
    of = -1
    ends: list[list[int]] = [[]]
    for at, number, start, end in _iter_by_start(track, start_us, end_us):
        if number != of:
            of = number
            ends = [[]]
        lanes[at] = lane = _find_fitting_lane(ends, start, end)
        ends[lane].append(end)
    return lanes


def _find_fitting_lane(ends: list[list[int]], start: int, end: int) -> int:
    for lane, around in enumerate(ends):
        while around and around[-1] <= start:
            around.pop()
        if not around or end <= around[-1]:
            return lane
    if len(ends) < _MAX_NESTED_LANES:
        ends.append([])
    return len(ends) - 1


def _iter_by_start(
    track: EventColumn, start_us: EventColumn, end_us: EventColumn
) -> Iterator[tuple[int, ...]]:
    """Yield number, track, start and end of each slice; a slice comes before the slices it
    contains.
    """
    order = np.lexsort((-end_us, start_us, track))
    return iter_rows(order, track[order], start_us[order], end_us[order])


_MAX_NAMED_RANKS = 8
"""Largest number of ranks in the name of a slice; its arguments contain all ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class CallMemberColumns:
    """The members of several calls, call by call; every column has one element per member."""

    lines: EventColumn
    """Lines of the order that are calls."""
    line: EventColumn
    """Position of each member's call in `lines`."""
    call: EventColumn
    rank: EventColumn
    stream: EventColumn
    position: EventColumn
    is_open: EventColumn
    """Whether each member has not completed the call."""
    start_us: EventColumn
    end_us: EventColumn
    """End of the slice: at least one microsecond after its start; for an open call the end of the
    trace.
    """
    waited_us: EventColumn
    """Microseconds until the last member arrived."""
    stall_us: EventColumn


def collect_call_members(order: GlobalOrder, lines: EventColumn, last_us: int) -> CallMemberColumns:
    """Return the members of the calls among these lines; open calls end at `last_us`."""
    calls = order.calls
    call_of_line = order.columns["call"][lines]
    lines = lines[call_of_line >= 0]
    own = call_of_line[call_of_line >= 0]
    counts, at = calls.locate_members(own)
    column = {name: values[at] for name, values in calls.members.items()}
    start = column["start_us"].astype("i8")
    is_open = column["end_position"] == OPEN_END_POSITION
    end = np.where(is_open, last_us, column["end_us"].astype("i8"))
    last = np.maximum.reduceat(start, np.cumsum(counts) - counts) if len(own) else start
    return CallMemberColumns(
        lines=lines,
        line=np.repeat(np.arange(len(own)), counts),
        call=np.repeat(own, counts),
        rank=column["rank"],
        stream=column["stream"],
        position=column["position"],
        is_open=is_open,
        start_us=start,
        end_us=np.maximum(end, start + 1),
        waited_us=np.repeat(last, counts) - start,
        stall_us=column["stall_us"],
    )


class TraceOrigin(NamedTuple):
    """Position in the order of the job, and time, at which the iteration begins."""

    first_position: int
    first_us: int


def build_member_events(
    order: GlobalOrder, members: CallMemberColumns, thread_of: EventColumn, origin: TraceOrigin
) -> Iterator[str]:
    """Yield a slice for each member; `thread_of` returns the number of its thread."""
    heads: dict[int, tuple[str, str]] = {}
    columns = (
        *(members.line, members.call, members.rank, thread_of, members.start_us - origin.first_us),
        *(members.end_us - members.start_us, members.position, members.waited_us),
        *(members.stall_us, members.is_open),
    )
    for row in iter_rows(*columns):
        line, call, rank, thread, start, took, place, waited, stall, is_open = row
        if line not in heads:
            # The rows of a call are consecutive, so the heads of earlier calls are not needed any
            # more.
            position = int(members.lines[line]) + origin.first_position
            heads = {line: _format_head(order, call, position)}
        head, args = heads[line]
        still = ',"complete":false' if is_open else ""
        yield (
            f'{{"ph":"X",{head},"pid":{rank},"tid":{thread},"ts":{start},"dur":{took},'
            f'"args":{{{args},"rank_position":{place},"waited_us":{waited},'
            f'"stall_us":{stall}{still}}}}}'
        )


def _format_head(order: GlobalOrder, call: int, position: int) -> tuple[str, str]:
    """Return the category and name of a call's slices, and their arguments without braces."""
    entry = order.call_entry(position, call)
    kind = entry.kind.name.lower()
    name = f"{kind} {entry.name}"
    args: dict[str, object] = {
        "position": position,
        "kind": kind,
        "group": entry.group,
        "sequence": entry.sequence,
        "element_count": entry.element_count,
        "dtype": entry.dtype,
    }
    if entry.missing:
        more = " ..." if len(entry.missing) > _MAX_NAMED_RANKS else ""
        name += f" (waits for rank {' '.join(map(str, entry.missing[:_MAX_NAMED_RANKS]))}{more})"
        args["missing"] = entry.missing
    if entry.kind in (EventKind.SEND, EventKind.RECV):
        args["peer"] = entry.peer
    cat = "collective" if entry.kind.is_collective else "message"
    return f'"cat":"{cat}","name":{json.dumps(name)}', json.dumps(args)[1:-1]


@dataclass(frozen=True, slots=True)
class TraceThread:
    """One row of the trace as a viewer shows it."""

    rank: int
    number: int
    """Number of the thread, from 1 on in each rank, because viewers take 0 for the idle thread."""
    name: str


def assign_threads(
    order: GlobalOrder, operators: EventColumn, members: CallMemberColumns
) -> tuple[list[TraceThread], EventColumn, EventColumn]:
    """Return all threads, and the thread number of each operator and of each member."""
    rank, stream, start, end = (order.columns[name][operators] for name in _OPERATOR_FIELDS)
    tracks, track_of = np.unique(
        np.concatenate(
            [_number_tracks(rank, stream), _number_tracks(members.rank, members.stream)]
        ),
        return_inverse=True,
    )
    own, of_calls = track_of[: len(start)], track_of[len(start) :]
    lanes = (
        assign_nested_lanes(own, start, np.maximum(end, start)),
        _CALL_LANE_OFFSET + assign_separate_lanes(of_calls, members.start_us, members.end_us),
    )
    # Track and lane are combined into one number, which sorts by track first; `_number_threads`
    # splits it again.
    rows, row_of = np.unique(
        track_of * 2 * _CALL_LANE_OFFSET + np.concatenate(lanes), return_inverse=True
    )
    threads = _number_threads(rows, tracks)
    numbers = np.array([thread.number for thread in threads], "i8")[row_of]
    return threads, numbers[: len(start)], numbers[len(start) :]


_OPERATOR_FIELDS = ("rank", "stream", "start_us", "end_us")
_CALL_LANE_OFFSET = 1 << 30
"""Added to the lanes of calls, so that calls are shown below operators."""


def _number_tracks(rank: EventColumn, stream: EventColumn) -> EventColumn:
    return rank.astype("u8") << 32 | stream.astype("u8")


def _number_threads(rows: EventColumn, tracks: EventColumn) -> list[TraceThread]:
    """Return a thread for each track and lane, numbered from 1 in each rank."""
    threads: list[TraceThread] = []
    for row in rows.tolist():
        track, lane = divmod(row, 2 * _CALL_LANE_OFFSET)
        rank, stream = divmod(int(tracks[track]), 1 << 32)
        name = f"stream {stream}" + (": calls" if lane >= _CALL_LANE_OFFSET else "")
        name += f" ({lane % _CALL_LANE_OFFSET + 1})" if lane % _CALL_LANE_OFFSET else ""
        follows = bool(threads) and threads[-1].rank == rank
        threads.append(TraceThread(rank, threads[-1].number + 1 if follows else 1, name))
    return threads


_FlowPoint = tuple[int, int, int]
"""Rank, thread and time of one end of an arrow; the time is within a slice."""
_MessageKey = tuple[ProcessGroup, int, int, int]
"""Group, sender, receiver and sequence number of a message."""


def build_flow_events(
    order: GlobalOrder, members: CallMemberColumns, thread_of: EventColumn, first_us: int
) -> Iterator[str]:
    """Yield the events of all flows; those of each flow are in the order of time."""
    bounds = np.searchsorted(members.line, np.arange(len(members.lines) + 1)).tolist()
    start, end = members.start_us - first_us, members.end_us - first_us
    sends: defaultdict[_MessageKey, list[_FlowPoint]] = defaultdict(list)
    for at, line in enumerate(members.lines.tolist()):
        part = slice(bounds[at], bounds[at + 1])
        points = list(_iter_points(members.rank[part], thread_of[part], start[part]))
        call = int(order.columns["call"][line])
        kind = EventKind(int(order.calls.columns["kind"][call]))
        if kind.is_collective:
            arrived = sorted(points, key=lambda point: point[2])
            yield from _build_arrows("collective", kind.name.lower(), call, arrived)
        elif kind is EventKind.SEND:
            sends[_build_message_key(order, call, points[0][0], kind)].append(points[0])
        elif waiting := sends[_build_message_key(order, call, points[0][0], kind)]:
            # The arrow must end within the receive, which may have begun long before the send.
            send, over = waiting.pop(0), int(end[part][0])
            if send[2] < over:
                receive = (*points[0][:2], over - 1)
                yield from _build_arrows("message", "message", call, [send, receive])


def _iter_points(
    rank: EventColumn, thread: EventColumn, time_us: EventColumn
) -> Iterator[_FlowPoint]:
    return zip(rank.tolist(), thread.tolist(), time_us.tolist(), strict=True)


def _build_message_key(order: GlobalOrder, call: int, rank: int, kind: EventKind) -> _MessageKey:
    columns = order.calls.columns
    peer, sequence = int(columns["peer"][call]), int(columns["sequence"][call])
    ends = (rank, peer) if kind is EventKind.SEND else (peer, rank)
    return order.groups[int(columns["group"][call])], *ends, sequence


def _build_arrows(cat: str, name: str, flow: int, points: list[_FlowPoint]) -> Iterator[str]:
    if len(points) < 2:
        return
    last = len(points) - 1
    for at, (rank, thread, time) in enumerate(points):
        step = {0: "s", last: "f"}.get(at, "t")
        event = {"ph": step, "cat": cat, "name": name, "id": flow, "pid": rank, "tid": thread}
        bound = {"bp": "e"} if step == "f" else {}
        yield json.dumps(event | {"ts": time} | bound)


_BLOCK_OPERATORS = 4096


def format_trace(order: GlobalOrder, graph: int, first_position: int) -> Iterator[bytes]:
    """Yield a JSON object in pieces, with one event per line."""
    lines = np.concatenate([*iter_line_blocks(order, graph, len(order))])
    first_us, last_us = _find_time_span(order)
    operators = lines[order.columns["call"][lines] < 0]
    members = collect_call_members(order, lines, last_us)
    threads, of_operators, of_members = assign_threads(order, operators, members)
    epoch = {"iteration": order.iteration, "graph": graph, "epoch_us": first_us}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(epoch)},"traceEvents":[\n'.encode()
    yield ",\n".join(_format_metadata(threads)).encode()
    origin = TraceOrigin(first_position, first_us)
    yield from _format_operator_events(order, operators, of_operators, origin)
    for event in build_member_events(order, members, of_members, origin):
        yield f",\n{event}".encode()
    for event in build_flow_events(order, members, of_members, first_us):
        yield f",\n{event}".encode()
    yield b"\n]}\n"


def _find_time_span(order: GlobalOrder) -> tuple[int, int]:
    """Return the first start and the last end in all graphs, so that traces of several graphs
    align.
    """
    times = [order.columns[name] for name in ("start_us", "end_us")]
    times += [order.calls.members[name] for name in ("start_us", "end_us")]
    filled = [column for column in times if len(column)]
    return min(int(c.min()) for c in filled), max(int(c.max()) for c in filled)


def _format_metadata(threads: list[TraceThread]) -> Iterator[str]:
    """Yield the names and the sort positions of processes and threads."""
    for rank in sorted({thread.rank for thread in threads}):
        yield _format_metadata_event("process_name", rank, 0, name=f"rank {rank}")
        yield _format_metadata_event("process_sort_index", rank, 0, sort_index=rank)
    for thread in threads:
        yield _format_metadata_event("thread_name", thread.rank, thread.number, name=thread.name)
        yield _format_metadata_event(
            "thread_sort_index", thread.rank, thread.number, sort_index=thread.number
        )


def _format_metadata_event(what: str, rank: int, thread: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args})


def _format_operator_events(
    order: GlobalOrder, operators: EventColumn, thread_of: EventColumn, origin: TraceOrigin
) -> Iterator[bytes]:
    """Yield the slices of operators, many of them in one piece."""
    names = TextCells(map(json.dumps, order.names))
    for low in range(0, len(operators), _BLOCK_OPERATORS):
        lines = operators[low : low + _BLOCK_OPERATORS]
        columns = {name: column[lines] for name, column in order.columns.items()}
        start = columns["start_us"]
        pieces: list[CellPiece] = [
            b',\n{"ph":"X","cat":"operator","name":',
            names.select_texts(columns["name"]),
        ]
        for before, column in (
            (b',"pid":', columns["rank"]),
            (b',"tid":', thread_of[low : low + _BLOCK_OPERATORS]),
            (b',"ts":', start - origin.first_us),
            (b',"dur":', np.maximum(columns["end_us"] - start, 0)),
            (b',"args":{"position":', lines + origin.first_position),
            (b',"rank_position":', columns["position"]),
        ):
            pieces += (before, *format_digits(column))
        yield pack_rows(lay_out_rows([*pieces, b"}}"], len(lines)))

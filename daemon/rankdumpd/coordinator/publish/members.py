"""Members of the calls of a trace: when each arrived, how long it waited, for whom. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rankdump.contract.events import OPEN, Column, EventKind
from rankdumpd.coordinator.publish.blocks import rows
from rankdumpd.coordinator.values import GlobalOrder

_NAMED = 8
"""Ranks that a slice's name lists; its arguments have all."""


@dataclass(frozen=True, slots=True, eq=False)
class Members:
    """The members of some calls, call by call; every column has one element per member."""

    lines: Column
    """Of the order: those of the calls."""
    line: Column
    """Index into the lines above."""
    call: Column
    rank: Column
    stream: Column
    position: Column
    is_open: Column
    """It has not completed."""
    start_us: Column
    end_us: Column
    """As drawn: one microsecond later than the start at least, at the trace's end when open."""
    waited_us: Column
    """Until the last member came."""
    stall_us: Column


def members_of(order: GlobalOrder, lines: Column, last_us: int) -> Members:
    """Return the members of the calls among some lines of an order that ends at a time."""
    calls = order.calls
    call_of_line = order.columns["call"][lines]
    lines = lines[call_of_line >= 0]
    own = call_of_line[call_of_line >= 0]
    counts = calls.bounds[own + 1] - calls.bounds[own]
    starts = np.cumsum(counts) - counts
    at = np.arange(int(counts.sum())) + np.repeat(calls.bounds[own] - starts, counts)
    column = {name: values[at] for name, values in calls.members.items()}
    start = column["start_us"].astype("i8")
    is_open = column["end_position"] == OPEN
    end = np.where(is_open, last_us, column["end_us"].astype("i8"))
    last = np.maximum.reduceat(start, starts) if len(own) else start
    return Members(
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


def member_events(
    order: GlobalOrder, members: Members, thread_of: Column, at: tuple[int, int]
) -> Iterator[str]:
    """Yield a slice for each member, given its thread and the order's first position and time."""
    first_position, first_us = at
    heads: dict[int, tuple[str, str]] = {}
    columns = (
        *(members.line, members.call, members.rank, thread_of, members.start_us - first_us),
        *(members.end_us - members.start_us, members.position, members.waited_us),
        *(members.stall_us, members.is_open),
    )
    for row in rows(*columns):
        line, call, rank, thread, start, took, place, waited, stall, is_open = row
        if line not in heads:
            # Calls follow each other: no other head is needed any more.
            heads = {line: _head(order, call, int(members.lines[line]) + first_position)}
        head, args = heads[line]
        still = ',"complete":false' if is_open else ""
        yield (
            f'{{"ph":"X",{head},"pid":{rank},"tid":{thread},"ts":{start},"dur":{took},'
            f'"args":{{{args},"rank_position":{place},"waited_us":{waited},'
            f'"stall_us":{stall}{still}}}}}'
        )


def _head(order: GlobalOrder, call: int, position: int) -> tuple[str, str]:
    """Return category and name of a call's slices, and their arguments, without braces."""
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
        more = " ..." if len(entry.missing) > _NAMED else ""
        name += f" (waits for rank {' '.join(map(str, entry.missing[:_NAMED]))}{more})"
        args["missing"] = entry.missing
    if entry.kind in (EventKind.SEND, EventKind.RECV):
        args["peer"] = entry.peer
    cat = "collective" if entry.kind.collective else "message"
    return f'"cat":"{cat}","name":{json.dumps(name)}', json.dumps(args)[1:-1]

"""The merged order of an iteration as a trace that Perfetto and chrome://tracing open. Pure.

Ranks are processes, streams are threads; calls of a stream have threads of their own, for they
go on while operators run. Members of a collective are joined by a flow in the order in which they
arrived, a send and its receive by another. Times are microseconds since the iteration's first
event, on the coordinator's clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from rankdump.contract.events import Column
from rankdumpd.coordinator.publish.blocks import blocks
from rankdumpd.coordinator.publish.cells import Piece, Texts, dense, digits, laid_out
from rankdumpd.coordinator.publish.flows import flow_events
from rankdumpd.coordinator.publish.members import member_events, members_of
from rankdumpd.coordinator.publish.threads import Thread, threaded
from rankdumpd.coordinator.values import GlobalOrder

_BLOCK = 4096


def trace_lines(order: GlobalOrder, graph: int, first_position: int) -> Iterator[bytes]:
    """Yield a JSON object in pieces, an event a line."""
    lines = np.concatenate([*blocks(order, graph, len(order))])
    first_us, last_us = _span(order)
    operators = lines[order.columns["call"][lines] < 0]
    members = members_of(order, lines, last_us)
    threads, of_operators, of_members = threaded(order, operators, members)
    epoch = {"iteration": order.iteration, "graph": graph, "epoch_us": first_us}
    yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(epoch)},"traceEvents":[\n'.encode()
    yield ",\n".join(_described(threads)).encode()
    at = (first_position, first_us)
    yield from _operator_events(order, operators, of_operators, at)
    for event in member_events(order, members, of_members, at):
        yield f",\n{event}".encode()
    for event in flow_events(order, members, of_members, first_us):
        yield f",\n{event}".encode()
    yield b"\n]}\n"


def _span(order: GlobalOrder) -> tuple[int, int]:
    """Return the first start and the last end of all graphs, so that their traces go together."""
    times = [order.columns[name] for name in ("start_us", "end_us")]
    times += [order.calls.members[name] for name in ("start_us", "end_us")]
    filled = [column for column in times if len(column)]
    return min(int(c.min()) for c in filled), max(int(c.max()) for c in filled)


def _described(threads: list[Thread]) -> Iterator[str]:
    """Yield the names and places of processes and threads."""
    for rank in sorted({thread.rank for thread in threads}):
        yield _about("process_name", rank, 0, name=f"rank {rank}")
        yield _about("process_sort_index", rank, 0, sort_index=rank)
    for thread in threads:
        yield _about("thread_name", thread.rank, thread.number, name=thread.name)
        yield _about("thread_sort_index", thread.rank, thread.number, sort_index=thread.number)


def _about(what: str, rank: int, thread: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args})


def _operator_events(
    order: GlobalOrder, operators: Column, thread_of: Column, at: tuple[int, int]
) -> Iterator[bytes]:
    first_position, first_us = at
    names = Texts(map(json.dumps, order.names))
    for low in range(0, len(operators), _BLOCK):
        lines = operators[low : low + _BLOCK]
        columns = {name: column[lines] for name, column in order.columns.items()}
        start = columns["start_us"]
        pieces: list[Piece] = [
            b',\n{"ph":"X","cat":"operator","name":',
            names.at(columns["name"]),
        ]
        for before, column in (
            (b',"pid":', columns["rank"]),
            (b',"tid":', thread_of[low : low + _BLOCK]),
            (b',"ts":', start - first_us),
            (b',"dur":', np.maximum(columns["end_us"] - start, 0)),
            (b',"args":{"position":', lines + first_position),
            (b',"rank_position":', columns["position"]),
        ):
            pieces += (before, *digits(column))
        yield dense(laid_out([*pieces, b"}}"], len(lines)))

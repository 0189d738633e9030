"""Trace of an iteration: it follows every rule of the format, and describes the calls."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.merged_order import merged
from support.trace_schema import checked_trace, flows_of, slices_of

from rankdump._core.events import OPEN_END_POSITION, EventKind, ProcessGroup, RankEvent
from rankdump._core.execution_order import (
    GLOBAL_ORDER_FOLDER,
    make_order_file_name,
    make_trace_file_name,
)
from rankdumpd.coordinator.fleet_views import GlobalOrder
from rankdumpd.coordinator.publish.order_trace import (
    assign_nested_lanes,
    assign_separate_lanes,
    format_trace,
)
from rankdumpd.coordinator.publish.publisher import OrderPublisher
from rankdumpd.coordinator.publish.tree_files import write_whole_file

EPOCH_US = 1_700_000_000_000_000
WORLD = ProcessGroup("world", (0, 1, 2))


def traced(folder: Path, order: GlobalOrder, graph: int = 0) -> list[dict[str, Any]]:
    """The checked events of a graph's trace."""
    path = folder / make_trace_file_name(3)
    write_whole_file(path, format_trace(order, graph, 40))
    return checked_trace(path)


def operator(at: int, start: int, end: int, *, name: str = "Add", graph: int = 0, stream: int = 0):
    span = (EPOCH_US + start, EPOCH_US + end)
    return RankEvent(graph, 3, at, at, name, EventKind.OPERATOR, *span, stream=stream)


def call(
    at: int, start: int, end: int, *, kind: EventKind = EventKind.ALL_REDUCE, sequence: int = 1,
    peer: int = -1, end_position: int | None = None, stream: int = 0,
) -> RankEvent:  # fmt: skip
    return RankEvent(
        0, 3, at, at if end_position is None else end_position, kind.name.title(), kind,
        EPOCH_US + start, EPOCH_US + end, group="world", sequence=sequence, peer=peer,
        element_count=8, dtype="float32", stall_us=5, stream=stream,
    )  # fmt: skip


def test_trace_joins_members_of_a_collective_by_arrival(tmp_path) -> None:
    """Ranks are processes, streams threads; who came early says how long it waited."""
    events = {
        0: [operator(1, 0, 10, name='a "b"'), call(2, 10, 95)],
        1: [operator(1, 4, 90), call(2, 90, 95)],
        2: [operator(1, 2, 30, stream=7), call(2, 30, 95)],
    }
    trace = traced(tmp_path, merged(events, (WORLD,), 3))
    members = {event["pid"]: event for event in slices_of(trace, "collective")}
    assert {rank: event["args"]["waited_us"] for rank, event in members.items()} == {
        0: 80, 1: 0, 2: 60,
    }  # fmt: skip
    assert members[1]["args"] | {
        "kind": "all_reduce", "group": "world", "sequence": 1, "element_count": 8,
        "dtype": "float32", "rank_position": 2, "stall_us": 5, "position": 43,
    } == members[1]["args"]  # fmt: skip
    (flow,) = flows_of(trace)
    assert [(event["ph"], event["pid"], event["ts"]) for event in flow] == [
        ("s", 0, 10),
        ("t", 2, 30),
        ("f", 1, 90),
    ]
    assert {event["name"] for event in slices_of(trace, "operator")} == {'a "b"', "Add"}
    threads = {
        (event["pid"], event["args"]["name"]) for event in trace if event["name"] == "thread_name"
    }
    assert threads >= {(0, "stream 0"), (0, "stream 0: calls"), (2, "stream 7")}


def test_trace_marks_missing_and_hanging_members(tmp_path) -> None:
    """A call that misses a member says whom; one that hangs is drawn until the end."""
    events = {
        0: [call(1, 10, 10, end_position=OPEN_END_POSITION)],
        1: [call(1, 20, 25)],
        2: [operator(1, 0, 400)],
    }
    trace = traced(tmp_path, merged(events, (WORLD,), 3))
    members = slices_of(trace, "collective")
    assert {event["name"] for event in members} == {"all_reduce All_Reduce (waits for rank 2)"}
    assert [event["args"]["missing"] for event in members] == [[2], [2]]
    hanging, complete = members
    assert hanging["args"]["complete"] is False
    assert hanging["ts"] + hanging["dur"] == 400
    assert "complete" not in complete["args"]


def test_trace_draws_a_message_from_send_to_end_of_receive(tmp_path) -> None:
    """The receive may have begun long before; a lone one has no arrow."""
    events = {
        0: [
            call(1, 50, 60, kind=EventKind.SEND, peer=1),
            call(2, 70, 80, kind=EventKind.SEND, peer=1, sequence=9),
        ],
        1: [
            operator(1, 0, 5),
            call(2, 5, 65, kind=EventKind.RECV, peer=0),
            call(3, 65, 66, kind=EventKind.RECV, peer=2, sequence=9),
        ],
    }
    trace = traced(tmp_path, merged(events, (WORLD,), 3))
    (flow,) = flows_of(trace)
    assert [(event["ph"], event["pid"], event["ts"]) for event in flow] == [
        ("s", 0, 50),
        ("f", 1, 64),
    ]
    peers = [(event["pid"], event["args"]["peer"]) for event in slices_of(trace, "message")]
    assert sorted(peers) == [(0, 1), (0, 1), (1, 0), (1, 2)]


def test_traces_of_graphs_share_one_start_time(tmp_path) -> None:
    """Times count from the iteration's first event, in whatever graph it was."""
    order = merged({0: [operator(1, 0, 5), operator(2, 100, 110, graph=6)]}, (), 3)
    assert [event["ts"] for event in slices_of(traced(tmp_path, order, 6), "operator")] == [100]
    offsets, problem = OrderPublisher().append(order, job_id="j", root=str(tmp_path), offsets=None)
    assert (problem, offsets is None) == ("", False)
    for graph in (0, 6):
        folder = tmp_path / GLOBAL_ORDER_FOLDER / make_order_file_name(graph, "trace")
        assert checked_trace(folder / make_trace_file_name(3))


def test_trace_of_a_large_iteration_is_skipped_with_one_log_line(tmp_path, caplog) -> None:
    """Viewers do not open more; the files of lines are whole."""
    publisher = OrderPublisher(trace_events=1)
    offsets = None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            order = merged({0: [operator(1, 0, 5), operator(2, 5, 6)]}, (), 3)
            offsets, _ = publisher.append(order, job_id="j", root=str(tmp_path), offsets=offsets)
    assert not list((tmp_path / GLOBAL_ORDER_FOLDER).glob("*.trace"))
    assert caplog.text.count("no trace is written of such iterations") == 1
    assert offsets is not None
    assert offsets.position == 6


TIMES = st.integers(0, 60)
SPANS = st.lists(st.tuples(TIMES, TIMES, st.integers(0, 1)), max_size=30)


@given(SPANS)
def test_trace_lanes_separate_overlapping_slices(spans) -> None:
    """In one lane of calls nothing overlaps; of operators nothing but what nests."""
    start, length, track = (np.array([span[at] for span in spans], "i8") for at in range(3))
    end = start + length
    for lanes, nests in (
        (assign_separate_lanes(track, start, end), False),
        (assign_nested_lanes(track, start, end), True),
    ):
        for lane in {*zip(track.tolist(), lanes.tolist(), strict=True)}:
            own = [
                (low, high)
                for low, high, *where in zip(start, end, track, lanes, strict=True)
                if tuple(where) == lane
            ]
            for one in own:
                for other in own:
                    if one < other:
                        inside = nests and other[1] <= one[1]
                        same_start = one[0] == other[0] and nests
                        assert other[0] >= one[1] or inside or same_start


@st.composite
def programs(draw: st.DrawFn) -> dict[int, list[RankEvent]]:
    """Ranks that run operators and calls on two streams, some of them asynchronous or open."""
    events: dict[int, list[RankEvent]] = {}
    for rank in (0, 1, 2):
        clock, of = draw(st.integers(0, 9)), []
        for at in range(1, draw(st.integers(2, 12))):
            took, stream = draw(st.integers(0, 30)), draw(st.integers(0, 1))
            choice = draw(st.integers(0, 5))
            if choice < 3:
                of.append(operator(at, clock, clock + took, stream=stream, graph=choice % 2))
            else:
                kind = (EventKind.BARRIER, EventKind.SEND, EventKind.RECV)[choice - 3]
                ends = draw(st.sampled_from([at, at + 2, OPEN_END_POSITION]))
                over = clock if ends == OPEN_END_POSITION else clock + took
                peer = -1 if choice == 3 else (rank + 1) % 3
                of.append(
                    call(
                        at,
                        clock,
                        over,
                        kind=kind,
                        sequence=at,
                        peer=peer,
                        end_position=ends,
                        stream=stream,
                    )
                )
            clock += draw(st.integers(0, took))
        events[rank] = of
    return events


@settings(deadline=None)
@given(programs())
def test_trace_of_any_program_follows_the_rules(tmp_path_factory, program) -> None:
    """Whatever overlaps, hangs or goes missing: slices nest, flows are bound, threads are named."""
    order = merged(program, (WORLD,), 3)
    folder = tmp_path_factory.mktemp("trace")
    for graph in {event.graph for of in program.values() for event in of if not event.group}:
        events = traced(folder, order, graph)
        drawn = sum(event["ph"] == "X" for event in events)
        lines = [entry for entry in order.entries() if entry.graph == graph]
        assert drawn == sum(len(entry.ranks) for entry in lines)
        assert all(event["pid"] in (0, 1, 2) for event in events)


@pytest.mark.parametrize("size", [1, 3])
def test_trace_is_independent_of_block_size(tmp_path, monkeypatch, size) -> None:
    """However many events are written at once, the trace is the same."""
    order = merged({rank: [operator(n, n, n + 1) for n in range(1, 9)] for rank in (0, 1)}, (), 3)
    whole = b"".join(format_trace(order, 0, 0))
    monkeypatch.setattr("rankdumpd.coordinator.publish.order_trace._BLOCK_OPERATORS", size)
    monkeypatch.setattr("rankdumpd.coordinator.publish.order_lines._SCAN_ROWS", size)
    assert b"".join(format_trace(order, 0, 0)) == whole

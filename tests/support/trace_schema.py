"""Check of a trace against the trace event format, as Perfetto requires it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

NAMES = {
    "process_name": "name",
    "process_sort_index": "sort_index",
    "thread_name": "name",
    "thread_sort_index": "sort_index",
}
FLOW = {"s", "t", "f"}


def checked_trace(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace after an assertion for every rule that it could break."""
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert isinstance(trace["otherData"]["epoch_us"], int)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", *FLOW}
    for event in events:
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
    _check_metadata(events)
    slices = _checked_slices(events)
    _check_flows(events, slices)
    return events


def slices_of(events: list[dict[str, Any]], cat: str) -> list[dict[str, Any]]:
    """Return the complete events of a category."""
    return [event for event in events if event["ph"] == "X" and event["cat"] == cat]


def flows_of(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the events of each flow, in the order of the file."""
    flows = defaultdict(list)
    for event in events:
        if event["ph"] in FLOW:
            flows[event["cat"], event["name"], event["id"]].append(event)
    return list(flows.values())


def _check_metadata(events: list[dict[str, Any]]) -> None:
    """Metadata is first, once per process and thread, and covers everything drawn."""
    kinds = [event["ph"] == "M" for event in events]
    assert kinds == sorted(kinds, reverse=True)
    said = defaultdict(set)
    for event in (event for event in events if event["ph"] == "M"):
        assert list(event["args"]) == [NAMES[event["name"]]]
        thread = event["tid"] if event["name"].startswith("thread") else None
        assert (event["pid"], thread) not in said[event["name"]]
        said[event["name"]].add((event["pid"], thread))
    drawn = {(event["pid"], event["tid"]) for event in events if event["ph"] != "M"}
    assert all(tid > 0 for _, tid in drawn)
    assert said["thread_name"] == said["thread_sort_index"] == drawn
    assert said["process_name"] == said["process_sort_index"] == {(pid, None) for pid, _ in drawn}


def _checked_slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Slices of one thread nest or follow each other, and each has a time of its own."""
    threads = defaultdict(list)
    for event in (event for event in events if event["ph"] == "X"):
        assert type(event["ts"]) is int
        assert type(event["dur"]) is int
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert isinstance(event["args"], dict)
        threads[event["pid"], event["tid"]].append(event)
    for slices in threads.values():
        around: list[int] = []
        for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1] <= event["ts"]:
                around.pop()
            assert not around or event["ts"] + event["dur"] <= around[-1]
            around.append(event["ts"] + event["dur"])
    return threads


def _check_flows(
    events: list[dict[str, Any]], threads: dict[tuple[int, int], list[dict[str, Any]]]
) -> None:
    """A flow starts once, ends once, never goes back in time, and is bound to one slice each."""
    for flow in flows_of(events):
        assert [event["ph"] for event in flow] == ["s", *"t" * (len(flow) - 2), "f"]
        assert flow[-1]["bp"] == "e"
        times = [event["ts"] for event in flow]
        assert times == sorted(times)
        for event in flow:
            around = [
                piece
                for piece in threads[event["pid"], event["tid"]]
                if piece["ts"] <= event["ts"] < piece["ts"] + piece["dur"]
            ]
            assert len(around) == 1
            assert around[0]["cat"] == event["cat"]

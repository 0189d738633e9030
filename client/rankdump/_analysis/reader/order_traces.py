"""Traces of the merged order for Perfetto and chrome://tracing: the files that the coordinator has
published, parts of these files, and traces made from entries, for orders without such files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from rankdump._analysis.reader.coordinator_files import PublishedOrder, list_order_files
from rankdump._analysis.reader.file_errors import named_errors
from rankdump._core.events import EventKind
from rankdump._core.execution_order import make_trace_file_name
from rankdump._core.status import OrderEntry
from rankdump.errors import CorruptedError

_HEAD = b'{"displayTimeUnit":'
_SLICE, _METADATA = "X", "M"
_SECOND_LANE = 1 << 20
"""Added to the number of a stream for its collectives and messages, so that they are drawn beside
it.
"""


_ArrowEnd: TypeAlias = "tuple[int, int, int]"
"""Rank, thread and time of one end of an arrow."""


class PublishedTrace(NamedTuple):
    """Trace of one iteration, as the coordinator wrote it."""

    path: Path
    graph: int
    attempt: int
    size_bytes: int


class TracePart(NamedTuple):
    """Selection of a part of a trace."""

    rank: int | None = None
    """Rank; None for all ranks."""
    first: int | None = None
    """First position in the order; None for the whole iteration."""
    last: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the part is the whole trace."""
        return self == TracePart()

    def keeps(self, rank: int, position: int) -> bool:
        """Return whether a slice belongs to the part."""
        low = self.first is None or position >= self.first
        high = self.last is None or position <= self.last
        return self.rank in (None, rank) and low and high


def list_traces(root: Path, order: PublishedOrder, iteration: int) -> list[PublishedTrace]:
    """Return the published traces of an iteration, one for each graph and attempt.

    A file that is a link out of the tree is left out.
    """
    found: list[PublishedTrace] = []
    for path, name in list_order_files(order):
        trace = path.with_suffix(".trace") / make_trace_file_name(iteration)
        if trace.resolve().is_relative_to(root.resolve()):
            with suppress(OSError):
                size = trace.stat().st_size
                found.append(PublishedTrace(trace, name.graph, name.attempt, size))
    return found


def iter_trace_part(path: Path, part: TracePart) -> Iterator[bytes]:
    """Yield a part of a published trace as lines: the first line, a line for each event, the last
    line.

    An arrow is kept if all slices that it connects are kept. CorruptedError names the invalid line.
    """
    lines = _read_lines(path)
    _, head = next(lines, (1, b""))
    if not head.startswith(_HEAD):
        raise CorruptedError(f"{path}, line 1: not the begin of a trace")
    yield head
    kept = _select_events(path, lines, part)
    for number, line in enumerate(kept):
        yield b",\n" + line if number else line
    yield b"\n]}\n"


def _select_events(
    path: Path, lines: Iterator[tuple[int, bytes]], part: TracePart
) -> Iterator[bytes]:
    ends: set[_ArrowEnd] = set()
    arrow: list[bytes] = []
    for number, line in lines:
        if line == b"]}\n":
            return
        line = line.removesuffix(b"\n").removesuffix(b",")
        event = _parse_event(path, number, line)
        if event["ph"] in (_SLICE, _METADATA):
            if _keeps_event(event, part, ends):
                yield line
            continue
        # The events of an arrow are consecutive, from `s` over `t` to `f`.
        arrow = [] if event["ph"] == "s" else arrow
        if (event["pid"], event["tid"], event["ts"]) in ends and (arrow or event["ph"] == "s"):
            arrow.append(line)
        else:
            arrow = []
        if event["ph"] == "f":
            yield from arrow


def _read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with named_errors(path), path.open("rb") as file:
        yield from enumerate(file, 1)


def _parse_event(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        event = json.loads(line)
        _ = event["pid"] + event["tid"] + (0 if event["ph"] == _METADATA else event["ts"])
        if event["ph"] == _SLICE:
            _ = event["dur"] + event["args"]["position"]
        return event
    except (ValueError, RecursionError, LookupError, TypeError) as error:
        text = f"{type(error).__name__} {error}"
        raise CorruptedError(f"{path}, line {number}: no event of a trace: {text}") from None


def _keeps_event(event: dict[str, Any], part: TracePart, ends: set[_ArrowEnd]) -> bool:
    """Return whether an event belongs to the part; remember where arrows may begin and end."""
    rank, thread = event["pid"], event["tid"]
    if event["ph"] == _METADATA:
        return part.rank in (None, rank)
    keeps = part.keeps(rank, event["args"]["position"])
    if keeps and event.get("cat") != "operator":
        start = event["ts"]
        # An arrow ends within the slice of a receive, just before the end of the slice.
        ends.update(((rank, thread, start), (rank, thread, start + event["dur"] - 1)))
    return keeps


def iter_entry_trace(
    entries: Iterable[OrderEntry], part: TracePart, iteration: int
) -> Iterator[bytes]:
    """Yield a trace of entries of the order. Only their first start and last end are known, so the
    slices of all ranks that took part have these times.
    """
    threads: set[tuple[int, int]] = set()
    before, first_us = b"", None
    for entry in entries:
        if first_us is None:
            first_us = entry.start_us
            facts = {"iteration": iteration, "epoch_us": first_us, "from": "entries of the order"}
            yield _HEAD + f'"ms","otherData":{json.dumps(facts)},"traceEvents":[\n'.encode()
        for event in _make_events(entry, part, first_us, threads):
            yield before + json.dumps(event).encode()
            before = b",\n"
    yield b"\n]}\n"


def _make_events(
    entry: OrderEntry, part: TracePart, first_us: int, threads: set[tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yield the slices of an entry; before the first slice of a thread, the names of the thread."""
    kind = entry.kind.name.lower()
    is_call = entry.kind is not EventKind.OPERATOR
    args: dict[str, Any] = {"position": entry.position}
    if is_call:
        args |= {"kind": kind, "group": entry.group, "sequence": entry.sequence}
        args |= {"missing": entry.missing} if entry.missing else {}
    streams = entry.streams or (0,) * len(entry.ranks)
    for rank, stream in zip(entry.ranks, streams, strict=False):
        if not part.keeps(rank, entry.position):
            continue
        thread = stream + 1 + _SECOND_LANE * is_call
        place = {"pid": rank, "tid": thread}
        if (rank, thread) not in threads:
            threads.add((rank, thread))
            names = {"process_name": f"rank {rank}"}
            names["thread_name"] = f"stream {stream}{': calls' if is_call else ''}"
            for what, name in names.items():
                yield {"ph": _METADATA, "name": what, **place, "args": {"name": name}}
        yield {
            "ph": _SLICE,
            "cat": "call" if is_call else "operator",
            "name": f"{kind} {entry.name}" if is_call else entry.name,
            **place,
            "ts": entry.start_us - first_us,
            "dur": max(1, entry.end_us - entry.start_us),
            "args": args,
        }

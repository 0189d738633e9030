"""Trace of an iteration of the order to download, or of a part of it: the published file as it is,
else lines of that file or entries of the order, up to some megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.reader.coordinator_files import PublishedOrder, read_order
from rankdump._analysis.reader.order_traces import (
    PublishedTrace,
    TracePart,
    iter_entry_trace,
    iter_trace_part,
    list_traces,
)
from rankdump._core.plan import IterationSelection
from rankdump._core.status import OrderEntry
from rankdump._core.units import format_bytes
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import AbsentPageError, PageParameters
from rankdump.errors import CorruptedError, ExhaustedError

MAX_PART_BYTES = 32 << 20
"""Of a part, which is made in memory; a whole published file is sent as it is read."""
_MAX_TRACES = 100


class TraceRequest(NamedTuple):
    """Which trace, and the part of it."""

    iteration: int
    trace: int
    """Number among the published traces of the iteration."""
    part: TracePart


class TraceFile(NamedTuple):
    """A trace to download."""

    name: str
    path: Path | None
    """The published file; None for a part."""
    body: bytes


class TraceLink(NamedTuple):
    """A trace that the page of the order names."""

    number: int
    graph: int | None
    """None for one that is made of the entries of all graphs."""
    attempt: int | None
    size_bytes: int | None


def parse_trace(parameters: PageParameters) -> TraceRequest:
    """Return the request."""
    part = TracePart(
        parameters.read_number("rank"),
        parameters.read_number("first"),
        parameters.read_number("last"),
    )
    iteration = parameters.read_number("iteration") or 0
    return TraceRequest(iteration, parameters.read_number("trace") or 0, part)


def open_order(source: DumpSource) -> PublishedOrder:
    """Return the order of the chosen job; AbsentPageError where the tree has none."""
    try:
        return source.keep("order", lambda: read_order(source.root, job_id=source.part.job))
    except CorruptedError as error:
        raise AbsentPageError(str(error)) from None


def iter_entries(source: DumpSource, iteration: int) -> Iterator[OrderEntry]:
    """Return the entries of the chosen attempt in an iteration; raises what `open_order` does."""
    chosen = IterationSelection(str(iteration), ((iteration, iteration),))
    return open_order(source).entries(iterations=chosen, attempt=source.part.attempt)


def list_trace_links(source: DumpSource, iteration: int) -> tuple[TraceLink, ...]:
    """Return the traces of an iteration; where none is published, one that is made of entries."""
    found = _list_traces(source, iteration)[:_MAX_TRACES]
    made = TraceLink(0, None, None, None)
    return tuple(
        TraceLink(number, each.graph, each.attempt, each.size_bytes)
        for number, each in enumerate(found)
    ) or (made,)


def _list_traces(source: DumpSource, iteration: int) -> Sequence[PublishedTrace]:
    attempt = source.part.attempt
    traces = list_traces(source.root, open_order(source), iteration)
    return [each for each in traces if attempt in (None, each.attempt)]


def make_trace(source: DumpSource, request: TraceRequest) -> TraceFile:
    """Return a trace; AbsentPageError where the order has no such entries, ExhaustedError for a
    part that is too large.
    """
    traces = _list_traces(source, request.iteration)
    if request.trace >= max(1, len(traces)):
        raise AbsentPageError(
            f"iteration {request.iteration} has no trace {request.trace}: it has {len(traces)}"
        )
    part = request.part
    names = ("rank", part.rank), ("from", part.first), ("to", part.last)
    chosen = "".join(f"_{name}_{value}" for name, value in names if value is not None)
    name = f"order_iteration_{request.iteration}{chosen}.json"
    if not traces:
        return TraceFile(name, None, _make_entry_trace(source, request))
    path = traces[request.trace].path
    if part.is_whole:
        return TraceFile(name, path, b"")
    advice = "the whole iteration can be downloaded, or less of it"
    return TraceFile(name, None, _join(iter_trace_part(path, part), advice))


def _make_entry_trace(source: DumpSource, request: TraceRequest) -> bytes:
    iteration = request.iteration
    entries = iter_entries(source, iteration)
    first = next(entries, None)
    if first is None:
        raise AbsentPageError(f"the order has no iteration {iteration}")
    body = iter_entry_trace(chain((first,), entries), request.part, iteration)
    return _join(body, f"rankdump order {source.root} --iteration {iteration} --json has all of it")


def _join(pieces: Iterable[bytes], advice: str) -> bytes:
    made = bytearray()
    for piece in pieces:
        made += piece
        if len(made) > MAX_PART_BYTES:
            limit = format_bytes(MAX_PART_BYTES)
            raise ExhaustedError(f"this part of the trace has more than {limit}: {advice}")
    return bytes(made)

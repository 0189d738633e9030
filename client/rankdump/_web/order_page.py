"""Page of the merged order of all ranks around one entry, drawn as a timeline with a bar on the
lane of each rank that took part; and the download of an iteration's trace, or of a part of it. A
whole trace is the published file; a part consists of lines of that file, or is made from entries of
the order, up to some megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from rankdump._analysis.reader.coordinator_files import PublishedOrder, read_hints, read_order
from rankdump._analysis.reader.order_traces import (
    PublishedTrace,
    TracePart,
    iter_entry_trace,
    iter_trace_part,
    list_traces,
)
from rankdump._core.events import EventKind, Finding
from rankdump._core.number_ranges import ranges
from rankdump._core.plan import IterationSelection
from rankdump._core.scope_names import format_scope_name
from rankdump._core.status import OrderEntry
from rankdump._core.units import format_bytes
from rankdump._web.dump_source import DumpSource
from rankdump._web.page_kinds import AbsentPageError, PageKind, PageParameters
from rankdump.errors import CorruptedError, ExhaustedError

MAX_PART_BYTES = 32 << 20
"""Largest size in bytes of a part, which is made in memory; a whole published file is sent while it
is read.
"""
_MAX_TRACES = 100


class TraceRequest(NamedTuple):
    """Selection of a trace, and of a part of it."""

    iteration: int
    trace: int
    """Number of the trace among the published traces of the iteration."""
    part: TracePart


class TraceFile(NamedTuple):
    """A trace to download."""

    name: str
    path: Path | None
    """The published file; None for a part."""
    body: bytes


class TraceLink(NamedTuple):
    """Link from the page of the order to a trace."""

    number: int
    graph: int | None
    """Graph of the trace; None for a trace that is made from the entries of all graphs."""
    attempt: int | None
    size_bytes: int | None


def parse_trace(parameters: PageParameters) -> TraceRequest:
    """Return the request that the parameters describe."""
    part = TracePart(
        parameters.read_number("rank"),
        parameters.read_number("first"),
        parameters.read_number("last"),
    )
    iteration = parameters.read_number("iteration") or 0
    return TraceRequest(iteration, parameters.read_number("trace") or 0, part)


def open_order(source: DumpSource) -> PublishedOrder:
    """Return the order of the chosen job; AbsentPageError if the tree has none."""
    try:
        return source.keep("order", lambda: read_order(source.root, job_id=source.part.job))
    except CorruptedError as error:
        raise AbsentPageError(str(error)) from None


def iter_entries(source: DumpSource, iteration: int) -> Iterator[OrderEntry]:
    """Yield the entries of the chosen attempt in an iteration; raises the same errors as
    `open_order`.
    """
    chosen = IterationSelection(str(iteration), ((iteration, iteration),))
    return open_order(source).entries(iterations=chosen, attempt=source.part.attempt)


def list_trace_links(source: DumpSource, iteration: int) -> tuple[TraceLink, ...]:
    """Return links to the traces of an iteration; if none is published, to one that is made from
    entries.
    """
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
    """Return a trace; AbsentPageError if the order has no such entries, ExhaustedError for a part
    that is too large.
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


_AROUND = 40
"""Number of entries that are shown before and after the chosen one."""
_MAX_ENTRIES = 200_000
"""Largest number of entries of one iteration that are read."""
_MAX_LANES = 24
_MAX_FINDINGS = 50
WIDTH, LANE_HEIGHT, LEFT = 1200.0, 22.0, 64.0
"""Sizes of the drawing in its own units."""


class OrderRequest(NamedTuple):
    """Selection of a part of the order."""

    iteration: int | None
    around: int | None
    """Position of the entry in the middle; None for a suitable one."""
    collectives: bool
    """Whether only collectives are listed."""


class OrderRow(NamedTuple):
    """One entry of the order."""

    position: int
    iteration: int
    name: str
    short_name: str
    kind: str
    is_collective: bool
    ranks: str
    missing: str
    group: str
    sequence: int
    start_ms: float
    """Start of the entry in milliseconds since the first listed entry."""
    took_ms: float
    is_chosen: bool


class TimelineBar(NamedTuple):
    """One bar of the timeline."""

    x: float
    y: float
    width: float
    row: OrderRow


@dataclass(frozen=True, slots=True)
class OrderPage:
    """Content of the page."""

    request: OrderRequest
    iteration: int
    entry_count: int
    """Number of entries in the iteration."""
    rows: tuple[OrderRow, ...]
    bars: tuple[TimelineBar, ...]
    lanes: tuple[int, ...]
    """Rank of each lane."""
    span_ms: float
    previous_around: int | None
    next_around: int | None
    previous_iteration: int | None
    next_iteration: int | None
    findings: tuple[Finding, ...]
    late: tuple[str, ...]
    """Sentences about ranks that came late, from the hints."""
    traces: tuple[TraceLink, ...]
    """Links to traces of the iteration for download."""
    notes: tuple[str, ...]


def parse_order(parameters: PageParameters) -> OrderRequest:
    """Return the request that the parameters describe."""
    return OrderRequest(
        iteration=parameters.read_number("iteration"),
        around=parameters.read_number("around"),
        collectives=parameters.read_flag("collectives"),
    )


def build_order(source: DumpSource, request: OrderRequest) -> OrderPage:
    """Return a part of the order; AbsentPageError if the tree has none."""
    order = open_order(source)
    iterations = source.keep("order iterations", lambda: _list_iterations(source, order))
    iteration = _choose_iteration(source, order, iterations, request)
    entries = source.keep_latest(
        "order", iteration, lambda: list(islice(iter_entries(source, iteration), _MAX_ENTRIES))
    )
    if not entries:
        raise AbsentPageError(f"the order has no iteration {iteration}")
    kept = [each for each in entries if each.kind.is_collective or not request.collectives]
    middle = _find_middle(kept, order, request)
    first = max(0, middle - _AROUND)
    shown = kept[first : middle + _AROUND + 1]
    chosen = kept[middle].position if kept else -1
    rows = _make_rows(shown, chosen)
    lanes = tuple(sorted({rank for each in shown for rank in each.ranks})[:_MAX_LANES])
    span_ms = max((row.start_ms + row.took_ms for row in rows), default=0.0)
    earlier = [each for each in iterations if each < iteration]
    later = [each for each in iterations if each > iteration]
    return OrderPage(
        *(request, iteration, len(entries), rows),
        bars=_draw_bars(shown, rows, lanes, span_ms),
        lanes=lanes,
        span_ms=span_ms,
        previous_around=kept[max(0, first - _AROUND)].position if first else None,
        next_around=kept[min(len(kept) - 1, middle + 2 * _AROUND)].position
        if middle + _AROUND + 1 < len(kept)
        else None,
        previous_iteration=earlier[-1] if earlier else None,
        next_iteration=later[0] if later else None,
        findings=_list_findings(source, order)[:_MAX_FINDINGS],
        late=_describe_late(source),
        traces=list_trace_links(source, iteration),
        notes=order.notes,
    )


def _list_iterations(source: DumpSource, order: PublishedOrder) -> list[int]:
    """Return the iterations that the tree has, or the end of the order."""
    rows = source.get_rows("SELECT DISTINCT iteration FROM iterations ORDER BY iteration")
    known = {row["iteration"] for row in rows if row["iteration"] is not None}
    return sorted(known | {each.iteration for each in order.read_last_entries(source.part.attempt)})


def _list_findings(source: DumpSource, order: PublishedOrder) -> tuple[Finding, ...]:
    attempt = source.part.attempt
    return tuple(each for each in order.findings if attempt in (None, each.attempt))


def _choose_iteration(
    source: DumpSource, order: PublishedOrder, iterations: Sequence[int], request: OrderRequest
) -> int:
    if request.iteration is not None:
        return request.iteration
    findings = _list_findings(source, order)
    if findings:
        return findings[0].iteration
    first = next(order.entries(attempt=source.part.attempt), None)
    if first is not None:
        return first.iteration
    return iterations[0] if iterations else 0


def _find_middle(
    entries: Sequence[OrderEntry], order: PublishedOrder, request: OrderRequest
) -> int:
    """Return the index of the requested entry; without a request, that of a finding or of the first
    collective.
    """
    if request.around is not None:
        return next(
            (at for at, each in enumerate(entries) if each.position >= request.around),
            max(0, len(entries) - 1),
        )
    named = {(each.iteration, each.name) for each in order.findings}
    found = [at for at, each in enumerate(entries) if (each.iteration, each.name) in named]
    found += [at for at, each in enumerate(entries) if each.kind.is_collective]
    return found[0] if found else 0


def _make_rows(entries: Sequence[OrderEntry], chosen: int) -> tuple[OrderRow, ...]:
    first_us = min((each.start_us for each in entries), default=0)
    return tuple(
        OrderRow(
            *(each.position, each.iteration, each.name, format_scope_name(each.name)),
            "" if each.kind is EventKind.OPERATOR else each.kind.name.lower(),
            *(each.kind.is_collective, ranges(each.ranks), ranges(each.missing)),
            *(each.group, each.sequence, (each.start_us - first_us) / 1000),
            *((each.end_us - each.start_us) / 1000, each.position == chosen),
        )
        for each in entries
    )


def _draw_bars(
    entries: Sequence[OrderEntry], rows: Sequence[OrderRow], lanes: Sequence[int], span_ms: float
) -> tuple[TimelineBar, ...]:
    scale = (WIDTH - LEFT) / span_ms if span_ms > 0 else 0.0
    lane_of = {rank: at for at, rank in enumerate(lanes)}
    return tuple(
        TimelineBar(
            round(LEFT + row.start_ms * scale, 2),
            lane_of[rank] * LANE_HEIGHT,
            round(max(1.5, row.took_ms * scale), 2),
            row,
        )
        for entry, row in zip(entries, rows, strict=True)
        for rank in entry.ranks
        if rank in lane_of
    )


def _describe_late(source: DumpSource) -> tuple[str, ...]:
    try:
        hints = read_hints(source.root, source.part.job)
        return tuple(hint.reason for hint in hints)[:_MAX_FINDINGS]
    except CorruptedError:
        return ()


ORDER = PageKind("/order", "order.html", "Order", parse_order, build_order, has_attempts=True)

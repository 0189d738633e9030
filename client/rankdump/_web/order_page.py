"""Merged order of all ranks around one entry, drawn as a timeline: a bar on the lane of each rank
that took part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from rankdump._analysis.reader.coordinator_files import PublishedOrder, read_hints
from rankdump._analysis.reader.query import ranges
from rankdump._core.events import EventKind, Finding
from rankdump._core.scope_names import format_scope_name
from rankdump._core.status import OrderEntry
from rankdump._web.dump_source import DumpSource
from rankdump._web.order_trace import TraceLink, iter_entries, list_trace_links, open_order
from rankdump._web.page_kinds import AbsentPageError, PageKind, PageParameters
from rankdump.errors import CorruptedError

_AROUND = 40
"""Entries before and after the chosen one."""
_MAX_ENTRIES = 200_000
"""Entries of one iteration that are read."""
_MAX_LANES = 24
_MAX_FINDINGS = 50
WIDTH, LANE_HEIGHT, LEFT = 1200.0, 22.0, 64.0
"""Of the drawing, in its own units."""


class OrderRequest(NamedTuple):
    """Which part of the order."""

    iteration: int | None
    around: int | None
    """Position of the entry in the middle."""
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
    """Since the first of the listed entries."""
    took_ms: float
    is_chosen: bool


class TimelineBar(NamedTuple):
    """A rectangle of the drawing."""

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
    """Entries of the iteration."""
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
    """Who came late, from the hints."""
    traces: tuple[TraceLink, ...]
    """Traces of the iteration to download."""
    notes: tuple[str, ...]


def parse_order(parameters: PageParameters) -> OrderRequest:
    """Return the request."""
    return OrderRequest(
        iteration=parameters.read_number("iteration"),
        around=parameters.read_number("around"),
        collectives=parameters.read_flag("collectives"),
    )


def build_order(source: DumpSource, request: OrderRequest) -> OrderPage:
    """Return a part of the order; AbsentPageError where the tree has none."""
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
    """Return the iterations that the tree or the end of the order have."""
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
    """Return the index of the entry asked for: else that of a finding, or the first collective."""
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

"""Listing of dumps of torch's Flight Recorder: the collectives of each rank. Prints nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from rankdump._analysis.reader.flight_dumps import is_flight_folder, read_flight_dumps
from rankdump._analysis.reader.query import Query, ranges
from rankdump._cli.output import TableColumn, format_table, number_columns
from rankdump._cli.text_format import format_shape
from rankdump._core.units import format_count
from rankdump._layout.flight_record import COMPLETED, FlightCall, FlightDump

_COLUMNS = (
    *number_columns("rank", "call"),
    TableColumn("group", is_flexible=True),
    *number_columns("number"),
    TableColumn("operation"),
    TableColumn("sizes"),
    TableColumn("dtype"),
    TableColumn("state"),
    *number_columns("start ms", "took ms"),
)
_DEFAULT_CALLS = 100


def read_listed_dumps(root: Path) -> list[FlightDump] | None:
    """Return the dumps in a folder or file; None where it is no dump of the recorder.

    CorruptedError where one of them cannot be read.
    """
    return read_flight_dumps(root) if is_flight_folder(root) else None


def format_flight_listing(
    root: Path, dumps: Sequence[FlightDump], query: Query, limit: int | None, *, width: int
) -> list[str]:
    """Return one line for each call that the query selects, and sentences about each rank."""
    selected = list(_select_calls(dumps, query))
    most = _DEFAULT_CALLS if limit is None else limit or len(selected)
    shown = selected[:most]
    first_us = min((call.created_us for _, call in selected), default=0)
    rows = [_make_cells(rank, call, first_us) for rank, call in shown]
    lines = [*format_table(_COLUMNS, rows, width=width), ""] if rows else []
    left = len(selected) - len(shown)
    if left:
        lines.insert(-1, f"... {format_count(left, 'more call')}: --rank and --op select")
    lines += [_describe_rank(dump) for dump in dumps if query.rank in (None, dump.rank)]
    total = format_count(len(selected), "call")
    ranks = ranges(dump.rank for dump in dumps)
    return [*lines, f"{root}: {total} of rank {ranks}; it has no tensors"]


def describe_flight_calls(
    dumps: Sequence[FlightDump], query: Query, limit: int | None
) -> list[dict[str, object]]:
    """Return the JSON form of the calls that the query selects."""
    return [
        {
            "rank": rank,
            "call": call.number,
            "group": call.group.name,
            "group_description": call.group.description,
            "members": call.group.members,
            "sequence": call.sequence,
            "operation": call.operation,
            "sizes": call.sizes,
            "result_sizes": call.result_sizes,
            "dtype": call.dtype,
            "state": call.state,
            "created_us": call.created_us,
            "started_us": call.started_us,
            "completed_us": call.completed_us,
            "duration_ms": call.duration_ms,
            "source": call.source,
        }
        for rank, call in list(_select_calls(dumps, query))[: limit or None]
    ]


def _select_calls(dumps: Sequence[FlightDump], query: Query) -> Iterator[tuple[int, FlightCall]]:
    for dump in dumps:
        for call in dump.calls:
            if query.keeps_place(dump.rank, 0, 0) and query.keeps_operator(call.op_type, call.name):
                yield dump.rank, call


def _make_cells(rank: int, call: FlightCall, first_us: int) -> list[str]:
    took = call.duration_ms
    if took is None and call.completed_us is not None:
        took = (call.completed_us - (call.started_us or call.created_us)) / 1000
    return [
        str(rank),
        str(call.number),
        call.group.label,
        str(call.sequence),
        call.operation,
        " ".join(map(format_shape, call.sizes or call.result_sizes)),
        call.dtype,
        call.state,
        f"{(call.created_us - first_us) / 1000:.3f}",
        "-" if took is None else f"{took:.3f}",
    ]


def _describe_rank(dump: FlightDump) -> str:
    """Return one sentence about a rank: how far it came."""
    left = Counter(call.state for call in dump.calls if call.state != COMPLETED)
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(left.items()))
    start = "" if dump.is_whole else f"; the ring has lost its first {dump.calls[0].number:,}"
    done = sum(call.state == COMPLETED for call in dump.calls)
    return f"rank {dump.rank}: {done:,} complete{f', {states}' if states else ''}{start}"

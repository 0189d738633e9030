"""Command `rankdump ls`: shows the content of a tree, without a filter as an overview, with a
filter as a list of tensors. A dump of torch's Flight Recorder has no tensors; the collectives of
each rank are listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.reader.flight_dumps import is_flight_folder, read_flight_dumps
from rankdump._analysis.reader.query import Query
from rankdump._analysis.reader.tree import Entries, Tree
from rankdump._analysis.reader.tree_status import describe_tree_drops
from rankdump._cli.options import DUMP_PATH, FILTER_HINT, add_query_options
from rankdump._cli.output import (
    TableColumn,
    format_shape,
    measure_width,
    number_columns,
    print_json,
    print_lines,
    print_rows,
    print_table,
)
from rankdump._cli.tree_contents import (
    ListedTensor,
    count_same_contents,
    describe_entries,
    describe_jobs,
    describe_key,
    describe_parallelism,
    explain_no_match,
    format_overview,
    format_tensors,
    mark_same_contents,
    name_tables,
    read_tree,
)
from rankdump._core.number_ranges import ranges
from rankdump._core.units import format_bytes, format_count
from rankdump._layout.flight_record import COMPLETED, FlightCall, FlightDump
from rankdump.errors import CorruptedError

_OVERVIEW_TENSORS = 10
_DEFAULT_TENSORS = 100
_CALL_COLUMNS = (
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


@click.command()
@click.argument("tree", type=DUMP_PATH, default=".")
@add_query_options
@click.option(
    "--limit", type=click.IntRange(min=0), help="Maximum number of tensors listed; 0 lists all."
)
@click.option("--digest", "digests", is_flag=True, help="Show digests, and mark equal tensors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def ls(
    *,
    tree: Path,
    query: Query,
    job_id: str,
    attempt: int | None,
    limit: int | None,
    digests: bool,
    as_json: bool,
) -> int:
    """List the tensors of a tree.

    Without a filter, shows the ranks and iterations, and the first tensors. With --digest, tensors
    with the same bytes, type and shape have the same mark. Exit code 1 when something in the tree
    is damaged, or the folder is not a tree. A dump of torch's Flight Recorder has no tensors; its
    collectives are listed.
    """
    try:
        found = read_tree(tree, query, job_id, attempt)
    except CorruptedError:
        if not is_flight_folder(tree):
            raise
        _list_flights(tree, query, limit, as_json=as_json)
        return 0
    kept = found.entries if query.empty else found.entries.where(query.keeps)
    if as_json:
        rows = describe_entries(kept[: limit or None])
        body = _listing_as_json(found, rows, len(kept))
        print_json(body)
    else:
        brief = query.empty and limit is None and not job_id and attempt is None
        shown = (
            _OVERVIEW_TENSORS
            if brief
            else _DEFAULT_TENSORS
            if limit is None
            else limit or len(kept)
        )
        rows = describe_entries(kept[:shown])
        _print_listing(found, kept, rows, query, brief=brief, digests=digests)
    return 1 if reader.damaged(found) or any(row.damage for row in rows) else 0


def _print_listing(
    tree: Tree, kept: Entries, rows: list[ListedTensor], query: Query, *, brief: bool, digests: bool
) -> None:
    width = measure_width()
    if brief and rows:
        print_table(format_overview(tree, width=width))
        print_lines(["", f"first {format_count(len(rows), 'tensor')}:"])
    marks = mark_same_contents(kept) if digests else None
    for line in format_tensors(tree, rows, width=width, marks=marks):
        click.echo(line)
    left = len(kept) - len(rows)
    if left:
        print_lines(
            [f"... {format_count(left, 'more tensor')}: {FILTER_HINT}; --limit 0 lists all"]
        )
    print_lines([*([""] if rows else []), _format_total(tree, kept)])
    if marks is not None:
        print_lines([count_same_contents(kept, marks)])
    # If the place has only statistics, the filter is not wrong, and the next line names them.
    if not kept and not (tree.tables and query == query.places):
        every = read_tree(tree.root, job_id=tree.job_id, attempt=tree.attempt).entries
        print_lines([explain_no_match(every)] if every else [])
    if tree.tables:
        tables = format_count(len(tree.tables), name_tables(tree))
        taken = format_bytes(sum(table.stored_bytes for table in tree.tables))
        print_lines([f"statistics in {tables}, {taken} on disk: see rankdump stats"])
    print_lines([*describe_jobs(tree), *describe_tree_drops(tree)])
    faults = reader.faults(tree)
    print_lines(finding for finding in reader.findings(tree) if finding not in faults)
    print_lines([row.damage for row in rows if row.damage], err=True)
    print_lines(faults, err=True)


def _format_total(tree: Tree, kept: Entries) -> str:
    foreign = f"; {format_count(tree.foreign, 'other file')} ignored" if tree.foreign else ""
    if not tree.entries and tree.whole:
        return f"{tree.root}: no tensor files{foreign}"
    places = kept.by_place()
    ranks = {place.rank for place in places}
    iterations = {place.iteration for place in places if place.dated}
    stored = sum(entry.taken_bytes for entry in kept)
    same = sum(entry.is_same_as_baseline for entry in kept)
    there = f", {format_count(same, 'tensor')} in the baseline" if same else ""
    held = (
        f"of {format_count(len(ranks), tree.unit)} in {format_count(len(iterations), 'iteration')}"
    )
    return (
        f"{tree.root}: {format_count(len(kept), 'tensor')} {held}, "
        f"{format_bytes(stored)} on disk{there}{foreign}"
    )


def _listing_as_json(tree: Tree, rows: list[ListedTensor], count: int) -> dict[str, object]:
    return {
        "root": str(tree.root),
        "ranks": tree.ranks,
        "ranks_are_devices": tree.by_device,
        "attempts": tree.attempts,
        "tensor_count": count,
        "table_count": len(tree.tables),
        "table_bytes": sum(table.stored_bytes for table in tree.tables),
        "foreign_files": tree.foreign,
        "findings": [*describe_tree_drops(tree), *reader.findings(tree)],
        "tensors": [_row_as_json(row, tree) for row in rows],
    }


def _row_as_json(row: ListedTensor, tree: Tree) -> dict[str, object]:
    entry, record = row.entry, row.entry.record
    return {
        "path": entry.relative,
        "member": entry.member,
        **describe_key(entry, tree),
        "argument": record.argument if record else entry.key.argument,
        "dtype": row.facts.dtype if row.facts else None,
        "shape": row.facts.shape if row.facts else None,
        "format": (row.facts.tensor_format if row.facts else "") or entry.key.tensor_format,
        "bytes_in": row.facts.bytes_in if row.facts else None,
        "file_bytes": entry.stored_bytes,
        "same_as": f"{record.baseline}/{record.same_as}" if record and record.same_as else "",
        "codec": entry.codec,
        "digest": record.digest if record else "",
        **(describe_parallelism(record) if record else {}),
        "damage": row.damage,
    }


def _list_flights(root: Path, query: Query, limit: int | None, *, as_json: bool) -> None:
    """List the collectives in a folder or file of the Flight Recorder, and how far each rank got.

    CorruptedError if one of the dumps cannot be read.
    """
    dumps = read_flight_dumps(root)
    selected = list(_select_calls(dumps, query))
    if as_json:
        calls = [_call_as_json(rank, call) for rank, call in selected[: limit or None]]
        print_json({"root": str(root), "calls": calls})
        return
    shown = selected[: _DEFAULT_CALLS if limit is None else limit or None]
    if shown:
        first_us = min(call.created_us for _, call in selected)
        print_rows(_CALL_COLUMNS, [_make_cells(rank, call, first_us) for rank, call in shown])
    left = len(selected) - len(shown)
    lines = [f"... {format_count(left, 'more call')}: --rank and --op select"] if left else []
    lines += [""] if shown else []
    lines += [_describe_rank(dump) for dump in dumps if query.rank in (None, dump.rank)]
    total = format_count(len(selected), "call")
    ranks = ranges(dump.rank for dump in dumps)
    for line in [*lines, f"{root}: {total} of rank {ranks}; it has no tensors"]:
        click.echo(line)


def _call_as_json(rank: int, call: FlightCall) -> dict[str, object]:
    kept = ("sequence", "operation", "sizes", "result_sizes", "dtype", "state")
    times = ("created_us", "started_us", "completed_us", "duration_ms", "source")
    return {
        "rank": rank,
        "call": call.number,
        "group": call.group.name,
        "group_description": call.group.description,
        "members": call.group.members,
        **{name: getattr(call, name) for name in (*kept, *times)},
    }


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
    """Return one sentence about how far a rank got."""
    left = Counter(call.state for call in dump.calls if call.state != COMPLETED)
    states = ", ".join(f"{count:,} {state}" for state, count in sorted(left.items()))
    start = "" if dump.is_whole else f"; the ring has lost its first {dump.calls[0].number:,}"
    done = sum(call.state == COMPLETED for call in dump.calls)
    return f"rank {dump.rank}: {done:,} complete{f', {states}' if states else ''}{start}"

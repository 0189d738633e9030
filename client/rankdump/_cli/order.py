"""Command `rankdump order`: shows the merged execution order of all ranks, and the findings of the
merge.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import click

from rankdump import reader
from rankdump._analysis.reader.query import Query
from rankdump._cli.live_tree import (
    LiveJob,
    fetch_live_findings,
    fetch_live_status,
    find_live_job,
    find_unpublished_iterations,
)
from rankdump._cli.options import DUMP_PATH, add_operator_query_options, resolve_coordinator_address
from rankdump._cli.output import (
    TableColumn,
    number_columns,
    print_lines,
    print_rows,
    without_attempts,
)
from rankdump._cli.tree_contents import name_tree_models
from rankdump._core.events import EventKind, Finding
from rankdump._core.number_ranges import ranges
from rankdump._core.scope_names import format_scope_name, name_models
from rankdump._core.status import OrderEntry
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError, RankdumpError

_DEFAULT_LINES = 40
_COLUMNS = (
    *number_columns("position", "attempt", "iteration"),
    TableColumn("ranks", is_flexible=True),
    TableColumn("name", is_flexible=True),
    *number_columns("start ms", "took ms"),
)


@click.command()
@click.argument("tree", type=DUMP_PATH, required=False)
@click.option(
    "--coordinator", metavar="ADDRESS", help="Coordinator to ask; default: RANKDUMP_COORDINATOR."
)
@add_operator_query_options
@click.option(
    "--findings", "findings_only", is_flag=True, help="Show only the findings of the merge."
)
@click.option("--limit", type=click.IntRange(min=0), help="Maximum number of lines; 0 shows all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def order(
    *,
    tree: Path | None,
    coordinator: str | None,
    query: Query,
    job_id: str,
    attempt: int | None,
    findings_only: bool,
    limit: int | None,
    as_json: bool,
) -> int:
    """Show the merged execution order of all ranks.

    It is the order of the job in TREE, from its coordinator while it runs, with iterations that are
    not published yet; without TREE it comes from the coordinator. Without --job, it is the order
    of the job that runs or published last. --rank selects the entries in which that rank took
    part. The exit code is 1 when a file of the order is damaged, and with --findings when there is
    a finding.
    """
    if tree and coordinator:
        raise click.UsageError("TREE and --coordinator cannot be combined")
    source = (
        _read_tree_order(tree, job_id, query, attempt)
        if tree
        else _fetch_coordinator_order(
            coordinator, job_id, query, findings_only=findings_only or as_json
        )
    )
    entries = (e for e in source.entries if _matches_entry(query, e))
    entries = (e for e in entries if not findings_only and attempt in (None, e.attempt))
    found = [
        finding
        for finding in source.findings
        if attempt in (None, finding.attempt) and _matches_finding(query, finding)
    ]
    if as_json:
        _print_json(islice(entries, limit or None), found)
    else:
        if not findings_only:
            attempts = source.attempts if attempt is None else ()
            most = _DEFAULT_LINES if limit is None else limit
            _print_entries(iter(entries), most, attempts, tree or source.tree)
        several = any(finding.attempt for finding in source.findings) or len(source.attempts) > 1
        print_lines(
            [_format_finding(finding, several=several) for finding in found]
            or ["the merge has no findings"]
        )
        print_lines(source.notes)
    print_lines(source.damages, err=True)
    return int(bool(source.damages) or (findings_only and bool(found)))


def _matches_entry(query: Query, entry: OrderEntry) -> bool:
    ranks = (*entry.ranks, *entry.missing)
    return any(
        query.keeps_place(rank, entry.graph, entry.iteration) for rank in ranks
    ) and query.keeps_operator(_operator_type(entry.name), entry.name)


def _matches_finding(query: Query, finding: Finding) -> bool:
    in_time = query.iterations is None or finding.iteration in query.iterations
    about_rank = query.rank is None or not finding.ranks or query.rank in finding.ranks
    about_operator = not finding.name or query.keeps_operator(
        _operator_type(finding.name), finding.name
    )
    return in_time and about_rank and about_operator


@dataclass(frozen=True, slots=True)
class _OrderSource:
    entries: Iterator[OrderEntry]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    attempts: tuple[int, ...] = ()
    damages: tuple[str, ...] = ()
    """Sentences about files that have lost lines."""
    tree: Path | None = None
    """Tree of the job, if it is known."""


def _read_tree_order(tree: Path, job_id: str, query: Query, attempt: int | None) -> _OrderSource:
    job = find_live_job(tree, job_id)
    live = _fetch_live_order(job, query) if job else None
    if live is not None:
        return live
    published = reader.read_order(tree, job_id=job_id)
    if attempt is not None and attempt not in published.attempts:
        known = ", ".join(map(str, published.attempts))
        raise CorruptedError(f"{tree}: no order of attempt {attempt}; known: {known}")
    entries = published.entries(graph=query.graph, iterations=query.iterations, attempt=attempt)
    others = ", ".join(published.others)
    notes = (f"orders of other jobs are in {others}: --job ID selects one",) if others else ()
    notes = (*notes, *published.notes)
    # A running job may be in the middle of writing a line, so its files are not checked.
    damages = () if job else tuple(published.list_damages(attempt))
    absent = () if damages else find_unpublished_iterations(tree, published, job_id)
    if absent:
        notes = (f"{_name_iterations(absent)} not published: no daemon of the job answers", *notes)
    return _OrderSource(entries, published.findings, notes, published.attempts, damages)


def _fetch_live_order(job: LiveJob, query: Query) -> _OrderSource | None:
    """Return the order of a running job from its coordinator; None when the coordinator does not
    answer.
    """
    # Imported on use, because loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_order

    findings = fetch_live_findings(job)
    if findings is None:
        return None
    view = fetch_live_status(job)
    unpublished = [at for merge in view.merges for at in merge.unpublished] if view else []
    notes = (
        f"{_name_iterations(unpublished)} not published yet: shown is what its ranks have reported",
    )
    entries = fetch_order(job.coordinator, job_id=job.job_id, graph=query.graph)
    return _OrderSource(entries, findings, notes if unpublished else ())


def _name_iterations(iterations: Sequence[int]) -> str:
    several = len(set(iterations)) > 1
    return f"iteration{'s' * several} {ranges(iterations)} {'are' if several else 'is'}"


def _fetch_coordinator_order(
    coordinator: str | None, job_id: str, query: Query, *, findings_only: bool
) -> _OrderSource:
    # Imported on use, because loading gRPC takes longer than reading a tree.
    from rankdump._cli.daemon_client import fetch_job_status, fetch_order, fetch_order_findings

    address = resolve_coordinator_address(coordinator)
    findings = fetch_order_findings(address, job_id=job_id)
    roots: tuple[str, ...] = ()
    if not findings_only:
        # Run cards of the tree have the names of models. This host may not have its disk.
        with suppress(RankdumpError):
            roots = fetch_job_status(address, job_id=job_id).roots
    tree = Path(roots[0]) if len(roots) == 1 else None
    entries = fetch_order(address, job_id=job_id, graph=query.graph)
    return _OrderSource(entries, findings, tree=tree)


def _print_entries(
    entries: Iterator[OrderEntry], limit: int, attempts: tuple[int, ...], tree: Path | None
) -> None:
    shown = list(islice(entries, limit or None))
    if shown:
        _print_table(shown, attempts, tree)
    cut = bool(limit) and next(entries, None) is not None
    print_lines(
        ["... more lines: --limit 0 shows all, --iteration, --op, --rank and --attempt select"]
        if cut
        else []
    )
    # The coordinator counts the events of each rank; here, a collective of all ranks is one line.
    events = format_count(sum(len(entry.ranks) for entry in shown), "event")
    collectives = format_count(sum(entry.kind.is_collective for entry in shown), "line")
    of = f"{'first ' if cut else ''}{format_count(len(shown), 'line')} for {events} of the ranks"
    print_lines(["", f"{of}, {collectives} of collectives; --json has the full scope names"])


def _print_json(entries: Iterable[OrderEntry], found: Iterable[Finding]) -> None:
    """Print one entry per line while reading, because an order may be larger than the memory."""
    click.echo('{"entries": [', nl=False)
    before = "\n "
    for entry in entries:
        click.echo(before + json.dumps(asdict(entry) | {"kind": entry.kind.name.lower()}), nl=False)
        before = ",\n "
    findings = [asdict(finding) | {"kind": finding.kind.value} for finding in found]
    click.echo(f'\n], "findings": {json.dumps(findings, indent=1)}}}')


def _format_finding(finding: Finding, *, several: bool) -> str:
    so_far = ", so far" if finding.provisional else ""
    attempt = f", attempt {finding.attempt}" if several else ""
    return f"{finding.kind.value}{attempt}{so_far}: {finding.text}"


def _print_table(entries: list[OrderEntry], attempts: tuple[int, ...], tree: Path | None) -> None:
    """Print the entries as a table, with times in milliseconds since the first start.

    `attempts` contains the attempts of the whole order; the entries may be of only some of them.
    """
    named = ((entry.graph, entry.name) for entry in entries)
    models = name_models(named) if tree is None else name_tree_models(tree, named)
    first_us = min(entry.start_us for entry in entries)
    rows = [
        [
            str(entry.position),
            str(entry.attempt),
            str(entry.iteration),
            _format_ranks(entry),
            _format_name(entry, models.get(entry.graph, "")),
            f"{(entry.start_us - first_us) / 1000:.3f}",
            f"{(entry.end_us - entry.start_us) / 1000:.3f}",
        ]
        for entry in entries
    ]
    numbers = (*attempts, *(entry.attempt for entry in entries))
    columns = _COLUMNS
    if not any(entry.start_us for entry in entries):  # a dump of another tool may have no times
        columns, rows = columns[:-2], [row[:-2] for row in rows]
    print_rows(*without_attempts(columns, rows, numbers))


def _operator_type(op_name: str) -> str:
    """Return the type at the end of an operator's name: `Linear` for `.../Linear-op0`."""
    return op_name.rpartition("/")[2].rpartition("-op")[0]


def _format_name(entry: OrderEntry, model: str) -> str:
    name = format_scope_name(entry.name, model)
    return name if entry.kind is EventKind.OPERATOR else f"{entry.kind.name.lower()} {name}"


def _format_ranks(entry: OrderEntry) -> str:
    missing = f" (missing {ranges(entry.missing)})" if entry.missing else ""
    return ranges(entry.ranks) + missing

"""`rankdump order`: the order in which all ranks together executed, and what is odd about it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.options import TREE, coordinator_address, selecting_operators
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.table import Column, numbers, table
from rankdump.cli.text import counted, label
from rankdump.contract.events import EventKind
from rankdump.contract.findings import Finding
from rankdump.contract.status import OrderEntry
from rankdump.reader import Query, ranges

_LIMIT = 40
_COLUMNS = (
    *numbers("position", "iteration"),
    Column("ranks", flexible=True),
    Column("name", flexible=True),
    *numbers("start ms", "took ms"),
)


@click.command()
@click.argument("tree", type=TREE, required=False)
@click.option(
    "--coordinator", metavar="ADDRESS", help="Whom to ask; default: RANKDUMP_COORDINATOR."
)
@selecting_operators
@click.option("--findings", "findings_only", is_flag=True, help="Only what the merge found odd.")
@click.option("--limit", type=click.IntRange(min=0), help="Most lines; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def order(
    *,
    tree: Path | None,
    coordinator: str | None,
    query: Query,
    job_id: str,
    findings_only: bool,
    limit: int | None,
    as_json: bool,
) -> int:
    """Show in which order all ranks executed.

    With a TREE from its files, without one from the coordinator; without --job that of the job
    that published last. --rank shows what it took part in. With --findings the exit code is 1
    when there are any.
    """
    if tree and coordinator:
        raise click.UsageError("TREE and --coordinator do not go together")
    wants = _Wants(query)
    source = (
        _of_tree(tree, job_id, wants, findings_only)
        if tree
        else _of_coordinator(coordinator, job_id, wants, findings_only)
    )
    if as_json:
        _show_json(source, wants, limit)
    else:
        if not findings_only:
            _show(source.entries, _LIMIT if limit is None else limit)
        found = [_sentence(finding) for finding in source.findings if wants.about(finding)]
        say(found or ["the merge found nothing odd"])
        say(source.notes)
    return int(findings_only and any(map(wants.about, source.findings)))


@dataclass(frozen=True, slots=True)
class _Wants:
    """Which entries and findings are asked for."""

    query: Query

    def keeps(self, entry: OrderEntry) -> bool:
        query = self.query
        ranks = (*entry.ranks, *entry.missing)
        return any(
            query.keeps_place(rank, entry.graph, entry.iteration) for rank in ranks
        ) and query.keeps_operator(_type(entry.name), entry.name)

    def about(self, finding: Finding) -> bool:
        query = self.query
        in_time = query.iterations is None or finding.iteration in query.iterations
        about_rank = query.rank is None or not finding.ranks or query.rank in finding.ranks
        about_operator = not finding.name or query.keeps_operator(_type(finding.name), finding.name)
        return in_time and about_rank and about_operator


@dataclass(frozen=True, slots=True)
class _Source:
    entries: Iterator[OrderEntry]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()


def _of_tree(tree: Path, job_id: str, wants: _Wants, findings_only: bool) -> _Source:
    published = reader.read_order(tree, job_id=job_id)
    entries = published.entries(graph=wants.query.graph, iterations=wants.query.iterations)
    others = ", ".join(published.others)
    notes = (f"orders of other jobs stand in {others}: --job ID shows one",) if others else ()
    kept = iter(()) if findings_only else filter(wants.keeps, entries)
    return _Source(kept, published.findings, notes)


def _of_coordinator(
    coordinator: str | None, job_id: str, wants: _Wants, findings_only: bool
) -> _Source:
    # With gRPC, which takes longer to load than a tree to answer.
    from rankdump.cli.ask import global_order, order_findings

    address = coordinator_address(coordinator)
    findings = order_findings(address, job_id=job_id)
    entries = global_order(address, job_id=job_id, graph=wants.query.graph)
    return _Source(iter(()) if findings_only else filter(wants.keeps, entries), findings)


def _show(entries: Iterator[OrderEntry], limit: int) -> None:
    shown = list(islice(entries, limit or None))
    if shown:
        show_table(lines(shown, width=table_width()))
    cut = bool(limit) and next(entries, None) is not None
    say(["... more lines: --limit 0 shows all, --iteration, --op and --rank select"] if cut else [])
    # The coordinator counts what each rank did; here a collective of all ranks is one line.
    events = counted(sum(len(entry.ranks) for entry in shown), "event")
    collectives = counted(sum(entry.kind.collective for entry in shown), "line")
    of = f"{'first ' if cut else ''}{counted(len(shown), 'line')} for {events} of the ranks"
    say(["", f"{of}, {collectives} of collectives; --json has the full scope names"])


def _show_json(source: _Source, wants: _Wants, limit: int | None) -> None:
    """Print an entry a line, as they come: an order may be larger than memory."""
    click.echo('{"entries": [', nl=False)
    before = "\n "
    for entry in islice(source.entries, limit or None):
        click.echo(before + json.dumps(asdict(entry) | {"kind": entry.kind.name.lower()}), nl=False)
        before = ",\n "
    findings = [asdict(f) | {"kind": f.kind.value} for f in source.findings if wants.about(f)]
    click.echo(f'\n], "findings": {json.dumps(findings, indent=1)}}}')


def _sentence(finding: Finding) -> str:
    so_far = ", so far" if finding.provisional else ""
    return f"{finding.kind.value}{so_far}: {finding.text}"


def lines(entries: list[OrderEntry], *, width: int) -> list[str]:
    """Return the entries as a table; times are milliseconds from the first one's start."""
    first_us = min(entry.start_us for entry in entries)
    rows = [
        [
            str(entry.position),
            str(entry.iteration),
            _ranks(entry),
            _name(entry),
            f"{(entry.start_us - first_us) / 1000:.3f}",
            f"{(entry.end_us - entry.start_us) / 1000:.3f}",
        ]
        for entry in entries
    ]
    return table(_COLUMNS, rows, width=width)


def _type(op_name: str) -> str:
    """Return the type of an operator, which its name ends in: `Linear` of `.../Linear-op0`."""
    return op_name.rpartition("/")[2].rpartition("-op")[0]


def _name(entry: OrderEntry) -> str:
    name = label(entry.name)
    return name if entry.kind is EventKind.OPERATOR else f"{entry.kind.name.lower()} {name}"


def _ranks(entry: OrderEntry) -> str:
    missing = f" (missing {ranges(entry.missing)})" if entry.missing else ""
    return ranges(entry.ranks) + missing

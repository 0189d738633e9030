"""`rankdump order`: the order in which all ranks together executed, and what is odd about it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.ask import global_order
from rankdump.cli.options import TREE, iterations_of
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.table import Column, numbers, table
from rankdump.cli.text import counted, label
from rankdump.contract.events import EventKind
from rankdump.contract.plan import Iterations
from rankdump.contract.status import OrderEntry
from rankdump.reader import ranges

_LIMIT = 40
_COLUMNS = (
    *numbers("position", "iteration"),
    Column("ranks", flexible=True),
    Column("name", flexible=True),
    *numbers("start ms", "took ms"),
)


@click.command()
@click.argument("tree", type=TREE, required=False)
@click.option("--agent", metavar="ADDRESS", help="Daemon to ask; default: RANKDUMP_COORDINATOR.")
@click.option("--graph", type=click.IntRange(min=0), help="Only this graph.")
@click.option("--iteration", "iterations", callback=iterations_of, help='Only these, as "0|2-3".')
@click.option("--findings", "findings_only", is_flag=True, help="Only what the merge found odd.")
@click.option("--limit", type=click.IntRange(min=0), help="Most lines; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def order(
    tree: Path | None,
    agent: str | None,
    graph: int | None,
    iterations: Iterations | None,
    findings_only: bool,
    limit: int | None,
    as_json: bool,
) -> int:
    """Show in which order all ranks executed.

    With a TREE from its file, without one from the coordinator.
    """
    if tree and agent:
        raise click.UsageError("TREE and --agent do not go together")
    entries, findings, notes = _read(tree, agent, graph or 0)
    kept = [e for e in entries if _keeps(e, graph, iterations)] if not findings_only else []
    if as_json:
        click.echo(json.dumps(_as_json(kept[: limit or None], findings), indent=1))
        return 0
    if not findings_only:
        _show(kept, _LIMIT if limit is None else limit or len(kept))
    say(findings or ["the merge found nothing odd"])
    say(notes)
    return 0


def _read(
    tree: Path | None, agent: str | None, graph: int
) -> tuple[tuple[OrderEntry, ...], tuple[str, ...], tuple[str, ...]]:
    if tree is None:
        address = agent or os.environ.get("RANKDUMP_COORDINATOR") or "127.0.0.1:7421"
        return *global_order(address, graph=graph), ()
    published = reader.read_order(tree)
    notes = tuple(f"another job's order stands in {other}" for other in published.others)
    return published.entries, published.findings, notes


def _keeps(entry: OrderEntry, graph: int | None, iterations: Iterations | None) -> bool:
    return graph in (None, entry.graph) and (iterations is None or entry.iteration in iterations)


def _show(entries: list[OrderEntry], limit: int) -> None:
    if entries:
        show_table(lines(entries[:limit], width=table_width()))
    left = len(entries) - limit
    if left > 0:
        say([f"... {counted(left, 'more line')}: --limit 0 shows all, --iteration selects"])
    members = sum(entry.kind.collective for entry in entries)
    shown = f"{counted(len(entries), 'line')}, of which {members} for collectives"
    say(["", f"{shown}; --json has the full scope names"])


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


def _name(entry: OrderEntry) -> str:
    name = label(entry.name)
    return name if entry.kind is EventKind.OPERATOR else f"{entry.kind.name.lower()} {name}"


def _ranks(entry: OrderEntry) -> str:
    missing = f" (missing {ranges(entry.missing)})" if entry.missing else ""
    return ranges(entry.ranks) + missing


def _as_json(entries: list[OrderEntry], findings: tuple[str, ...]) -> dict[str, object]:
    listed = [asdict(entry) | {"kind": entry.kind.name.lower()} for entry in entries]
    return {"entries": listed, "findings": findings}

"""`rankdump ls`: what a tree holds. Without a filter an overview, with one the tensors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.listing import (
    Row,
    described,
    nothing,
    overview,
    same_marks,
    shared,
    table_noun,
    tensors,
    tree_at,
)
from rankdump.cli.options import FILTER_HINT, TREE, selecting
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.text import counted, size
from rankdump.reader import Entries, Query, Tree

_FIRST = 10
_LIMIT = 100


@click.command()
@click.argument("tree", type=TREE, default=".")
@selecting
@click.option("--limit", type=click.IntRange(min=0), help="Most tensors listed; 0: all.")
@click.option("--digest", "digests", is_flag=True, help="Show which tensors are the same.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def ls(
    *, tree: Path, query: Query, job_id: str, limit: int | None, digests: bool, as_json: bool
) -> int:
    """List the tensors of a tree.

    Without a filter: its ranks and iterations, and the first tensors. With --digest, tensors of
    the same bytes, type and shape have the same mark. Exit code 1 when something in the tree is
    damaged, or it is no tree.
    """
    found = tree_at(tree, query, job_id)
    kept = found.entries if query.empty else found.entries.where(query.keeps)
    if as_json:
        rows = described(kept[: limit or None])
        click.echo(json.dumps(_as_json(found, rows, len(kept)), indent=1))
    else:
        brief = query.empty and limit is None and not job_id
        shown = _FIRST if brief else _LIMIT if limit is None else limit or len(kept)
        rows = described(kept[:shown])
        _show(found, kept, rows, brief=brief, digests=digests)
    return 1 if reader.damaged(found) or any(row.damage for row in rows) else 0


def _show(tree: Tree, kept: Entries, rows: list[Row], *, brief: bool, digests: bool) -> None:
    width = table_width()
    if brief and rows:
        show_table(overview(tree, width=width))
        say(["", f"first {counted(len(rows), 'tensor')}:"])
    marks = same_marks(kept) if digests else None
    for line in tensors(rows, width=width, marks=marks):
        click.echo(line)
    left = len(kept) - len(rows)
    if left:
        say([f"... {counted(left, 'more tensor')}: {FILTER_HINT}; --limit 0 lists all"])
    say([*([""] if rows else []), _total(tree, kept)])
    if marks is not None:
        say([shared(kept, marks)])
    if not kept:
        every = tree_at(tree.root, job_id=tree.job_id).entries
        say([nothing(every)] if every else [])
    if tree.tables:
        tables = counted(len(tree.tables), table_noun(tree))
        taken = size(sum(table.stored_bytes for table in tree.tables))
        say([f"figures in {tables}, {taken} on disk: rankdump stats"])
    faults = reader.faults(tree)
    say(finding for finding in reader.findings(tree) if finding not in faults)
    say([row.damage for row in rows if row.damage], err=True)
    say(faults, err=True)


def _total(tree: Tree, kept: Entries) -> str:
    foreign = f"; {counted(tree.foreign, 'other file')} ignored" if tree.foreign else ""
    if not tree.entries and tree.whole:
        return f"{tree.root}: no tensor files{foreign}"
    places = kept.by_place()
    ranks = {place.rank for place in places}
    iterations = {place.iteration for place in places if place.dated}
    stored = sum(entry.taken_bytes for entry in kept)
    held = f"of {counted(len(ranks), tree.unit)} in {counted(len(iterations), 'iteration')}"
    return f"{tree.root}: {counted(len(kept), 'tensor')} {held}, {size(stored)} on disk{foreign}"


def _as_json(tree: Tree, rows: list[Row], count: int) -> dict[str, object]:
    return {
        "root": str(tree.root),
        "ranks": tree.ranks,
        "ranks_are_devices": tree.by_device,
        "tensor_count": count,
        "table_count": len(tree.tables),
        "table_bytes": sum(table.stored_bytes for table in tree.tables),
        "foreign_files": tree.foreign,
        "findings": reader.findings(tree),
        "tensors": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, object]:
    entry, key, record = row.entry, row.entry.key, row.entry.record
    return {
        "path": entry.relative,
        "member": entry.member,
        "rank": key.rank,
        "net_name": key.net_name,
        "graph": key.graph,
        "iteration": None if key.constant else key.iteration,
        "timestamp_us": key.timestamp_us,
        "op_type": entry.op_type,
        "op_name": entry.op_name,
        "side": key.side.value,
        "slot": key.slot,
        "argument": record.argument if record else key.argument,
        "dtype": row.facts.dtype if row.facts else None,
        "shape": row.facts.shape if row.facts else None,
        "format": (row.facts.tensor_format if row.facts else "") or key.tensor_format,
        "bytes_in": row.facts.bytes_in if row.facts else None,
        "file_bytes": entry.stored_bytes,
        "codec": entry.codec,
        "digest": record.digest if record else "",
        "damage": row.damage,
    }

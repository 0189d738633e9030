"""`rankdump ls`: what a tree holds. Without a filter an overview, with one the tensors."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import click

from rankdump import reader
from rankdump.cli.listing import Row, described, overview, tensors
from rankdump.cli.options import TREE, iterations_of
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.text import counted, size
from rankdump.contract.key import sanitised
from rankdump.contract.plan import Iterations
from rankdump.reader import Entry, Tree

_FIRST = 10
_LIMIT = 100


@dataclass(frozen=True, slots=True)
class Filter:
    """Which tensors; None means every one."""

    rank: int | None = None
    iterations: Iterations | None = None
    op: str | None = None
    side: str | None = None

    @property
    def empty(self) -> bool:
        """Whether it lets everything through."""
        return self == Filter()

    def keeps(self, entry: Entry) -> bool:
        """Decide on one tensor."""
        key = entry.key
        return (
            self.rank in (None, key.rank)
            and (self.iterations is None or key.iteration in self.iterations)
            and self.side in (None, key.side.value)
            and (self.op is None or self._names(entry, self.op))
        )

    @staticmethod
    def _names(entry: Entry, glob: str) -> bool:
        names = (entry.op_name, entry.op_type, entry.key.op_name)
        return any(fnmatchcase(name, glob) for name in names) or fnmatchcase(
            entry.key.op_name, sanitised(glob)
        )


@click.command()
@click.argument("tree", type=TREE, default=".")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank.")
@click.option("--iteration", "iterations", callback=iterations_of, help='Only these, as "0|2-3".')
@click.option("--op", metavar="GLOB", help="Only operators whose name or type matches.")
@click.option("--side", type=click.Choice(["input", "output"]), help="Only this side.")
@click.option("--limit", type=click.IntRange(min=0), help="Most tensors listed; 0: all.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def ls(
    tree: Path,
    rank: int | None,
    iterations: Iterations | None,
    op: str | None,
    side: str | None,
    limit: int | None,
    as_json: bool,
) -> int:
    """List the tensors of a tree.

    Without a filter: its ranks and iterations, and the first tensors.
    """
    found = reader.walk(tree)
    chosen = Filter(rank=rank, iterations=iterations, op=op, side=side)
    kept = [entry for entry in found.entries if chosen.keeps(entry)]
    if as_json:
        rows = described(kept[: limit or None])
        click.echo(json.dumps(_as_json(found, rows, len(kept)), indent=1))
    else:
        brief = chosen.empty and limit is None
        shown = _FIRST if brief else _LIMIT if limit is None else limit or len(kept)
        rows = described(kept[:shown])
        _show(found, kept, rows, brief=brief)
    return 1 if reader.damaged(found) or any(row.damage for row in rows) or not found.ranks else 0


def _show(tree: Tree, kept: list[Entry], rows: list[Row], *, brief: bool) -> None:
    width = table_width()
    if brief and rows:
        show_table(overview(tree, width=width))
        say(["", f"first {counted(len(rows), 'tensor')}:"])
    for line in tensors(rows, width=width):
        click.echo(line)
    left = len(kept) - len(rows)
    if left:
        how = "--rank, --iteration, --op, --side select; --limit 0 lists all"
        say([f"... {counted(left, 'more tensor')}: {how}"])
    say(["", _total(tree, kept)])
    say([row.damage for row in rows if row.damage])
    say(reader.findings(tree))


def _total(tree: Tree, kept: list[Entry]) -> str:
    if not tree.ranks:
        return f"{tree.root}: no rank folder here"
    ranks = {entry.key.rank for entry in kept}
    iterations = {entry.key.iteration for entry in kept}
    # By the manifests, a hard link to identical bytes takes no room of its own.
    stored = sum(e.record.bytes_stored if e.record else e.stored_bytes for e in kept)
    foreign = f"; {counted(tree.foreign, 'other file')} ignored" if tree.foreign else ""
    held = f"of {counted(len(ranks), 'rank')} in {counted(len(iterations), 'iteration')}"
    return f"{tree.root}: {counted(len(kept), 'tensor')} {held}, {size(stored)} on disk{foreign}"


def _as_json(tree: Tree, rows: list[Row], count: int) -> dict[str, object]:
    return {
        "root": str(tree.root),
        "ranks": tree.ranks,
        "tensor_count": count,
        "foreign_files": tree.foreign,
        "findings": reader.findings(tree),
        "tensors": [_row_as_json(row) for row in rows],
    }


def _row_as_json(row: Row) -> dict[str, object]:
    entry, key, record = row.entry, row.entry.key, row.entry.record
    return {
        "path": entry.relative,
        "rank": key.rank,
        "net_name": key.net_name,
        "graph": key.graph,
        "iteration": key.iteration,
        "timestamp_us": key.timestamp_us,
        "op_type": entry.op_type,
        "op_name": entry.op_name,
        "side": key.side.value,
        "slot": key.slot,
        "argument": record.argument if record else "",
        "dtype": row.facts.dtype if row.facts else None,
        "shape": row.facts.shape if row.facts else None,
        "bytes_in": row.facts.bytes_in if row.facts else None,
        "file_bytes": entry.stored_bytes,
        "codec": entry.codec,
        "digest": record.digest if record else "",
        "damage": row.damage,
    }

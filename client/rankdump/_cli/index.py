"""Command `rankdump index`: creates the table of all statistics of a tree, or adds what is new."""

from __future__ import annotations

from pathlib import Path

import click

from rankdump._cli.command_group import explain_missing_modules
from rankdump._cli.options import TREE_PATH
from rankdump._cli.output import print_json, print_lines, show_progress
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError


@click.command()
@click.argument("tree", type=TREE_PATH, default=".")
@click.option(
    "-j",
    "--processes",
    type=click.IntRange(min=1),
    help="Number of processes.  [default: one a core]",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
def index(*, tree: Path, processes: int | None, as_json: bool) -> int:
    """Make the table of statistics of a tree.

    The table is Parquet in TREE/.rankdump/table: one row for each tensor. `rankdump query` reads
    it. A later run adds the tensors that are new, also after an interrupted run. Exit code 1 when
    something in the tree is damaged, or the folder is not a tree.
    """
    with explain_missing_modules("table"):
        from rankdump._analysis.table_index import index_tree
    try:
        with show_progress("indexing") as on_progress:
            report = index_tree(tree, processes=processes or 0, on_progress=on_progress)
    except OSError as error:
        raise CorruptedError(f"{tree}: cannot be indexed: {error}") from None
    if as_json:
        print_json(report)
    else:
        kept = f", {format_count(report.kept_files, 'file')} kept" if report.kept_files else ""
        written = f"{format_count(report.rows, 'row')} in {format_count(report.files, 'file')}"
        print_lines([f"{written} written{kept}"])
        print_lines(report.problems, err=True)
    return 1 if report.problems else 0

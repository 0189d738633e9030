"""Command `rankdump diff`: comparison of two dumps, which says first where they part. Holds the
options alone; the work is in `diff_report`, which is imported on use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rankdump._cli.options import TREE_PATH, add_selection_options
from rankdump._cli.output import print_lines

_NUMBER_RANGE = click.IntRange(min=0)
_TOLERANCE_RANGE = click.FloatRange(min=0)


@click.command()
@click.argument("a", type=TREE_PATH)
@click.argument("b", type=TREE_PATH)
@add_selection_options
@click.option(
    "--rank-a", type=_NUMBER_RANGE, help="This rank of A; with --rank-b two are compared."
)
@click.option("--rank-b", type=_NUMBER_RANGE, help="This rank of B.")
@click.option(
    "--iteration-a", type=_NUMBER_RANGE, help="This one of A; with --iteration-b two of them."
)
@click.option("--iteration-b", type=_NUMBER_RANGE, help="This one of B.")
@click.option("--job-a", metavar="ID", default="", help="This job of A.")
@click.option("--job-b", metavar="ID", default="", help="This job of B.")
@click.option("--rtol", type=_TOLERANCE_RANGE, default=1e-4, help="Close: atol + rtol * |b|; 1e-4.")
@click.option("--atol", type=_TOLERANCE_RANGE, default=1e-4, help="The same; 1e-4.")
@click.option("--equal-nan", is_flag=True, help="NaN equals NaN at the same place.")
@click.option(
    "--match",
    metavar="RULES",
    default="exact,type,sequence",
    help="How calls are paired, in turn: exact, mapping, type, sequence.",
)
@click.option(
    "--map",
    "mapping",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of names: lines NAME_A,NAME_B, or a JSON object.",
)
@click.option("--msaccucmp", is_flag=True, help="Its ten measures as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.option(
    "--csv",
    "tables",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write tables there as api_dump_compare does.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with charts there.",
)
@click.option("--all", "everything", is_flag=True, help="List every row.")
@click.option("--limit", type=_NUMBER_RANGE, help="Most rows listed; 0: all that differ.")
@click.option("--processes", type=click.IntRange(min=1), help="Most processes; all cores.")
@click.option("--dask", metavar="ADDRESS", default="", help="Let this scheduler's workers do it.")
def diff(
    *,
    a: Path,
    b: Path,
    as_json: bool,
    tables: Path | None,
    page: Path | None,
    everything: bool,
    limit: int | None,
    **asked: Any,
) -> int:
    """Compare two dumps, and show where they part.

    A and B are trees of any layout, or a folder of a rank or an iteration in one; B is the
    reference. Exit code 1 when something differs or has no partner.
    """
    # On use: `rankdump --help` imports this module, and need not wait for all of a comparison.
    from rankdump._cli import diff_report

    if page is not None:
        diff_report.check_html_page(page)
    report = diff_report.compare_paths(a, b, asked)
    if as_json:
        diff_report.print_report_json(report)
    else:
        diff_report.print_report(report, everything=everything, limit=limit)
    written = diff_report.write_report_files(report, tables, page)
    if not as_json:
        print_lines(written)
    return 0 if report.agrees else 1

"""Command `rankdump diff`: compares two dumps and shows first where they diverge. This module only
defines the options; `diff_report` does the work and is imported on use.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from rankdump._cli.options import DUMP_PATH, add_selection_options
from rankdump._cli.output import print_lines
from rankdump._core.tolerance_text import TOLERANCE_FORM, parse_tolerances

_NUMBER_RANGE = click.IntRange(min=0)
_TOLERANCE_RANGE = click.FloatRange(min=0)


def parse_tolerance_options(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, float | str]:
    """Return errors, or `rounding`, by patterns of names; BadParameter for text that is not
    allowed.
    """
    try:
        return parse_tolerances(texts)
    except ValueError as error:
        what = f"{str(error)!r} is not allowed; allowed: {TOLERANCE_FORM}"
        raise click.BadParameter(what, context, parameter) from None


@click.command()
@click.argument("a", type=DUMP_PATH)
@click.argument("b", type=DUMP_PATH)
@add_selection_options
@click.option(
    "--rank-a", type=_NUMBER_RANGE, help="Rank of A; with --rank-b, compares two different ranks."
)
@click.option("--rank-b", type=_NUMBER_RANGE, help="Rank of B.")
@click.option(
    "--iteration-a",
    type=_NUMBER_RANGE,
    help="Iteration of A; with --iteration-b, compares two different iterations.",
)
@click.option("--iteration-b", type=_NUMBER_RANGE, help="Iteration of B.")
@click.option(
    "--attempt-a", type=_NUMBER_RANGE, help="Attempt of the job in A; default: the last one."
)
@click.option(
    "--attempt-b", type=_NUMBER_RANGE, help="Attempt of the job in B; default: the last one."
)
@click.option("--job-a", metavar="ID", default="", help="Job in A.")
@click.option("--job-b", metavar="ID", default="", help="Job in B.")
@click.option(
    "--rtol",
    type=_TOLERANCE_RANGE,
    help="Relative tolerance: a tensor is normal when all elements have |a - b| <= atol + rtol * "
    "|b|; default: 1e-4. Ranks that are joined are judged by the error of rounding instead, unless "
    "--rtol or --atol is given.",
)
@click.option("--atol", type=_TOLERANCE_RANGE, help="Absolute tolerance; default: 1e-4.")
@click.option(
    "--tolerance",
    metavar="PATTERN=ERROR",
    multiple=True,
    callback=parse_tolerance_options,
    help="Largest normal error of operators whose name matches a glob: root mean square of the "
    "difference, relative to B, such as '*norm*=1e-3', or 'rounding' for the error that rounding "
    "explains. If several patterns match, the last one applies. Repeatable.",
)
@click.option(
    "--noise",
    metavar="TREE",
    multiple=True,
    type=DUMP_PATH,
    help="Run that should agree with B, as one in another layout or type; its errors are the "
    "tolerances: up to 4 times the largest one is normal, up to 10 times suspicious. Repeatable.",
)
@click.option("--equal-nan", is_flag=True, help="Count NaN as equal to NaN at the same position.")
@click.option(
    "--match",
    metavar="RULES",
    default="exact,type,sequence",
    help="Rules that pair calls, in the order in which they apply: exact, mapping, type, "
    "sequence; default: exact,type,sequence.",
)
@click.option(
    "--map",
    "mapping",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File of names for the rule mapping: lines NAME_A,NAME_B, or a JSON object.",
)
@click.option(
    "--unshard/--by-rank",
    default=None,
    help="Join the ranks of each side before they are compared, or compare rank with rank; "
    "default: joined where the jobs had different numbers of ranks or other layouts.",
)
@click.option("--msaccucmp", is_flag=True, help="Compute the ten measures of msaccucmp as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object to stdout.")
@click.option(
    "--csv",
    "tables",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write tables to DIR in the form of api_dump_compare.",
)
@click.option(
    "--html",
    "page",
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a page with charts to FILE.",
)
@click.option(
    "--all", "everything", is_flag=True, help="List every row, whether or not it differs."
)
@click.option(
    "--limit", type=_NUMBER_RANGE, help="Maximum number of rows listed; 0 lists all that differ."
)
@click.option(
    "--processes",
    type=click.IntRange(min=1),
    help="Maximum number of processes; default: all cores.",
)
@click.option(
    "--dask", metavar="ADDRESS", default="", help="Compare on the workers of this Dask scheduler."
)
def diff(
    *,
    a: Path,
    b: Path,
    as_json: bool,
    tables: Path | None,
    page: Path | None,
    everything: bool,
    limit: int | None,
    **arguments: Any,
) -> int:
    """Compare two dumps and show where they first differ.

    A and B are trees of any layout, or the folder of one rank or one iteration in a tree; B is the
    reference. Exit code 1 when a tensor differs or has no counterpart.

    Verdicts: same, equal bytes or numbers; normal, different within the tolerances; suspicious, up
    to 2.5 times more than noise runs, rounding or --tolerance explain; different, beyond that; nan,
    NaN or infinity on one side; shape, other shapes; unmatched, no counterpart; unreadable, damaged
    or missing; unknown, nothing that can be compared, or a difference that says nothing.
    """
    # Imported on use, because `rankdump --help` imports this module and does not need the
    # comparison.
    from rankdump._cli import diff_report

    if page is not None:
        diff_report.check_html_page(page)
    report = diff_report.compare_paths(a, b, arguments)
    if as_json:
        diff_report.print_report_json(report)
    else:
        diff_report.print_report(report, everything=everything, limit=limit)
    written = diff_report.write_report_files(report, tables, page)
    if not as_json:
        print_lines(written)
    return 0 if report.agrees else 1

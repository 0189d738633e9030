"""`rankdump diff`: compares two dumps, and says first where they part."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from rankdump import reader
from rankdump.cli.diff_paths import Place, place_of
from rankdump.cli.diff_view import extras, lead, remarks, rows_table, totals, unmatched
from rankdump.cli.options import TREE, iterations_of
from rankdump.cli.progress import counting
from rankdump.cli.screen import say, show_table, table_width
from rankdump.cli.text import counted, label
from rankdump.contract.plan import Iterations
from rankdump.diff import json_form
from rankdump.diff.api_tables import from_report, write
from rankdump.diff.run import compare
from rankdump.diff.summary import excerpt
from rankdump.diff.values import Report
from rankdump.reader import Dump

_LIMIT = 20
_NUMBER = click.IntRange(min=0)
_ERROR = click.FloatRange(min=0)


@click.command()
@click.argument("a", type=TREE)
@click.argument("b", type=TREE)
@click.option("--rank", type=_NUMBER, help="Only this rank.")
@click.option("--rank-a", type=_NUMBER, help="This rank of A; with --rank-b two are compared.")
@click.option("--rank-b", type=_NUMBER, help="This rank of B.")
@click.option("--iteration", callback=iterations_of, help='Only these, as "0|2-3".')
@click.option("--iteration-a", type=_NUMBER, help="This one of A; with --iteration-b two of them.")
@click.option("--iteration-b", type=_NUMBER, help="This one of B.")
@click.option("--operator", "--op", metavar="GLOB", help="Only those whose name or type matches.")
@click.option("--side", type=click.Choice(["input", "output"]), help="Only this side.")
@click.option("--rtol", type=_ERROR, default=1e-4, help="Close: atol + rtol * |b|; 1e-4.")
@click.option("--atol", type=_ERROR, default=1e-4, help="The same; 1e-4.")
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
@click.option("--limit", type=_NUMBER, help="Most rows listed; 0: all that differ.")
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
    if page is not None:
        _check_page(page)
    report = _compared(a, b, asked)
    if as_json:
        sys.stdout.writelines(json_form.text(report))
    else:
        _show(report, everything=everything, limit=limit)
    written = _written(report, tables, page)
    if not as_json:
        say(written)
    return 0 if report.agrees else 1


def _compared(a: Path, b: Path, asked: Mapping[str, Any]) -> Report:
    places = place_of(a), place_of(b)
    iterations: Iterations | None = asked["iteration"]
    own = {
        f"{name}_{side}": _one(name, side, getattr(place, name), asked)
        for side, place in zip("ab", places, strict=True)
        for name in ("rank", "iteration")
    }
    options: dict[str, Any] = {
        **asked,
        **own,
        "iteration": iterations.text if iterations else None,
    }
    with counting("comparing") as tell:
        return compare(*map(_source, places), **options, progress=tell)


def _source(place: Place) -> str | Dump:
    if place.graph is None:
        return str(place.root)
    return reader.open(place.root).where(graph=place.graph)


def _one(name: str, side: str, said: int | None, asked: Mapping[str, Any]) -> int | None:
    """Return the rank or iteration of a side; a path and an option may not contradict."""
    given: int | None = asked[f"{name}_{side}"]
    common: int | Iterations | None = asked[name]
    if said is None:
        return given
    wanted = common if given is None else given
    if not (wanted in (None, said) or (isinstance(wanted, Iterations) and said in wanted)):
        raise click.UsageError(f"{side.upper()} is the folder of {name} {said} alone")
    return said


def _check_page(page: Path) -> None:
    """Say at once what would otherwise be said after the work."""
    try:
        import rankdump.diff.html  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise click.UsageError(
            f"--html needs bokeh, pip install 'rankdump[report]': {error}"
        ) from None
    if not page.absolute().parent.is_dir():
        raise click.UsageError(f"--html {page}: its folder does not exist")


def _show(report: Report, *, everything: bool, limit: int | None) -> None:
    most = (None if everything else _LIMIT) if limit is None else limit or None
    rows = excerpt(report, most, everything=everything)
    say([*lead(report), "", *totals(report)])
    if rows:
        say([""])
        show_table(rows_table(rows, report, width=table_width()))
    left = len(excerpt(report, None, everything=everything)) - len(rows)
    more = f"... {counted(left, 'more row')}: --limit 0 lists all that differ, --all every one"
    say([more] if left else [])
    told = [
        *extras(rows),
        *remarks(rows, everything=everything),
        *unmatched(report, everything=everything),
        *report.notes,
    ]
    say(["", *told] if told else [])


def _written(report: Report, tables: Path | None, page: Path | None) -> list[str]:
    """Write the files that were asked for; return a sentence for each kind."""
    said: list[str] = []
    if tables is not None:
        steps = from_report(report).items()
        files = [path for step, of_step in steps for path in write(of_step, tables, step)]
        said.append(f"{counted(len(files), 'table')} written to {tables}")
    if page is not None:
        from rankdump.diff import html

        try:
            page.write_text(html.page(report, label), encoding="utf-8")
        except OSError as error:
            raise click.ClickException(f"{page}: cannot be written: {error.strerror}") from None
        said.append(f"{page} written")
    return said

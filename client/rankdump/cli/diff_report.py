"""What `rankdump diff` does: the comparison that was asked for, its lines, its files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rankdump import reader
from rankdump.cli.diff_paths import Place, place_of
from rankdump.cli.diff_view import extras, lead, remarks, rows_table, totals, unmatched
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


def compared(a: Path, b: Path, asked: Mapping[str, Any]) -> Report:
    """Compare what two paths and the options of the command mean."""
    places = place_of(a), place_of(b)
    asked = dict(asked)
    iterations: Iterations | None = asked.pop("iterations")
    own = {
        f"{name}_{side}": _one(name, side, getattr(place, name), asked | {"iteration": iterations})
        for side, place in zip("ab", places, strict=True)
        for name in ("rank", "iteration")
    }
    dumps = _dumps(places, asked)
    options: dict[str, Any] = {
        **asked,
        **own,
        "iteration": iterations.text if iterations else None,
    }
    with counting("comparing") as tell:
        return compare(*dumps, **options, progress=tell)


def _dumps(places: Sequence[Place], asked: dict[str, Any]) -> list[Dump]:
    """Open the trees, each once; what `compare` does not choose by is taken out of `asked`."""
    opened = {place.root: reader.open(place.root) for place in places}
    glob, pattern, job_id = (asked.pop(name) for name in ("op", "op_regex", "job_id"))
    asked["operator"] = glob or pattern
    dumps: list[Dump] = []
    for side, place in zip("ab", places, strict=True):
        dump = opened[place.root].of_job(asked.pop(f"job_{side}") or job_id)
        dump = dump if place.graph is None else dump.where(graph=place.graph)
        dumps.append(dump.where(operator=pattern) if glob and pattern else dump)
    return dumps


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


def check_page(page: Path) -> None:
    """Say at once what would otherwise be said after the work."""
    try:
        import rankdump.diff.html  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        raise click.UsageError(
            f"--html needs bokeh, pip install 'rankdump[report]': {error}"
        ) from None
    if not page.absolute().parent.is_dir():
        raise click.UsageError(f"--html {page}: its folder does not exist")


def as_json(report: Report) -> None:
    """Print a report as one JSON object."""
    sys.stdout.writelines(json_form.text(report))


def show(report: Report, *, everything: bool, limit: int | None) -> None:
    """Print a report for people: where it starts, counts, the rows asked for, what else is told."""
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


def write_files(report: Report, tables: Path | None, page: Path | None) -> list[str]:
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

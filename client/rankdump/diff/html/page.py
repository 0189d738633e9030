"""The page as a whole: what is said in words, and where charts and tables stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from bokeh.embed import file_html
from bokeh.resources import INLINE

from rankdump.diff import wording
from rankdump.diff.html.columns import Spelling, operator_columns, row_columns
from rankdump.diff.html.plots import by_operator, histograms
from rankdump.diff.html.tables import sortable
from rankdump.diff.html.template import TEMPLATE
from rankdump.diff.summary import (
    accused,
    lonely,
    operators,
    other_origins,
    worst_first,
)
from rankdump.diff.values import Origin, Report, Suspect

MOST_DRAWN = 20_000
"""Lines of a table and points of a chart; a browser scrolls through more with pain."""
_MOST_LISTED = 1_000


def page(report: Report, spelt: Spelling, *, most: int = MOST_DRAWN) -> str:
    """Return the page, its tables with names as `spelt` has them.

    Of more rows or operators than `most`, those that disagree come first.
    """
    called = operators(report.rows)
    shown_rows = worst_first(report.rows, most)
    kept = {id(row) for row in worst_first([each.worst for each in called], most)}
    shown_calls = [each for each in called if id(each.worst) in kept]
    models = [
        by_operator(shown_calls, accused(report), "by_operator"),
        *histograms(report.rows),
        sortable(operator_columns(shown_calls, spelt), "operators"),
        sortable(row_columns(shown_rows, spelt), "tensors"),
    ]
    said: dict[str, object] = {
        "charts": [model.name for model in models],
        "lead": _lead(report),
        "mood": "fine" if report.agrees else "",
        "totals": _lines([f"a: {report.a}", f"b: {report.b}", wording.tally(report.rows)]),
        "cut_operators": _cut(len(shown_calls), len(called), "operators"),
        "cut_tensors": _cut(len(shown_rows), len(report.rows), "pairs of tensors"),
        "unmatched": _unmatched(report),
        "notes": _list(report.notes),
        "settings": _settings(report),
    }
    return file_html(
        models, INLINE, title="rankdump diff", template=TEMPLATE, template_variables=said
    )


def _lead(report: Report) -> str:
    blocks = [_origin(origin, report) for origin in report.origins]
    if not any(origin.kind == "difference" for origin in report.origins):
        blocks.insert(0, f"<h2>{escape(wording.outline(report))}</h2>")
    types = wording.types(report)
    blocks += [f"<p>{escape(types)}</p>"] if types else []
    others = other_origins(report)
    if others:
        blocks.append("<h3>Otherwise on these ranks alone</h3>")
        blocks += [_origin(origin, report) for origin in others]
    return "\n".join(f"<div>{block}</div>" for block in blocks)


def _origin(origin: Origin, report: Report) -> str:
    heading = f"<h2>{escape(wording.title(origin))}</h2>"
    shown = origin.suspects[:_MOST_LISTED]
    return heading + "".join(_suspect(each, origin, report) for each in shown)


def _suspect(suspect: Suspect, origin: Origin, report: Report) -> str:
    ranks = wording.ranks_of(origin, suspect, report)
    stack = "\n".join(f"{line.file}:{line.line}  {line.code}" for line in suspect.source)
    innermost = wording.line_of(suspect.source)
    parts = [
        f"<p class=operator>{escape(wording.name(suspect, str))}</p>",
        f"<p>{escape(wording.when(suspect, ranks))}</p>",
        f"<p>{escape(suspect.reason)}</p>",
    ]
    if innermost:
        whole = f"<pre>{escape(stack)}</pre>"
        summary = f"<summary><code>{escape(innermost)}</code></summary>"
        parts.append(f"<details>{summary}{whole}</details>")
    return "".join(parts)


def _unmatched(report: Report) -> str:
    parts: list[str] = []
    for side, calls in lonely(report.rows).items():
        names = [
            f"{wording.name(row, str)} (rank {row.rank}, iteration {row.iteration})"
            for row in calls
        ]
        if names:
            heading = f"<h3>Only in {side}: {len(names):,}</h3>"
            parts.append(heading + _list(names[:_MOST_LISTED]))
            parts.append(_cut(min(len(names), _MOST_LISTED), len(names), "calls"))
    return "".join(parts) or "<p>Every call has a partner.</p>"


def _settings(report: Report) -> str:
    said = [wording.tolerances(report), f"took {report.seconds:.3g} s"]
    mapping = [f"{a} is {b}" for a, b in list(report.settings.mapping.items())[:_MOST_LISTED]]
    return _list([*said, *mapping])


def _cut(shown: int, total: int, noun: str) -> str:
    if shown == total:
        return ""
    text = f"{shown:,} of {total:,} {noun} are shown, the first that disagree before all others"
    return f"<p class=cut>{text}. --json has every one.</p>"


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)

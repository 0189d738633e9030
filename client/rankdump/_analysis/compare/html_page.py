"""HTML page of a report with tables and charts. The page works offline: its content security policy
forbids the browser to fetch anything.

This module and `html_widgets` need bokeh: `pip install 'rankdump[report]'`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from bokeh.embed import file_html
from bokeh.resources import INLINE

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.html_widgets import (
    NameShortener,
    build_operator_columns,
    build_row_columns,
    build_sortable_table,
    draw_histograms,
    draw_operator_chart,
)
from rankdump._analysis.compare.report import ComparisonReport, DivergenceOrigin, SuspectCall
from rankdump._analysis.compare.report_summary import (
    collect_suspect_keys,
    find_unmatched_calls,
    format_kinds,
    get_own_place,
    list_other_origins,
    list_suspect_ranks,
    select_worst_rows,
    summarize_operators,
)

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""bokeh evaluates generated code and has its images in data URLs, so both are allowed."""
_STYLE = """
html body { height: auto; margin: 0 auto; max-width: 1500px; padding: 24px 32px 64px;
  background: #fff; color: #1c2430;
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 17px; font-weight: 600; color: #5a6675; margin: 0 0 12px; }
h2 { font-size: 17px; margin: 40px 0 8px; }
h3 { font-size: 15px; margin: 16px 0 4px; }
p { margin: 2px 0; }
pre { margin: 6px 0; overflow-x: auto; }
code, pre, .operator { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
.lead { border-left: 5px solid #c1121f; background: #faf6f5; padding: 12px 20px; }
.lead.fine { border-color: #3a7d44; background: #f5faf6; }
.lead h2 { margin: 4px 0; }
.lead .operator { font-size: 17px; font-weight: 600; overflow-wrap: anywhere; }
.totals, .caption, .cut { color: #5a6675; }
.totals { margin-top: 12px; }
.cut { font-style: italic; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 24px; }
ul { margin: 4px 0; padding-left: 20px; max-height: 420px; overflow-y: auto; }
li { overflow-wrap: anywhere; }
"""
PAGE_TEMPLATE = (
    "{% block preamble %}"
    f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_SECURITY_POLICY}">'
    "{% endblock %}{% block postamble %}"
    f"<style>{_STYLE}</style>"
    "{% endblock %}"
    """
{% block contents %}
<h1>rankdump diff</h1>
<section class="lead {{ mood }}">{{ lead }}</section>
<section class="totals">{{ totals }}</section>
<h2>Error by operator</h2>
<p class="caption">The largest absolute error of each pair of calls, or of extremes and mean where
only statistics are known; a ring marks a suspected origin. Circles agree, diamonds differ, stars
have NaN or infinity where the other side does not, triangles have no partner. A click on a rank
hides it.</p>
{{ cut_operators }}
{{ embed(roots.by_operator) }}
<h2>Distribution of errors</h2>
<p class="caption">Tensors with an error of 0 or an unknown error are left out.</p>
<div class="pair">
{% if "absolute" in charts %}<div>{{ embed(roots.absolute) }}</div>{% endif %}
{% if "relative" in charts %}<div>{{ embed(roots.relative) }}</div>{% endif %}
</div>
<h2>Operators</h2>
{{ cut_operators }}
{{ embed(roots.operators) }}
<h2>Tensors</h2>
{{ cut_tensors }}
{{ embed(roots.tensors) }}
<h2>Without a partner</h2>
{{ unmatched }}
{% if notes %}<h2>Notes</h2>{{ notes }}{% endif %}
<h2>Settings</h2>
{{ settings }}
{% endblock %}
"""
)


MAX_DRAWN_ROWS = 20_000
"""Largest number of lines in a table and of points in a chart, because browsers scroll slowly
through more.
"""
_MAX_LISTED_ITEMS = 1_000


def render_page(
    report: ComparisonReport, shorten: NameShortener, *, most: int = MAX_DRAWN_ROWS
) -> str:
    """Return the page; `shorten` is applied to the names in its tables.

    If there are more than `most` rows or operators, those that disagree are preferred.
    """
    called = summarize_operators(report.rows)
    shown_rows = select_worst_rows(report.rows, most)
    kept = {id(row) for row in select_worst_rows([each.worst for each in called], most)}
    shown_calls = [each for each in called if id(each.worst) in kept]
    models = [
        draw_operator_chart(shown_calls, collect_suspect_keys(report)),
        *draw_histograms(report.rows),
        build_sortable_table(build_operator_columns(shown_calls, shorten), "operators"),
        build_sortable_table(build_row_columns(shown_rows, shorten), "tensors"),
    ]
    variables: dict[str, object] = {
        "charts": [model.name for model in models],
        "lead": _render_lead(report),
        "mood": "fine" if report.agrees else "",
        "totals": _render_lines(
            [f"a: {report.a}", f"b: {report.b}", report_text.format_verdict_counts(report.rows)]
        ),
        "cut_operators": _render_cut(len(shown_calls), len(called), "operators"),
        "cut_tensors": _render_cut(len(shown_rows), len(report.rows), "pairs of tensors"),
        "unmatched": _render_unmatched(report),
        "notes": _render_list([*report.notes, *report_text.list_card_remarks(report)]),
        "settings": _render_settings(report),
    }
    return file_html(
        models, INLINE, title="rankdump diff", template=PAGE_TEMPLATE, template_variables=variables
    )


def _render_lead(report: ComparisonReport) -> str:
    nonfinite, differences = report_text.list_leading_origins(report)
    causes = report_text.list_card_differences(report)
    blocks = [f"<h2>{escape(causes[0])}</h2>{_render_list(causes[1:])}"] if causes else []
    blocks += [_render_origin(origin, report) for origin in nonfinite]
    blocks += [_render_origin(origin, report) for origin in differences]
    if not differences:
        blocks.append(f"<h2>{escape(report_text.describe_missing_origin(report))}</h2>")
    blocks.append(_render_lines(format_kinds(report.rows, str)))
    types = report_text.describe_dtype_differences(report)
    blocks += [f"<p>{escape(types)}</p>"] if types else []
    others = list_other_origins(report)
    if others:
        blocks.append("<h3>Other origins on single ranks</h3>")
        blocks += [_render_origin(origin, report) for origin in others]
    return "\n".join(f"<div>{block}</div>" for block in blocks)


def _render_origin(origin: DivergenceOrigin, report: ComparisonReport) -> str:
    heading = f"<h2>{escape(report_text.describe_origin(origin))}</h2>"
    shown = origin.suspects[:_MAX_LISTED_ITEMS]
    return heading + "".join(_render_suspect(each, origin, report) for each in shown)


def _render_suspect(
    suspect: SuspectCall, origin: DivergenceOrigin, report: ComparisonReport
) -> str:
    ranks = list_suspect_ranks(origin, suspect, report)
    stack = "\n".join(f"{line.file}:{line.line}  {line.code}" for line in suspect.source)
    innermost = report_text.format_innermost_line(suspect.source)
    parts = [
        f"<p class=operator>{escape(report_text.format_call_name(suspect, str))}</p>",
        f"<p>{escape(report_text.format_ranks_and_moment(suspect, ranks))}</p>",
        f"<p>{escape(suspect.reason)}</p>",
    ]
    if innermost:
        whole = f"<pre>{escape(stack)}</pre>"
        summary = f"<summary><code>{escape(innermost)}</code></summary>"
        parts.append(f"<details>{summary}{whole}</details>")
    return "".join(parts)


def _render_unmatched(report: ComparisonReport) -> str:
    parts: list[str] = []
    for side, calls in find_unmatched_calls(report.rows).items():
        names = [
            f"{report_text.format_call_name(row, str)} (rank {rank}, iteration {iteration})"
            for row in calls
            for rank, iteration in [get_own_place(row, report)]
        ]
        if names:
            heading = f"<h3>Only in {side}: {len(names):,}</h3>"
            parts.append(heading + _render_list(names[:_MAX_LISTED_ITEMS]))
            parts.append(_render_cut(min(len(names), _MAX_LISTED_ITEMS), len(names), "calls"))
    return "".join(parts) or "<p>Every call has a partner.</p>"


def _render_settings(report: ComparisonReport) -> str:
    settings = [report_text.describe_settings(report), f"took {report.seconds:.3g} s"]
    mapping = [f"{a} is {b}" for a, b in list(report.settings.mapping.items())[:_MAX_LISTED_ITEMS]]
    return _render_list([*settings, *mapping])


def _render_cut(shown: int, total: int, noun: str) -> str:
    if shown == total:
        return ""
    text = f"{shown:,} of {total:,} {noun} are shown; those that disagree come first"
    return f"<p class=cut>{text}. --json has all of them.</p>"


def _render_list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _render_lines(lines: Iterable[str]) -> str:
    return "".join(f"<p>{escape(line)}</p>" for line in lines)

"""Lines of text about where a difference or a value that is not finite starts, for the terminal and
for the page of a comparison. Pure.
"""

from __future__ import annotations

from rankdump._analysis.compare import report_text
from rankdump._analysis.compare.report import ComparisonReport, DivergenceOrigin, SuspectCall
from rankdump._analysis.compare.report_summary import list_other_origins
from rankdump._core.scope_names import format_scope_name
from rankdump._core.units import format_count

_MAX_CANDIDATES_SHOWN = 5


def format_origins(report: ComparisonReport) -> list[str]:
    """Return the lines about origins of the whole job; those of non-finite values lead."""
    nonfinite, differences = report_text.list_leading_origins(report)
    lines = [line for each in (*nonfinite, *differences) for line in _format_origin(each, report)]
    missing = [] if differences else [report_text.describe_missing_origin(report)]
    types = report_text.describe_dtype_differences(report)
    return [*lines, *missing, *([types] if types else [])]


def format_rank_origins(report: ComparisonReport) -> list[str]:
    """Return the lines about origins on single ranks that are not those of the whole job."""
    lines: list[str] = []
    for origin in list_other_origins(report):
        lines += _format_rank_origin(origin)
    return lines


def _format_origin(origin: DivergenceOrigin, report: ComparisonReport) -> list[str]:
    if not origin.certain or len(origin.suspects) != 1:
        lines = [report_text.describe_origin(origin)]
        for each in origin.suspects[:_MAX_CANDIDATES_SHOWN]:
            lines += [
                f"  {_name_suspect(each)}: "
                f"{report_text.format_ranks_and_moment(each, [each.rank])}",
                *_format_reason(each, 4),
            ]
        left = len(origin.suspects) - _MAX_CANDIDATES_SHOWN
        return [
            *lines,
            *([f"  ... and {format_count(left, 'more candidate')}"] if left > 0 else []),
        ]
    (found,) = origin.suspects
    ranks = report_text.list_suspect_ranks(origin, found, report)
    return [
        f"{report_text.describe_origin(origin)} {_name_suspect(found)}",
        f"  {report_text.format_ranks_and_moment(found, ranks)}",
        *_format_reason(found, 2),
    ]


def _format_reason(suspect: SuspectCall, indent: int) -> list[str]:
    parts = (suspect.reason, report_text.format_innermost_line(suspect.source))
    return [f"{'':{indent}}{line}" for line in parts if line]


def _format_rank_origin(origin: DivergenceOrigin) -> list[str]:
    if not origin.suspects:
        return []
    first = origin.suspects[0]
    what = "" if origin.kind == "difference" else f", NaN or infinity in {origin.side}"
    starts = "starts at" if origin.certain else "may start at"
    return [
        f"on rank {first.rank} alone{what}: {starts} {_name_suspect(first)}, "
        f"{report_text.format_moment(first)}",
        *_format_reason(first, 2),
    ]


def _name_suspect(suspect: SuspectCall) -> str:
    return report_text.format_call_name(suspect, format_scope_name)

"""Sentences and formatted numbers of a report, and the lines that say where a difference starts,
for the terminal and for pages. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from rankdump._analysis.compare.card_findings import CardFinding
from rankdump._analysis.compare.error_tolerance import NORMAL_RATIO
from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    DTYPE_FINDING_PREFIX,
    ComparisonReport,
    ComparisonRow,
    DivergenceOrigin,
    SuspectCall,
    TensorVerdict,
)
from rankdump._analysis.compare.report_summary import (
    count_verdicts,
    list_other_origins,
    list_suspect_ranks,
)
from rankdump._core.graph import SourceLine
from rankdump._core.number_ranges import ranges
from rankdump._core.scope_names import format_scope_name
from rankdump._core.units import format_count
from rankdump._layout.api_tree import parse_call_name

NO_VALUE = "-"
_MAX_CANDIDATES_SHOWN = 5
_NOT_COMPARED_REASONS = {
    TensorVerdict.UNMATCHED: "without a partner",
    TensorVerdict.UNREADABLE: "that could not be read",
    TensorVerdict.UNKNOWN: "without elements or statistics that both sides have",
}
_NEARLY_ONE = 0.9999
_COSINE_ROUNDING = 1e-12


def format_number(value: float) -> str:
    """Return a number with four significant digits; a dash for NaN."""
    return NO_VALUE if math.isnan(value) else f"{value:.4g}"


def format_cosine(cosine: float) -> str:
    """Return a cosine as text: 1 only within rounding, `>0.9999` for values below that."""
    nearly = _NEARLY_ONE < cosine < 1 - _COSINE_ROUNDING
    return f">{_NEARLY_ONE}" if nearly else format_number(cosine)


def format_share(share: float) -> str:
    """Return a share as a percentage: 100 only for all elements, 0 only for none."""
    if math.isnan(share):
        return NO_VALUE
    if _NEARLY_ONE < share < 1:
        return f">{_NEARLY_ONE:.2%}"
    return f"<{1 - _NEARLY_ONE:.2%}" if 0 < share < 1 - _NEARLY_ONE else f"{share:.2%}"


def describe_origin(origin: DivergenceOrigin) -> str:
    """Return the start of a sentence about an origin, up to the operator's name."""
    subject = "the difference"
    if origin.kind == "nonfinite":
        subject = f"NaN or infinity in {origin.side}"
    if not origin.suspects:
        return f"where {subject} starts is not known: {origin.ambiguity}"
    if origin.certain:
        return f"{subject} starts at"
    why = f": {origin.ambiguity}" if origin.ambiguity else ""
    return f"where {subject} starts is ambiguous{why}"


def format_call_name(called: ComparisonRow | SuspectCall, shorten: Callable[[str], str]) -> str:
    """Return the name of a pair of calls; both names, if they still differ after `shorten` was
    applied.

    The second name of an API call lacks the direction, which both have in common.
    """
    if called.name_a and called.name_b and called.name_a != called.name_b:
        api = parse_call_name(called.name_b)
        own, other = shorten(called.name_a), shorten(api.stem if api else called.name_b)
        return own if own == other else f"{own} (b: {other})"
    return shorten(called.name_a or called.name_b)


def format_ranks_and_moment(suspect: SuspectCall, ranks: Iterable[int]) -> str:
    """Return ranks, iteration and direction of a suspect: `rank 0-1, iteration 3, backward`."""
    return f"rank {ranges(ranks)}, {format_moment(suspect)}"


def format_moment(called: ComparisonRow | SuspectCall) -> str:
    """Return the iteration and direction of a call: `iteration 3, backward` or `constants,
    forward`.
    """
    direction = "backward" if called.backward else "forward"
    return f"{format_iterations([called.iteration])}, {direction}"


def format_iterations(numbers: Iterable[int]) -> str:
    """Return iterations as text: `iteration 1-3`, or `constants`."""
    dated = [number for number in numbers if number != CONSTANTS_ITERATION]
    return f"iteration {ranges(dated)}" if dated else "constants"


def format_innermost_line(source: tuple[SourceLine, ...]) -> str:
    """Return the innermost line of a stack, `net.py:17 x = layer(x)`; empty for an empty stack."""
    if not source:
        return ""
    line = source[-1]
    return f"{line.file}:{line.line}  {line.code}".rstrip()


def list_leading_origins(
    report: ComparisonReport,
) -> tuple[list[DivergenceOrigin], list[DivergenceOrigin]]:
    """Return the origins of non-finite values, which come first in a report, and those of a
    difference.
    """
    nonfinite = [origin for origin in report.origins if origin.kind == "nonfinite"]
    return nonfinite, [origin for origin in report.origins if origin.kind != "nonfinite"]


def describe_missing_origin(report: ComparisonReport) -> str:
    """Return one sentence for a report that has no origin."""
    counts = count_verdicts(report.rows)
    if not set(counts) - set(_NOT_COMPARED_REASONS):
        texts = [
            f"{format_count(count, 'tensor')} {_NOT_COMPARED_REASONS[verdict]}"
            for verdict, count in counts.items()
        ]
        return f"nothing was compared: {', '.join(texts) or 'no pair of tensors'}"
    if report.agrees:
        return "no value differs" if describe_dtype_differences(report) else "nothing differs"
    if all(row.agrees for row in report.rows):
        return "all tensors that were compared agree, but not everything was compared"
    return "no operator was found whose inputs agree and whose outputs do not"


def describe_dtype_differences(report: ComparisonReport) -> str:
    """Return one sentence about pairs whose element types differ; empty if there are none."""
    found = [
        (row, finding.removeprefix(DTYPE_FINDING_PREFIX))
        for row in report.rows
        for finding in row.outcome.findings
        if finding.startswith(DTYPE_FINDING_PREFIX)
    ]
    if not found:
        return ""
    first, what = found[0]
    pairs = format_count(len(found), "pair")
    where = (
        f"{first.place_name} of {format_call_name(first, str)}, rank {first.rank}, "
        f"{format_moment(first)}"
    )
    return f"types differ in {pairs} of tensors, first {what}: {where}"


def format_verdict_counts(rows: Iterable[ComparisonRow]) -> str:
    """Return counts by verdict: `24 pairs of tensors: 3 different, 1 normal, 20 same`."""
    found = count_verdicts(rows)
    total = sum(found.values())
    noun = "pair of tensors" if total == 1 else "pairs of tensors"
    parts = ", ".join(f"{count:,} {verdict.value}" for verdict, count in found.items())
    return f"{total:,} {noun}" + (f": {parts}" if parts else "")


def list_card_differences(report: ComparisonReport) -> list[str]:
    """Return lines about differences before the first operator; with a title if there are any."""
    found = [each.text for each in report.card_findings if _is_leading(each)]
    return ["before the first operator:", *(f"  {text}" for text in found)] if found else []


def list_card_remarks(report: ComparisonReport) -> list[str]:
    """Return the sentences about run cards that are no leading findings: what was not compared, and
    different command lines, which nearly all pairs of runs have.
    """
    return [each.text for each in report.card_findings if not _is_leading(each)]


def _is_leading(finding: CardFinding) -> bool:
    return finding.is_difference and finding.subject != "command"


def describe_settings(report: ComparisonReport) -> str:
    """Return one sentence about the settings of the comparison."""
    settings = report.settings
    asked = settings.tolerances
    nan = ", NaN equals NaN" if asked.equal_nan else ""
    rules = ", ".join(settings.rules)
    close = f"{asked.atol:g} + {asked.rtol:g} * |b|"
    if settings.noise:
        close = f"{NORMAL_RATIO:g} times the error of {' and '.join(settings.noise)}"
    elif settings.by_rounding:
        close = f"{NORMAL_RATIO:g} times the error of rounding, as no noise run was given (--noise)"
    named = "".join(
        f", {'rounding' if each.error is None else f'{each.error:g}'} for {each.pattern}"
        for each in settings.named
    )
    return f"normal is within {close}{named}{nan}; matched by {rules}"


def format_dtype_and_shape(row: ComparisonRow) -> str:
    """Return type and shape of a pair; of both sides if they differ: `float32 (8,4)`."""
    texts = [
        f"{tensor.dtype or '?'} {_format_shape(tensor.shape)}"
        for tensor in (row.pair.a, row.pair.b)
        if tensor is not None
    ]
    return " / ".join(dict.fromkeys(texts))


def join_findings(row: ComparisonRow) -> str:
    """Return all findings of a row as one text."""
    return "; ".join(row.outcome.findings)


def format_statistic_differences(row: ComparisonRow) -> str:
    """Return the differences of statistics: `max 0.25, min 0`."""
    return ", ".join(
        f"{item} {format_number(by)}" for item, by in row.outcome.statistic_differences.items()
    )


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else f"({','.join(map(str, shape))})"


def format_origins(report: ComparisonReport) -> list[str]:
    """Return the lines about the origins in the whole job; those of non-finite values
    come first.
    """
    nonfinite, differences = list_leading_origins(report)
    lines = [line for each in (*nonfinite, *differences) for line in _format_origin(each, report)]
    missing = [] if differences else [describe_missing_origin(report)]
    types = describe_dtype_differences(report)
    return [*lines, *missing, *([types] if types else [])]


def format_rank_origins(report: ComparisonReport) -> list[str]:
    """Return the lines about origins on single ranks that differ from those of the whole job."""
    lines: list[str] = []
    for origin in list_other_origins(report):
        for first in origin.suspects[:1]:
            what = "" if origin.kind == "difference" else f", NaN or infinity in {origin.side}"
            starts = "starts at" if origin.certain else "may start at"
            lines += [
                f"on rank {first.rank} alone{what}: {starts} {_name_suspect(first)}, "
                f"{format_moment(first)}",
                *_format_reason(first, 2),
            ]
    return lines


def _format_origin(origin: DivergenceOrigin, report: ComparisonReport) -> list[str]:
    if not origin.certain or len(origin.suspects) != 1:
        lines = [describe_origin(origin)]
        for each in origin.suspects[:_MAX_CANDIDATES_SHOWN]:
            where = format_ranks_and_moment(each, [each.rank])
            lines += [f"  {_name_suspect(each)}: {where}", *_format_reason(each, 4)]
        left = len(origin.suspects) - _MAX_CANDIDATES_SHOWN
        lines += [f"  ... and {format_count(left, 'more candidate')}"] if left > 0 else []
        return lines
    (found,) = origin.suspects
    ranks = list_suspect_ranks(origin, found, report)
    return [
        f"{describe_origin(origin)} {_name_suspect(found)}",
        f"  {format_ranks_and_moment(found, ranks)}",
        *_format_reason(found, 2),
    ]


def _format_reason(suspect: SuspectCall, indent: int) -> list[str]:
    parts = (suspect.reason, format_innermost_line(suspect.source))
    return [f"{'':{indent}}{line}" for line in parts if line]


def _name_suspect(suspect: SuspectCall) -> str:
    return format_call_name(suspect, format_scope_name)

"""Sentences and formatted numbers of a report, the same wherever it is shown. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from rankdump._analysis.compare.report import (
    CONSTANTS_ITERATION,
    DTYPE_FINDING_PREFIX,
    ComparisonReport,
    ComparisonRow,
    DivergenceOrigin,
    SuspectCall,
    TensorVerdict,
)
from rankdump._analysis.compare.report_summary import count_verdicts, list_ranks_alike
from rankdump._analysis.reader.query import ranges
from rankdump._core.graph import SourceLine
from rankdump._layout.api_tree import parse_call_name

NO_VALUE = "-"
_NOT_COMPARED_REASONS = {
    TensorVerdict.UNMATCHED: "without a partner",
    TensorVerdict.UNREADABLE: "that could not be read",
    TensorVerdict.UNKNOWN: "without elements or statistics that both sides have",
}
_NEARLY_ONE = 0.9999
_COSINE_ROUNDING = 1e-12


def format_number(value: float) -> str:
    """Return a number with four digits that count; a dash for one that has no meaning."""
    return NO_VALUE if math.isnan(value) else f"{value:.4g}"


def format_cosine(cosine: float) -> str:
    """Return a cosine; 1 only where nothing but rounding is apart, `>0.9999` for nearly."""
    nearly = _NEARLY_ONE < cosine < 1 - _COSINE_ROUNDING
    return f">{_NEARLY_ONE}" if nearly else format_number(cosine)


def format_share(share: float) -> str:
    """Return a share in per cent: 100 only for all, 0 only for none."""
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


def format_call_name(called: ComparisonRow | SuspectCall, spelt: Callable[[str], str]) -> str:
    """Return the name of a pair of calls; both where they are called differently.

    Of a call of an API the second goes without the direction, which both have in common.
    """
    if called.name_a and called.name_b and called.name_a != called.name_b:
        api = parse_call_name(called.name_b)
        return f"{spelt(called.name_a)} (b: {spelt(api.stem if api else called.name_b)})"
    return spelt(called.name_a or called.name_b)


def format_ranks_and_moment(suspect: SuspectCall, ranks: Iterable[int]) -> str:
    """Return when it ran, and on which ranks: `rank 0-1, iteration 3, backward`."""
    return f"rank {ranges(ranks)}, {format_moment(suspect)}"


def format_moment(called: ComparisonRow | SuspectCall) -> str:
    """Return when it ran: `iteration 3, backward`; of what never changes `constants`."""
    direction = "backward" if called.backward else "forward"
    return f"{format_iterations([called.iteration])}, {direction}"


def format_iterations(numbers: Iterable[int]) -> str:
    """Return iterations in words: `iteration 1-3`, `constants`."""
    dated = [number for number in numbers if number != CONSTANTS_ITERATION]
    return f"iteration {ranges(dated)}" if dated else "constants"


def list_suspect_ranks(
    origin: DivergenceOrigin, suspect: SuspectCall, report: ComparisonReport
) -> list[int]:
    """Return the ranks to name with a suspect: all that start there where it is certain."""
    return list_ranks_alike(origin, report) if origin.certain else [suspect.rank]


def format_innermost_line(source: tuple[SourceLine, ...]) -> str:
    """Return the innermost line of a stack, `net.py:17  x = layer(x)`; empty without one."""
    if not source:
        return ""
    line = source[-1]
    return f"{line.file}:{line.line}  {line.code}".rstrip()


def describe_missing_origin(report: ComparisonReport) -> str:
    """Return one sentence for a report in which no origin was found."""
    told = count_verdicts(report.rows)
    if not set(told) - set(_NOT_COMPARED_REASONS):
        return (
            f"nothing was compared: {_describe_not_compared(told) or 'there is no pair of tensors'}"
        )
    if report.agrees:
        return "no value differs" if describe_dtype_differences(report) else "nothing differs"
    if all(row.outcome.verdict.agrees for row in report.rows):
        return "all tensors that were compared agree, but not everything was compared"
    return "no operator was found whose inputs agree and whose outputs do not"


def _describe_not_compared(told: Mapping[TensorVerdict, int]) -> str:
    return ", ".join(
        f"{count:,} {'tensor' if count == 1 else 'tensors'} {_NOT_COMPARED_REASONS[verdict]}"
        for verdict, count in told.items()
    )


def describe_dtype_differences(report: ComparisonReport) -> str:
    """Return one sentence on pairs whose types differ, compared all the same; empty for none."""
    found = [
        (row, finding.removeprefix(DTYPE_FINDING_PREFIX))
        for row in report.rows
        for finding in row.outcome.findings
        if finding.startswith(DTYPE_FINDING_PREFIX)
    ]
    if not found:
        return ""
    first, what = found[0]
    pairs = "1 pair" if len(found) == 1 else f"{len(found):,} pairs"
    where = (
        f"{first.slot_name} of {format_call_name(first, str)}, rank {first.rank}, "
        f"{format_moment(first)}"
    )
    return f"types differ in {pairs} of tensors, first {what}: {where}"


def format_verdict_counts(rows: Iterable[ComparisonRow]) -> str:
    """Return counts by verdict: `24 pairs of tensors: 3 different, 1 close, 20 equal`."""
    found = count_verdicts(rows)
    total = sum(found.values())
    noun = "pair of tensors" if total == 1 else "pairs of tensors"
    parts = ", ".join(f"{count:,} {verdict.value}" for verdict, count in found.items())
    return f"{total:,} {noun}" + (f": {parts}" if parts else "")


def describe_settings(report: ComparisonReport) -> str:
    """Return the settings in one sentence."""
    settings = report.settings
    asked = settings.tolerances
    nan = ", NaN equals NaN" if asked.equal_nan else ""
    rules = ", ".join(settings.rules)
    return f"close is within {asked.atol:g} + {asked.rtol:g} * |b|{nan}; matched by {rules}"


def format_dtype_and_shape(row: ComparisonRow) -> str:
    """Return type and shape of a pair, both where the sides differ: `float32 (8,4)`."""
    said = [
        f"{tensor.dtype or '?'} {_format_shape(tensor.shape)}"
        for tensor in (row.pair.a, row.pair.b)
        if tensor is not None
    ]
    return " / ".join(dict.fromkeys(said))


def join_findings(row: ComparisonRow) -> str:
    """Return what was found in a row, in words."""
    return "; ".join(row.outcome.findings)


def format_statistic_differences(row: ComparisonRow) -> str:
    """Return by how much statistics differ: `max 0.25, min 0`."""
    return ", ".join(
        f"{item} {format_number(by)}" for item, by in row.outcome.statistic_differences.items()
    )


def _format_shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else f"({','.join(map(str, shape))})"

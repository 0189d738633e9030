"""What a report says in words, wherever it is shown: sentences and rounded numbers. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from rankdump.contract.graph import SourceLine
from rankdump.contract.layout.api_name import call_of
from rankdump.diff.summary import counts, ranks_alike
from rankdump.diff.values import CONSTANTS, TYPES, Origin, Report, Row, Suspect, Verdict
from rankdump.reader import ranges

NONE = "-"
_WHY_NOT = {
    Verdict.UNMATCHED: "without a partner",
    Verdict.UNREADABLE: "that could not be read",
    Verdict.UNKNOWN: "without elements or figures that both sides have",
}
_NEARLY = 0.9999
_ROUNDING = 1e-12


def rounded(value: float) -> str:
    """Return a number with four digits that count; a dash for one that has no meaning."""
    return NONE if math.isnan(value) else f"{value:.4g}"


def likeness(cosine: float) -> str:
    """Return a cosine; 1 only where nothing but rounding is apart, `>0.9999` for nearly."""
    nearly = _NEARLY < cosine < 1 - _ROUNDING
    return f">{_NEARLY}" if nearly else rounded(cosine)


def percent(share: float) -> str:
    """Return a share in per cent: 100 only for all, 0 only for none."""
    if math.isnan(share):
        return NONE
    if _NEARLY < share < 1:
        return f">{_NEARLY:.2%}"
    return f"<{1 - _NEARLY:.2%}" if 0 < share < 1 - _NEARLY else f"{share:.2%}"


def title(origin: Origin) -> str:
    """Return what starts, up to where the operator's name follows."""
    subject = "the difference"
    if origin.kind == "nonfinite":
        subject = f"what is not finite in {origin.side}"
    if not origin.suspects:
        return f"where {subject} starts is not known: {origin.why}"
    if origin.certain:
        return f"{subject} starts at"
    why = f": {origin.why}" if origin.why else ""
    return f"where {subject} starts is ambiguous{why}"


def name(called: Row | Suspect, spelt: Callable[[str], str]) -> str:
    """Return the name of a pair of calls; both where they are called differently.

    Of a call of an API the second goes without the direction, which both have in common.
    """
    if called.name_a and called.name_b and called.name_a != called.name_b:
        api = call_of(called.name_b)
        return f"{spelt(called.name_a)} (b: {spelt(api.stem if api else called.name_b)})"
    return spelt(called.name_a or called.name_b)


def when(suspect: Suspect, ranks: Iterable[int]) -> str:
    """Return when it ran, and on which ranks: `rank 0-1, iteration 3, backward`."""
    return f"rank {ranges(ranks)}, {moment(suspect)}"


def moment(called: Row | Suspect) -> str:
    """Return when it ran: `iteration 3, backward`; of what never changes `constants`."""
    direction = "backward" if called.backward else "forward"
    return f"{iterations([called.iteration])}, {direction}"


def iterations(numbers: Iterable[int]) -> str:
    """Return iterations in words: `iteration 1-3`, `constants`."""
    dated = [number for number in numbers if number != CONSTANTS]
    return f"iteration {ranges(dated)}" if dated else "constants"


def ranks_of(origin: Origin, suspect: Suspect, report: Report) -> list[int]:
    """Return the ranks to name with a suspect: all that start there where it is certain."""
    return ranks_alike(origin, report) if origin.certain else [suspect.rank]


def line_of(source: tuple[SourceLine, ...]) -> str:
    """Return the innermost line of a stack, `net.py:17  x = layer(x)`; empty without one."""
    if not source:
        return ""
    line = source[-1]
    return f"{line.file}:{line.line}  {line.code}".rstrip()


def outline(report: Report) -> str:
    """Return one sentence for a report in which no origin was found."""
    told = counts(report.rows)
    if not set(told) - set(_WHY_NOT):
        return f"nothing was compared: {_why_not(told) or 'there is no pair of tensors'}"
    if report.agrees:
        return "no value differs" if types(report) else "nothing differs"
    if all(row.outcome.verdict.agrees for row in report.rows):
        return "all tensors that were compared agree, but not everything was compared"
    return "no operator was found whose inputs agree and whose outputs do not"


def _why_not(told: Mapping[Verdict, int]) -> str:
    return ", ".join(
        f"{count:,} {'tensor' if count == 1 else 'tensors'} {_WHY_NOT[verdict]}"
        for verdict, count in told.items()
    )


def types(report: Report) -> str:
    """Return one sentence on pairs whose types differ, compared all the same; empty for none."""
    found = [
        (row, finding.removeprefix(TYPES))
        for row in report.rows
        for finding in row.outcome.findings
        if finding.startswith(TYPES)
    ]
    if not found:
        return ""
    first, what = found[0]
    pairs = "1 pair" if len(found) == 1 else f"{len(found):,} pairs"
    where = f"{first.place} of {name(first, str)}, rank {first.rank}, {moment(first)}"
    return f"types differ in {pairs} of tensors, first {what}: {where}"


def tally(rows: Iterable[Row]) -> str:
    """Return counts by verdict: `24 pairs of tensors: 3 different, 1 close, 20 equal`."""
    found = counts(rows)
    total = sum(found.values())
    noun = "pair of tensors" if total == 1 else "pairs of tensors"
    parts = ", ".join(f"{count:,} {verdict.value}" for verdict, count in found.items())
    return f"{total:,} {noun}" + (f": {parts}" if parts else "")


def tolerances(report: Report) -> str:
    """Return the settings in one sentence."""
    settings = report.settings
    asked = settings.tolerances
    nan = ", NaN equals NaN" if asked.equal_nan else ""
    rules = ", ".join(settings.rules)
    return f"close is within {asked.atol:g} + {asked.rtol:g} * |b|{nan}; matched by {rules}"


def extents(row: Row) -> str:
    """Return type and shape of a pair, both where the sides differ: `float32 (8,4)`."""
    said = [
        f"{tensor.dtype or '?'} {_shape(tensor.shape)}"
        for tensor in (row.pair.a, row.pair.b)
        if tensor is not None
    ]
    return " / ".join(dict.fromkeys(said))


def findings(row: Row) -> str:
    """Return what was found in a row, in words."""
    return "; ".join(row.outcome.findings)


def apart(row: Row) -> str:
    """Return by how much figures are apart: `max 0.25, min 0`."""
    return ", ".join(f"{item} {rounded(by)}" for item, by in row.outcome.figures.items())


def _shape(shape: tuple[int, ...] | None) -> str:
    return "?" if shape is None else f"({','.join(map(str, shape))})"

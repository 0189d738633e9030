"""Summary of a report: counts by verdict, operators, calls without a partner, the rows to show
first, and one line for each kind of tensor: parameters, buffers, gradients, activations. Pure.

Two runs with different batch sizes have no activation in common, while parameters and gradients
still show whether they compute the same.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rankdump._analysis.compare.report import (
    ComparisonReport,
    ComparisonRow,
    DivergenceOrigin,
    ProgramPlace,
    SuspectCall,
    TensorVerdict,
)
from rankdump._core.record import BUFFER_ARGUMENT
from rankdump._core.units import format_count
from rankdump._layout.tree_paths import PARAMETER_OP_TYPE

VERDICTS_BY_SEVERITY = (
    TensorVerdict.NAN,
    TensorVerdict.SHAPE,
    TensorVerdict.DIFFERENT,
    TensorVerdict.SUSPICIOUS,
    TensorVerdict.UNREADABLE,
    TensorVerdict.UNMATCHED,
    TensorVerdict.UNKNOWN,
    TensorVerdict.NORMAL,
    TensorVerdict.SAME,
)
"""Verdicts from the worst to the best."""
_ERROR_STATISTICS = ("max", "min", "avg")
_SEVERITY_ORDER = {verdict: at for at, verdict in enumerate(VERDICTS_BY_SEVERITY)}
CallKey: TypeAlias = "tuple[int, int, int, str, str]"
"""Rank, iteration, position and both names, which identify one pair of calls in a report."""


@dataclass(frozen=True, slots=True)
class OperatorSummary:
    """A pair of calls, with a summary of its tensors."""

    worst: ComparisonRow
    """The row with the worst verdict; if there are several, the one with the largest error."""
    tensors: int
    differing: int
    error: float
    """Largest error; NaN if no error is known, or if the worst row has no error as a number."""
    cosine: float
    """Lowest cosine; NaN if no tensor has one."""
    close_share: float
    """Lowest share of close elements; NaN if no tensor was measured."""


def count_verdicts(rows: Iterable[ComparisonRow]) -> dict[TensorVerdict, int]:
    """Return the number of rows with each verdict that occurs, the worst verdict first."""
    found = Counter(row.outcome.verdict for row in rows)
    return {verdict: found[verdict] for verdict in VERDICTS_BY_SEVERITY if found[verdict]}


def get_severity(row: ComparisonRow) -> int:
    """Return the severity of the verdict of a row: 0 is the worst."""
    return _SEVERITY_ORDER[row.outcome.verdict]


def summarize_operators(rows: Iterable[ComparisonRow]) -> list[OperatorSummary]:
    """Return the pairs of calls in the order of their first rows."""
    groups: dict[CallKey, list[ComparisonRow]] = {}
    for row in rows:
        groups.setdefault(make_call_key(row), []).append(row)
    return [_summarize_operator(group) for group in groups.values()]


def make_call_key(called: ComparisonRow | SuspectCall) -> CallKey:
    """Return the key of a pair of calls, which is unique in a report."""
    place = called.rank, called.iteration
    if isinstance(called, SuspectCall) and called.row_place is not None:
        place = called.row_place
    return *place, called.position, called.name_a, called.name_b


def find_unmatched_calls(rows: Iterable[ComparisonRow]) -> Mapping[str, list[ComparisonRow]]:
    """Return the first row of each call without a partner, by the side that has it."""
    found: dict[str, dict[CallKey, ComparisonRow]] = {"a": {}, "b": {}}
    for row in rows:
        if bool(row.name_a) != bool(row.name_b):
            found["a" if row.name_a else "b"].setdefault(make_call_key(row), row)
    return {side: list(calls.values()) for side, calls in found.items()}


def get_own_place(row: ComparisonRow, report: ComparisonReport) -> ProgramPlace:
    """Return the rank and iteration of a row: those of side b if only b has the call."""
    return row.place if row.name_a else report.places_of_b.get(row.place, row.place)


def max_absolute(row: ComparisonRow) -> float:
    """Return the largest absolute error of a row: 0 for equal tensors, NaN if none is known."""
    if row.outcome.measures is not None:
        return row.outcome.measures.max_absolute
    return 0.0 if row.outcome.verdict is TensorVerdict.SAME else math.nan


def get_row_error(row: ComparisonRow) -> float:
    """Return the error of a row: that of elements, else that of extremes and mean; NaN if it is
    unknown.
    """
    known = max_absolute(row)
    if not math.isnan(known):
        return known
    apart = row.outcome.statistic_differences
    return max((abs(apart[item]) for item in _ERROR_STATISTICS if item in apart), default=math.nan)


def list_suspect_ranks(
    origin: DivergenceOrigin, suspect: SuspectCall, report: ComparisonReport
) -> list[int]:
    """Return the ranks to name with a suspect: if the origin is certain, all ranks with the same
    one.
    """
    if not origin.certain:
        return [suspect.rank]
    same = (
        each.suspects[0].rank
        for each in report.rank_origins
        if each.certain and each.suspects and _has_same_suspect(each, origin)
    )
    return sorted({origin.suspects[0].rank, *same})


def list_other_origins(report: ComparisonReport) -> list[DivergenceOrigin]:
    """Return the origins on ranks that differ from the origins of the whole job."""
    known = [origin for origin in report.origins if origin.suspects]
    return [
        each
        for each in report.rank_origins
        if not any(
            _has_same_suspect(each, origin) or _contains_suspects(origin, each) for origin in known
        )
    ]


def collect_suspect_keys(report: ComparisonReport) -> set[CallKey]:
    """Return the keys of the calls that may be an origin, in the whole job or on a rank."""
    origins = (*report.origins, *report.rank_origins)
    return {make_call_key(each) for origin in origins for each in origin.suspects}


def select_excerpt(
    report: ComparisonReport, limit: int | None, *, everything: bool = False
) -> list[ComparisonRow]:
    """Return all rows of suspects and the rows that do not agree, in order.

    If there are more rows than `limit`, return a range whose first half has the earliest suspect.
    """
    suspects = collect_suspect_keys(report)
    kept = [
        row
        for row in report.rows
        # Calls without a partner are listed separately.
        if everything
        or make_call_key(row) in suspects
        or (not row.agrees and row.name_a and row.name_b)
    ]
    if limit is None or len(kept) <= limit:
        return kept
    at = next((at for at, row in enumerate(kept) if make_call_key(row) in suspects), 0)
    begin = 0 if at < limit // 2 else min(at - limit // 4, len(kept) - limit)
    return kept[begin : begin + limit]


def select_worst_rows(rows: Sequence[ComparisonRow], most: int) -> list[ComparisonRow]:
    """Return at most `most` rows, in order; rows that disagree are preferred."""
    if len(rows) <= most:
        return list(rows)
    bad = [at for at, row in enumerate(rows) if not row.agrees][:most]
    good = [at for at, row in enumerate(rows) if row.agrees]
    free = most - len(bad)
    thinned = [good[at * len(good) // free] for at in range(min(free, len(good)))]
    return [rows[at] for at in sorted((*bad, *thinned))]


def _summarize_operator(group: list[ComparisonRow]) -> OperatorSummary:
    measured = [row.outcome.measures for row in group if row.outcome.measures is not None]
    worst = min(group, key=lambda row: (get_severity(row), -_get_error_or_zero(row)))
    error = max(_drop_nan(map(get_row_error, group)), default=math.nan)
    # If the worst row has no error as a number, the error of another row would look like the whole
    # result.
    if not worst.agrees and math.isnan(get_row_error(worst)):
        error = math.nan
    return OperatorSummary(
        worst=worst,
        tensors=len(group),
        differing=sum(not row.agrees for row in group),
        error=error,
        cosine=min(_drop_nan(each.cosine for each in measured), default=math.nan),
        close_share=min((each.close_share for each in measured), default=math.nan),
    )


def _drop_nan(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _get_error_or_zero(row: ComparisonRow) -> float:
    known = get_row_error(row)
    return 0.0 if math.isnan(known) else known


def _has_same_suspect(one: DivergenceOrigin, other: DivergenceOrigin) -> bool:
    return _make_likeliest_key(one) == _make_likeliest_key(other)


def _make_likeliest_key(origin: DivergenceOrigin) -> tuple[object, ...]:
    calls = [(s.iteration, s.name_a, s.name_b, s.backward) for s in origin.suspects[:1]]
    return origin.kind, origin.side, *calls


def _contains_suspects(origin: DivergenceOrigin, each: DivergenceOrigin) -> bool:
    return (origin.kind, origin.side) == (each.kind, each.side) and set(
        map(make_call_key, each.suspects)
    ) <= set(map(make_call_key, origin.suspects))


TENSOR_KINDS = ("parameters", "buffers", "gradients", "activations", "activation gradients")
"""Kinds of tensors, in the order in which they are listed; `gradients` are those of parameters."""


@dataclass(frozen=True, slots=True)
class KindSummary:
    """Summary of the tensors of one kind."""

    kind: str
    """One of TENSOR_KINDS."""
    rows: tuple[ComparisonRow, ...]

    @property
    def first_bad(self) -> ComparisonRow | None:
        """First pair whose values do not agree, in the order of the report."""
        bad = (TensorVerdict.DIFFERENT, TensorVerdict.SUSPICIOUS, TensorVerdict.NAN)
        return next((row for row in self.rows if row.outcome.verdict in bad), None)

    @property
    def widest(self) -> ComparisonRow | None:
        """Pair with the largest error among those that do not agree; None if no error is known."""
        apart = [
            row
            for row in self.rows
            if row.outcome.verdict in (TensorVerdict.DIFFERENT, TensorVerdict.SUSPICIOUS)
            and not math.isnan(get_row_error(row))
        ]
        return max(apart, key=get_row_error, default=None)

    @property
    def batch_sizes(self) -> tuple[int, int] | None:
        """First extents on sides a and b, if all pairs with different shapes differ
        only in these.
        """
        shapes = {
            (a.shape, b.shape)
            for row in self.rows
            if row.outcome.verdict is TensorVerdict.SHAPE
            for a, b in [(row.pair.a, row.pair.b)]
            if a is not None and b is not None
        }
        sizes: set[tuple[int, int]] = set()
        for a, b in shapes - {(None, None)}:
            if not a or not b or a[1:] != b[1:]:
                return None
            sizes.add((a[0], b[0]))
        return sizes.pop() if len(sizes) == 1 else None


def find_tensor_kind(row: ComparisonRow) -> str:
    """Return the kind of a row's tensors, which is one of TENSOR_KINDS."""
    if row.op_type != PARAMETER_OP_TYPE:
        return "activation gradients" if row.backward else "activations"
    if row.backward:
        return "gradients"
    sides = (row.pair.a, row.pair.b)
    is_buffer = any(each is not None and each.argument == BUFFER_ARGUMENT for each in sides)
    return "buffers" if is_buffer else "parameters"


def summarize_kinds(rows: Iterable[ComparisonRow]) -> list[KindSummary]:
    """Return the kinds that occur, in the order of TENSOR_KINDS."""
    found: dict[str, list[ComparisonRow]] = {kind: [] for kind in TENSOR_KINDS}
    for row in rows:
        found[find_tensor_kind(row)].append(row)
    return [KindSummary(kind, tuple(of_kind)) for kind, of_kind in found.items() if of_kind]


def format_kinds(rows: Iterable[ComparisonRow], shorten: Callable[[str], str]) -> list[str]:
    """Return one line for each kind: `parameters 24 pairs: 2 different, 22 same; ...`."""
    found = summarize_kinds(rows)
    width = max((len(each.kind) for each in found), default=0)
    return [f"{each.kind:<{width}}  {_describe_kind(each, shorten)}" for each in found]


def _describe_kind(found: KindSummary, shorten: Callable[[str], str]) -> str:
    counts = count_verdicts(found.rows)
    parts = ", ".join(f"{count:,} {verdict.value}" for verdict, count in counts.items())
    details: list[str] = []
    widest, first = found.widest, found.first_bad
    if widest is not None:
        error = get_row_error(widest)
        details.append(f"by at most {error:.4g} ({_name_place(widest, shorten)})")
    elif first is not None:
        details.append(f"first {_name_place(first, shorten)}")
    sizes = found.batch_sizes if TensorVerdict.SHAPE in counts else None
    if sizes is not None:
        details.append(
            f"first extent {sizes[0]:,} in a and {sizes[1]:,} in b, as of other batch sizes"
        )
    return "; ".join((f"{format_count(len(found.rows), 'pair')}: {parts}", *details))


def _name_place(row: ComparisonRow, shorten: Callable[[str], str]) -> str:
    when = f"iteration {row.iteration}" if row.iteration >= 0 else "constants"
    slot = "" if row.op_type == PARAMETER_OP_TYPE else f" {row.place_name}"
    name = shorten(row.name).removeprefix("Gradients/")
    return f"{name}{slot}, rank {row.rank}, {when}"

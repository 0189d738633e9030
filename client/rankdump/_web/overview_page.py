"""Page with the overview of a tree: what to examine first, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from rankdump._analysis.table.table_schema import NONFINITE
from rankdump._analysis.table_index import compare_with_tree
from rankdump._analysis.tree_overview import (
    BadTensor,
    OverviewVerdict,
    RankBalance,
    TimeoutBudget,
    TreeOverview,
    make_balance,
    make_budgets,
    make_verdict,
    read_overview,
    sum_balances,
)
from rankdump._core.events import Finding
from rankdump._core.freeze_record import describe_absence, describe_cause
from rankdump._core.number_ranges import ranges
from rankdump._core.scope_names import format_scope_name
from rankdump._web.dump_source import DumpSource, JobAttempt
from rankdump._web.page_kinds import LineExcerpt, PageKind

_MAX_LISTED = 50
"""Largest number of sentences, findings or ranks in one part."""
_MAX_BAD = 8
_BAD_COLUMNS = (
    "rank, iteration, position, CAST(name AS VARCHAR) AS name, CAST(side AS VARCHAR) AS side, slot"
)


class BadTensorRow(NamedTuple):
    """A tensor that is not finite, with the short name of its operator."""

    tensor: BadTensor
    short_name: str


class FaultSummary(NamedTuple):
    """The latest freeze of the black box."""

    cause: str
    iteration: int
    root: str
    first_bad: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OverviewPage:
    """Content of the page."""

    verdict: OverviewVerdict
    jobs: tuple[str, ...]
    attempts: tuple[JobAttempt, ...]
    """Attempts of all jobs in the tree."""
    ranks: str
    rank_count: int
    iterations: str
    iteration_count: int
    tensor_count: int
    problems: LineExcerpt
    fault: FaultSummary | None
    freezes: tuple[str, ...]
    bad: tuple[BadTensorRow, ...]
    bad_count: int
    findings: tuple[Finding, ...]
    finding_count: int
    missing: LineExcerpt
    card_differences: LineExcerpt
    card_remarks: LineExcerpt
    budgets: tuple[TimeoutBudget, ...]
    balances: tuple[RankBalance, ...]
    balance_count: int
    total: RankBalance
    table_note: str
    """How far the table is behind the tree; empty if it is up to date."""


def build_overview(source: DumpSource, _: None) -> OverviewPage:
    """Return the overview of a tree, with everything that the readers know about it."""
    overview = source.keep("overview", lambda: read_overview(source.root, *source.part))
    counts = source.get_rows(
        "SELECT count(*) AS tensors, count(max) AS measured, "
        f"count(*) FILTER (WHERE {NONFINITE}) AS bad FROM tensors"
    )[0]
    bad = _find_bad(source) if counts["bad"] else ()
    tallies = overview.tallies
    return OverviewPage(
        verdict=make_verdict(overview, bad, counts["measured"]),
        jobs=overview.jobs,
        attempts=source.attempts,
        ranks=ranges(overview.ranks),
        rank_count=len(overview.ranks),
        iterations=ranges(overview.iterations),
        iteration_count=len(overview.iterations),
        tensor_count=counts["tensors"],
        problems=_list(overview.problems),
        fault=_summarize_fault(overview),
        freezes=tuple(f"{each.kind}: {each.text}" for each in overview.freezes),
        bad=tuple(BadTensorRow(each, format_scope_name(each.name)) for each in bad),
        bad_count=counts["bad"],
        findings=overview.findings[:_MAX_LISTED],
        finding_count=len(overview.findings),
        missing=_list(overview.missing),
        card_differences=_list(overview.card_differences),
        card_remarks=_list(overview.card_remarks),
        budgets=make_budgets(overview.hints[:_MAX_LISTED]),
        balances=tuple(map(make_balance, tallies[:_MAX_LISTED])),
        balance_count=len(tallies),
        total=sum_balances(tallies),
        table_note=source.keep("lag", lambda: str(compare_with_tree(source.root)))
        if source.has_table
        else "the tree has no table: pages are slow in large trees until rankdump index writes one",
    )


def _find_bad(source: DumpSource) -> tuple[BadTensor, ...]:
    """Return the earliest tensors that are not finite; the clocks of one iteration are precise
    enough to order them.
    """
    rows = source.get_rows(
        f"SELECT {_BAD_COLUMNS} FROM tensors WHERE {NONFINITE} "
        f"ORDER BY iteration NULLS LAST, timestamp_us, rank, position LIMIT {_MAX_BAD}"
    )
    return tuple(BadTensor(**row) for row in rows)


def _list(sentences: tuple[str, ...]) -> LineExcerpt:
    return LineExcerpt(sentences[:_MAX_LISTED], len(sentences))


def _summarize_fault(overview: TreeOverview) -> FaultSummary | None:
    fault = overview.fault
    if fault is None:
        return None
    bad = fault.first_bad_value
    first = ""
    if bad is not None:
        where = f"{bad.tensor.side} {bad.tensor.slot} of {format_scope_name(bad.tensor.op_name)}"
        source = f", {bad.source}" if bad.source else ""
        first = f"rank {bad.rank}, iteration {bad.iteration}: {where}{source}"
    lines = (
        *(each.describe() for each in fault.standing_calls),
        *(describe_cause(each) for each in fault.later_causes),
        *map(describe_absence, fault.absent),
    )
    return FaultSummary(
        describe_cause(fault.cause), fault.iteration, fault.root, first, lines[:_MAX_LISTED]
    )


OVERVIEW = PageKind(
    "/", "overview.html", "Overview", lambda _: None, build_overview, has_attempts=True
)

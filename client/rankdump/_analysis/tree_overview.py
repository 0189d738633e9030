"""Overview of a tree: one sentence that says what to look at first, and what the readers know about
faults, findings, losses and hints.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import NamedTuple, TypeVar

from rankdump._analysis.black_box.fault_report import (
    FaultReport,
    describe_bad_value,
    make_fault_report,
)
from rankdump._analysis.black_box.freeze_files import (
    list_freezes,
    list_frozen_trees,
    read_freeze_records,
)
from rankdump._analysis.compare.card_findings import compare_ranks
from rankdump._analysis.reader.coordinator_files import read_hints, read_order
from rankdump._analysis.reader.foreign_dumps import find_foreign_reader
from rankdump._analysis.reader.manifests import read_tree_sessions
from rankdump._analysis.reader.rank_tallies import (
    IterationTotals,
    RankTally,
    format_status_sentences,
    sum_iterations,
    tally_ranks,
)
from rankdump._analysis.reader.run_cards import FoundCards, read_run_cards
from rankdump._analysis.reader.session_ends import mark_ended_sessions
from rankdump._analysis.reader.tree import Tree
from rankdump._analysis.reader.tree_status import faults, status_of
from rankdump._analysis.reader.tree_walk import walk
from rankdump._core.events import Finding
from rankdump._core.scope_names import format_scope_name
from rankdump._core.status import FreezeStatus, StatusView
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_count
from rankdump.errors import CorruptedError, RankdumpError

_T = TypeVar("_T")
_MAX_CARD_PLACES = 64
"""Iterations of ranks whose run cards are read for an overview: those of the first iterations."""


class OverviewLevel(str, Enum):
    """How urgent a verdict is."""

    FAULT = "fault"
    WARNING = "warning"
    UNKNOWN = "unknown"
    """Nothing is known to be wrong, and no statistics say more."""
    GOOD = "good"


class BadTensor(NamedTuple):
    """A tensor whose statistics are not finite."""

    rank: int
    iteration: int | None
    position: int
    name: str
    side: str
    slot: int


class OverviewVerdict(NamedTuple):
    """What to look at first."""

    level: OverviewLevel
    text: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class TreeOverview:
    """What the readers know about a tree, without its tensors."""

    jobs: tuple[str, ...]
    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    tallies: tuple[RankTally, ...]
    totals: IterationTotals
    problems: tuple[str, ...]
    """Damage, and iterations whose tensors are not accounted for."""
    missing: tuple[str, ...]
    """What is not in the tree and why: dropped, incomplete, retired, absent."""
    freezes: tuple[FreezeStatus, ...]
    fault: FaultReport | None
    """Of the latest freeze."""
    findings: tuple[Finding, ...]
    hints: tuple[TimeoutHint, ...]
    card_differences: tuple[str, ...]
    card_remarks: tuple[str, ...]
    has_order: bool


def read_overview(root: Path) -> TreeOverview:
    """Return the overview of a tree; reads balances, and never a tensor.

    What one reader cannot read becomes a problem, and the others are asked all the same.
    """
    tree = _walk_balances(root)
    # A dump of another tool has no balances, so none of its iterations is incomplete.
    view = StatusView() if tree.tool else _read_status(root, tree)
    problems = list(faults(tree))
    freezes, damaged = list_freezes(root)
    problems += damaged
    fault = _catch(lambda: _read_fault(root), problems, None) if freezes else None
    order = _catch(lambda: read_order(root), [], None)
    cards = _catch(lambda: _read_first_cards(root, view), problems, FoundCards((), (), 0))
    card_findings = compare_ranks(cards) if cards.cards or cards.problems else ()
    sentences = () if tree.tool else format_status_sentences(view)
    return TreeOverview(
        jobs=tuple(dict.fromkeys(tally.job_id for tally in tally_ranks(view) if tally.job_id)),
        ranks=tuple(tree.ranks),
        iterations=_list_iterations(tree, view),
        tallies=tally_ranks(view),
        totals=sum_iterations(view.iterations),
        problems=tuple(dict.fromkeys(problems)),
        missing=tuple(each for each in sentences if each not in problems),
        freezes=freezes,
        fault=fault,
        findings=order.findings if order is not None else (),
        hints=_catch(lambda: read_hints(root), [], ()),
        card_differences=tuple(each.text for each in card_findings if each.is_difference),
        card_remarks=tuple(each.text for each in card_findings if not each.is_difference),
        has_order=order is not None,
    )


def _list_iterations(tree: Tree, view: StatusView) -> tuple[int, ...]:
    places = tree.entries.by_place() if tree.tool else ()
    found = {place.iteration for place in places if place.dated}
    return tuple(sorted(found.union(each.iteration for each in view.iterations)))


def _walk_balances(root: Path) -> Tree:
    try:
        return walk(root, balances_only=True)
    except CorruptedError:
        if find_foreign_reader(root) is None:
            raise
        return walk(root)


def _read_status(root: Path, tree: Tree) -> StatusView:
    return mark_ended_sessions(status_of(tree), read_tree_sessions(root), socket.gethostname())


def _read_first_cards(root: Path, view: StatusView) -> FoundCards:
    """Return the cards of the first iterations: a difference later on follows from these."""
    places = sorted({(each.iteration, each.rank) for each in view.iterations})
    chosen = set(places[:_MAX_CARD_PLACES])
    return read_run_cards(root, lambda rank, iteration: (iteration, rank) in chosen)


def _read_fault(root: Path) -> FaultReport:
    latest = list_frozen_trees(root)[-1]
    report = make_fault_report(str(latest), read_freeze_records(latest))
    return replace(report, ends=tuple(replace(each, stacks=()) for each in report.ends))


def _catch(read: Callable[[], _T], problems: list[str], default: _T) -> _T:
    try:
        return read()
    except RankdumpError as error:
        problems.append(str(error))
        return default


def make_verdict(
    overview: TreeOverview, bad: Sequence[BadTensor], measured: int
) -> OverviewVerdict:
    """Return the sentence about what to look at first, from the most urgent to the least. Pure.

    `bad` are tensors that are not finite, the earliest first, of `measured` that have statistics.
    """
    fault = overview.fault
    if overview.problems:
        more = len(overview.problems) - 1
        others = f" (and {format_count(more, 'more problem')})" if more else ""
        return OverviewVerdict(OverviewLevel.FAULT, f"{overview.problems[0]}{others}")
    if fault is not None and fault.first_bad_value is not None:
        found = fault.first_bad_value
        text = describe_bad_value(found, format_scope_name(found.tensor.op_name))
        return OverviewVerdict(OverviewLevel.FAULT, text)
    if bad:
        return OverviewVerdict(OverviewLevel.FAULT, _describe_bad_tensor(bad[0]))
    if fault is not None:
        return OverviewVerdict(
            OverviewLevel.FAULT, f"frozen at iteration {fault.iteration}: {fault.cause.text}"
        )
    if overview.findings:
        more = len(overview.findings) - 1
        others = f" (and {format_count(more, 'more finding')})" if more else ""
        text = f"{overview.findings[0].text}{others}"
        return OverviewVerdict(OverviewLevel.WARNING, text)
    urgent = [hint for hint in overview.hints if hint.level is not HintLevel.OK]
    if urgent:
        return OverviewVerdict(OverviewLevel.WARNING, urgent[0].reason)
    if overview.missing:
        return OverviewVerdict(OverviewLevel.WARNING, overview.missing[0])
    if overview.card_differences:
        text = f"ranks differ: {overview.card_differences[0]}"
        return OverviewVerdict(OverviewLevel.WARNING, text)
    level = OverviewLevel.GOOD if measured else OverviewLevel.UNKNOWN
    return OverviewVerdict(level, _describe_complete(overview, measured))


def _describe_bad_tensor(bad: BadTensor) -> str:
    when = "constants" if bad.iteration is None else f"iteration {bad.iteration}"
    where = f"{bad.side} {bad.slot} of {format_scope_name(bad.name)}"
    return f"first value that is not finite: rank {bad.rank}, {when}: {where}"


def _describe_complete(overview: TreeOverview, measured: int) -> str:
    finite = (
        f"none of {format_count(measured, 'measured tensor')} has a NaN or an infinity"
        if measured
        else "no statistics say whether they are finite"
    )
    count = overview.totals.expected
    if not count:
        return f"the tree does not say how many tensors it should have; {finite}"
    return (
        f"all {format_count(count, 'tensor')} that the plan selects are accounted for, on "
        f"{format_count(len(overview.ranks), 'rank')} in "
        f"{format_count(len(overview.iterations), 'iteration')}; {finite}"
    )


def find_budget_share(hint: TimeoutHint) -> float:
    """Return the part of a timeout that is used, or expected to be: the larger one, at most 1."""
    if hint.limit is None or not hint.limit.limit_us:
        return 0.0
    return min(1.0, max(hint.share, hint.projected_us / hint.limit.limit_us))

"""Overview of a tree: one sentence that says what to examine first, what the readers know about
faults, findings, losses and hints, and numbers about its jobs: the outcome of each rank's tensors,
and how much of its timeout each process group has used.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Sequence
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
    select_attempt,
    sum_iterations,
    tally_ranks,
)
from rankdump._analysis.reader.run_cards import FoundCards, read_run_cards
from rankdump._analysis.reader.tree import Tree
from rankdump._analysis.reader.tree_status import faults, mark_ended_sessions, status_of
from rankdump._analysis.reader.tree_walk import walk
from rankdump._core.events import Finding
from rankdump._core.scope_names import format_scope_name
from rankdump._core.status import FreezeStatus, StatusView
from rankdump._core.timeouts import HintLevel, TimeoutHint
from rankdump._core.units import format_count, format_duration, format_percentage
from rankdump.errors import CorruptedError, RankdumpError

_T = TypeVar("_T")
MAX_CARD_PLACES = 4096
"""Largest number of rank iterations whose run cards are read for an overview; the first iterations
are used.
"""


class OverviewLevel(str, Enum):
    """How urgent a verdict is."""

    FAULT = "fault"
    WARNING = "warning"
    UNKNOWN = "unknown"
    """Nothing is known to be wrong, but there are no statistics."""
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
    """Sentence that says what to examine first, with its urgency."""

    level: OverviewLevel
    text: str
    """One sentence."""


@dataclass(frozen=True, slots=True)
class TreeOverview:
    """Knowledge of the readers about a tree, without its tensors."""

    jobs: tuple[str, ...]
    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    tallies: tuple[RankTally, ...]
    totals: IterationTotals
    problems: tuple[str, ...]
    """Sentences about damage, and about iterations whose tensors are not accounted for."""
    missing: tuple[str, ...]
    """Sentences about what is not in the tree and why: dropped, incomplete, retired, absent."""
    freezes: tuple[FreezeStatus, ...]
    fault: FaultReport | None
    """Fault report of the latest freeze; None if there is none."""
    findings: tuple[Finding, ...]
    hints: tuple[TimeoutHint, ...]
    card_differences: tuple[str, ...]
    card_remarks: tuple[str, ...]


def read_overview(root: Path, job_id: str = "", attempt: int | None = None) -> TreeOverview:
    """Return the overview of a tree, or of a job or attempt in it; only balances are read, and no
    tensors.

    If a reader cannot read something, that becomes a problem, and the other readers are used all
    the same.
    """
    tree = _walk_balances(root, job_id, attempt)
    # A dump of another tool has no balances, so none of its iterations counts as incomplete.
    view = StatusView() if tree.tool else _read_status(root, tree, job_id, attempt)
    problems = list(faults(tree))
    freezes, damaged = list_freezes(root, job_id)
    problems += damaged
    fault = _catch(lambda: _read_fault(root), problems, None) if freezes else None
    if fault is not None and (
        job_id not in ("", fault.job_id) or attempt not in (None, fault.attempt)
    ):
        fault = None
    order = _catch(lambda: read_order(root, job_id=job_id), [], None)
    found = order.findings if order is not None else ()
    keeps, bound = _choose_cards(view)
    cards = _catch(
        lambda: read_run_cards(root, keeps, job_id=job_id, attempt=attempt),
        problems,
        FoundCards((), (), 0),
    )
    differences, remarks = _compare_cards(cards)
    sentences = () if tree.tool else format_status_sentences(view)
    tallies = tally_ranks(view)
    return TreeOverview(
        jobs=tuple(dict.fromkeys(tally.job_id for tally in tallies if tally.job_id)),
        ranks=tuple(tree.ranks),
        iterations=_list_iterations(tree, view),
        tallies=tallies,
        totals=sum_iterations(view.iterations),
        problems=tuple(dict.fromkeys(problems)),
        missing=tuple(each for each in sentences if each not in problems),
        freezes=freezes,
        fault=fault,
        findings=tuple(each for each in found if attempt in (None, each.attempt)),
        hints=_catch(lambda: read_hints(root, job_id), [], ()),
        card_differences=differences,
        card_remarks=(*remarks, *bound),
    )


def _compare_cards(cards: FoundCards) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the differences between ranks, and remarks, as `rankdump card` prints them."""
    found = compare_ranks(cards) if cards.cards or cards.problems else ()
    differences = tuple(each.text for each in found if each.is_difference)
    return differences, tuple(each.text for each in found if not each.is_difference)


def _list_iterations(tree: Tree, view: StatusView) -> tuple[int, ...]:
    places = tree.entries.by_place() if tree.tool else ()
    found = {place.iteration for place in places if place.dated}
    return tuple(sorted(found.union(each.iteration for each in view.iterations)))


def _walk_balances(root: Path, job_id: str, attempt: int | None) -> Tree:
    try:
        return walk(root, balances_only=True, job_id=job_id, attempt=attempt)
    except CorruptedError:
        if find_foreign_reader(root) is None:
            raise
        return walk(root)


def _read_status(root: Path, tree: Tree, job_id: str, attempt: int | None) -> StatusView:
    sessions = read_tree_sessions(root, job_id)
    view = mark_ended_sessions(status_of(tree), sessions, socket.gethostname())
    return view if attempt is None else select_attempt(view, attempt)


def _choose_cards(view: StatusView) -> tuple[Callable[[int, int], bool], tuple[str, ...]]:
    """Return which run cards are read, and a sentence if these are not all. Reading the first ones
    is sufficient, because a later difference follows from one in the first iterations.
    """
    places = sorted({(each.iteration, each.rank) for each in view.iterations})
    if len(places) <= MAX_CARD_PLACES:
        return lambda rank, iteration: True, ()
    chosen = set(places[:MAX_CARD_PLACES])
    text = (
        f"compared are the first {MAX_CARD_PLACES:,} run cards of {len(places):,}, up to iteration "
        f"{places[MAX_CARD_PLACES - 1][0]}: rankdump card compares all"
    )
    return lambda rank, iteration: (iteration, rank) in chosen, (text,)


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
    """Return the sentence about what to examine first, from the most urgent to the least. Pure.

    `bad` contains the tensors that are not finite, the earliest first; `measured` is the number of
    tensors that have statistics.
    """
    fault = overview.fault
    if overview.problems:
        return OverviewVerdict(OverviewLevel.FAULT, _name_first(overview.problems, "problem"))
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
        text = _name_first([each.text for each in overview.findings], "finding")
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


def _name_first(texts: Sequence[str], noun: str) -> str:
    more = len(texts) - 1
    return f"{texts[0]} (and {format_count(more, f'more {noun}')})" if more else texts[0]


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
    """Return the share of a timeout that is used, or expected to be used: the larger one, at most
    1.
    """
    if hint.limit is None or not hint.limit.limit_us:
        return 0.0
    return min(1.0, max(hint.share, hint.projected_us / hint.limit.limit_us))


class RankBalance(NamedTuple):
    """Outcome of the tensors of one rank, or of all ranks."""

    rank: int
    """Rank; -1 for the sum of all ranks."""
    attempt: int
    state: str
    iterations_complete: int
    iterations_seen: int
    expected: int
    stored: int
    linked: int
    degraded: int
    dropped: int
    bytes_in: int
    bytes_stored: int


def make_balance(tally: RankTally) -> RankBalance:
    """Return the balance of a rank in one attempt."""
    return _sum_tallies(tally.rank, tally.attempt, tally.described_state, [tally])


def sum_balances(tallies: Sequence[RankTally]) -> RankBalance:
    """Return the balance of all ranks."""
    return _sum_tallies(-1, 0, "", tallies)


def _sum_tallies(rank: int, attempt: int, state: str, tallies: Sequence[RankTally]) -> RankBalance:
    sums = sum_iterations(each for tally in tallies for each in tally.iterations)
    return RankBalance(
        *(rank, attempt, state),
        sum(tally.iterations_complete for tally in tallies),
        sum(tally.iterations_seen for tally in tallies),
        *(sums.expected, sums.stored, sums.linked, sums.degraded, sums.dropped),
        *(sums.bytes_in, sums.bytes_stored),
    )


class TimeoutBudget(NamedTuple):
    """How much of its timeout a process group has used."""

    group: str
    level: HintLevel
    share: float
    """Used share of the timeout, from 0 to 1."""
    percentage: str
    limit: str
    """The timeout as a duration; empty if none is known."""
    reason: str
    settings: tuple[str, ...]


def make_budgets(hints: Iterable[TimeoutHint]) -> tuple[TimeoutBudget, ...]:
    """Return the timeout budgets of hints, in the order of the hints."""
    return tuple(map(_make_budget, hints))


def _make_budget(hint: TimeoutHint) -> TimeoutBudget:
    share = find_budget_share(hint)
    limit = format_duration(hint.limit.limit_us) if hint.limit is not None else ""
    return TimeoutBudget(
        *(hint.group, hint.level, share, format_percentage(share), limit),
        *(hint.reason, hint.settings),
    )

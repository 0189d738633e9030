"""Content of the live page, made from a status. Pure: sentences about ranks and jobs come from the
functions that `rankdump status` uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rankdump._analysis.reader.job_sentences import (
    format_causes,
    format_freezes,
    format_merge_status,
    format_resource_usage,
)
from rankdump._analysis.reader.rank_tallies import (
    MIN_SHOWN_WAIT_US,
    RankTally,
    explain_no_ranks,
    find_ended_jobs,
    format_status_sentences,
    tally_ranks,
)
from rankdump._analysis.tree_overview import (
    OverviewLevel,
    OverviewVerdict,
    RankBalance,
    TimeoutBudget,
    find_budget_share,
    make_balance,
    make_budgets,
    sum_balances,
)
from rankdump._core.events import Finding
from rankdump._core.status import AgentStatus, SessionState, StatusView
from rankdump._core.timeouts import HintLevel
from rankdump._core.units import format_count

MAX_RANKS_LISTED = 128
"""Largest number of ranks that are listed for a job, because the list is sent to every browser when
it changes.
"""
_MAX_LISTED = 50


class LiveRank(NamedTuple):
    """A rank, with the outcome of its tensors so far."""

    balance: RankBalance
    is_bad: bool
    """Whether the rank has crashed, was lost, or waits in a call that cannot end."""
    host: str
    iteration: int | None
    """Latest iteration of which its daemon knows a tensor or a wait; None if there is none."""


class LiveJobState(NamedTuple):
    """A job with its ranks."""

    job_id: str
    is_running: bool
    summary: str
    """How many ranks are in which state."""
    ranks: tuple[LiveRank, ...]
    rank_count: int
    total: RankBalance


@dataclass(frozen=True, slots=True)
class LiveContent:
    """Content of the part that is refreshed."""

    verdict: OverviewVerdict
    problem: str
    """Why the content is not the latest; empty if it is."""
    jobs: tuple[LiveJobState, ...]
    sentences: tuple[str, ...]
    findings: tuple[Finding, ...]
    finding_count: int
    freezes: tuple[str, ...]
    budgets: tuple[TimeoutBudget, ...]
    agents: tuple[AgentStatus, ...]
    agent_count: int
    resources: tuple[str, ...]
    roots: tuple[str, ...]


def make_live_content(view: StatusView | None, problem: str) -> LiveContent:
    """Return the content for the latest known status."""
    known = view or StatusView()
    tallies = tally_ranks(known)
    ended = find_ended_jobs(tallies)
    by_job: dict[str, list[RankTally]] = {}
    for tally in tallies:
        by_job.setdefault(tally.job_id, []).append(tally)
    jobs = [_make_job(job_id, ranks, ended) for job_id, ranks in by_job.items()]
    jobs.sort(key=lambda job: not job.is_running)
    urgent = sorted(known.agents, key=lambda each: (each.connected, -each.lost_events, each.host))
    hints = sorted(
        known.hints, key=lambda each: (-find_budget_share(each), each.job_id, each.group)
    )
    causes = format_causes(known.hints, known.order_findings)
    sentences = (*format_status_sentences(known), *causes)
    merges = (format_merge_status(each, named=len(known.merges) > 1) for each in known.merges)
    return LiveContent(
        verdict=make_live_verdict(known, jobs, problem),
        problem=problem,
        jobs=tuple(jobs),
        # If there are no ranks, the verdict says everything.
        sentences=tuple(sentences[:_MAX_LISTED]) if jobs else (),
        findings=known.order_findings[-_MAX_LISTED:],
        finding_count=len(known.order_findings),
        freezes=tuple(format_freezes(known)[-_MAX_LISTED:]),
        budgets=make_budgets(hints[:_MAX_LISTED]),
        agents=tuple(urgent[:_MAX_LISTED]),
        agent_count=len(urgent),
        resources=(*format_resource_usage(known), *merges) if view is not None else (),
        roots=known.roots,
    )


def make_live_verdict(
    view: StatusView, jobs: Sequence[LiveJobState], problem: str
) -> OverviewVerdict:
    """Return what is most urgent: no answer, failed ranks, or tensors or time that run short."""
    if problem:
        return OverviewVerdict(OverviewLevel.FAULT, f"{problem}; it is asked again every second")
    if not jobs:
        return OverviewVerdict(OverviewLevel.UNKNOWN, explain_no_ranks(view))
    running = [job for job in jobs if job.is_running]
    text = "; ".join(map(_describe_job, running or jobs[-1:]))
    if len(running) > 1:
        text = f"{format_count(len(running), 'job')} run"
    if any(rank.is_bad for job in running or jobs for rank in job.ranks):
        return OverviewVerdict(OverviewLevel.FAULT, text)
    is_short = any(job.total.dropped for job in running or jobs)
    is_late = any(hint.level is not HintLevel.OK for hint in view.hints)
    waits = any(wait.waited_us >= MIN_SHOWN_WAIT_US for wait in view.waits) and bool(running)
    if is_short or is_late or waits or view.order_findings:
        return OverviewVerdict(OverviewLevel.WARNING, text)
    return OverviewVerdict(OverviewLevel.GOOD, text)


def _describe_job(job: LiveJobState) -> str:
    if not job.is_running:
        return f"job {job.job_id} has ended: {job.summary}"
    numbers = {rank.iteration for rank in job.ranks if rank.iteration is not None}
    if not numbers:
        return f"job {job.job_id} runs: {job.summary}"
    low, high = min(numbers), max(numbers)
    where = f"latest iteration {low}" if low == high else f"latest iterations {low} to {high}"
    return f"job {job.job_id} runs: {job.summary}, {where}"


def _make_job(job_id: str, tallies: list[RankTally], ended: set[str]) -> LiveJobState:
    states = Counter(tally.described_state or "unknown" for tally in tallies)
    if len(states) > 3:  # the texts of waits differ in their seconds
        states = Counter(tally.state or "unknown" for tally in tallies)
    summary = ", ".join(f"{format_count(count, 'rank')} {state}" for state, count in states.items())
    ranks = tuple(map(_make_rank, tallies))
    total = sum_balances(tallies)
    # Ranks that failed are always among the listed ones.
    shown = sorted(ranks, key=lambda rank: not rank.is_bad)[:MAX_RANKS_LISTED]
    shown.sort(key=lambda rank: rank.balance[:2])
    return LiveJobState(job_id, job_id not in ended, summary, tuple(shown), len(ranks), total)


def _make_rank(tally: RankTally) -> LiveRank:
    numbers = [each.iteration for each in tally.iterations]
    numbers += [tally.wait.iteration] if tally.wait else []
    is_stuck = tally.wait is not None and tally.wait.stuck and tally.state == "open"
    is_lost = tally.state in ("crashed", SessionState.LOST.value)
    return LiveRank(
        make_balance(tally),
        is_bad=(is_lost or is_stuck) and not tally.is_followed,
        host=tally.sessions[-1].host if tally.sessions else "",
        iteration=max(numbers, default=None),
    )

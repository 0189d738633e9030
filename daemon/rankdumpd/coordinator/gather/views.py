"""Snapshots of what is gathered; the owner of a job holds the lock. No I/O, no clock of its own."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from rankdump.contract.findings import Finding
from rankdump.contract.status import MergeStatus
from rankdumpd.coordinator.gather.job import MAX_FINDINGS, Job
from rankdumpd.coordinator.gather.pending import Pending
from rankdumpd.coordinator.values import IterationView, JobView

_LATE_NAMED = 8


def iteration_view(
    job: Job, pending: Pending, clocks: Mapping[int, str], *, provisional: bool
) -> IterationView:
    """Return what is gathered of an iteration; `clocks` says which clock each rank reads."""
    ranks = job.ranks
    gone = ranks.finished(pending.iteration)
    late = (rank for rank in range(ranks.world_size) if rank not in gone)
    return IterationView(
        job_id=job.job_id,
        iteration=pending.iteration,
        root=pending.root or next(iter(job.roots), ""),
        events={rank: tuple(batches) for rank, batches in pending.events.items()},
        excluded=ranks.excluded(),
        late=tuple(islice(late, _LATE_NAMED)),
        late_count=max(0, ranks.world_size - len(gone)),
        spans=ranks.spans(pending.iteration),
        clocks=clocks,
        stalls=dict(ranks.stalls),
        provisional=provisional,
    )


def job_view(job: Job, *, now_s: float) -> JobView:
    """Return how a job stands, without its events."""
    return JobView(
        job_id=job.job_id,
        roots=tuple(job.roots),
        sessions=tuple(job.ranks.sessions.values()),
        iterations=tuple(job.ranks.balances.values()),
        older_iterations=job.ranks.forgotten_balances,
        merge=_merge_status(job, now_s=now_s),
        hints=job.hints,
        findings=tuple(all_findings(job)),
        more_findings=job.more_findings,
    )


def all_findings(job: Job) -> list[Finding]:
    """Return what is odd about published iterations, what came too late for them and two trees
    last.
    """
    late = job.published.late_findings(MAX_FINDINGS)
    return [*job.findings, *late, *job.tree_findings()]


def _merge_status(job: Job, *, now_s: float) -> MergeStatus:
    unpublished = job.unpublished()
    oldest = min((pending.first_s for pending in unpublished), default=now_s)
    return MergeStatus(
        job_id=job.job_id,
        published_iterations=job.published.iterations,
        published_events=job.published.events,
        pending_iterations=len(unpublished),
        pending_events=sum(pending.count for pending in unpublished),
        lag_s=max(0.0, now_s - oldest),
    )

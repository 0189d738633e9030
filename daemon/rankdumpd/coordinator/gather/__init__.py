"""Gathers what agents report, and says which iterations are ready to be merged.

The only mutable state of the coordinator; safe to use from several threads. It decides nothing
but readiness, and the clock is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from rankdump.contract.errors import ExhaustedError
from rankdump.contract.findings import Finding
from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator.gather.agents import Agents
from rankdumpd.coordinator.gather.job import Job
from rankdumpd.coordinator.gather.pending import Parts, Pending, by_iteration
from rankdumpd.coordinator.gather.reading import Reader
from rankdumpd.coordinator.gather.recall import recall
from rankdumpd.coordinator.gather.views import all_findings, iteration_view, job_view
from rankdumpd.coordinator.kept import AgentRow, Row
from rankdumpd.coordinator.values import (
    Answer,
    Book,
    Fleet,
    IterationView,
    JobFacts,
    Report,
    Settled,
)

__all__ = ["Gather", "Reader"]

MAX_JOBS = 1 << 14
"""Each is remembered for days after it is over."""


class Gather:
    """Everything reported and not yet published, job by job."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._agents = Agents()
        self._failed: dict[object, Row] = {}
        self._latest = ""

    def restore(self, rows: Iterable[Row], *, now_s: float, now_us: int) -> None:
        """Remember what outlived an earlier process; called once, before anything else."""
        with self._lock:
            recall(rows, self._jobs, self._agents, now_s=now_s, now_us=now_us)
            newest = max(self._jobs.values(), key=lambda job: job.heard_s, default=None)
            self._latest = newest.job_id if newest else ""

    def connected(self, agent_id: str, change: int, *, now_s: float) -> None:
        """Note that a stream of an agent has begun, or ended."""
        with self._lock:
            self._agents.of(agent_id, now_s=now_s).streams += change

    def take(self, report: Report, *, now_s: float) -> Answer:
        """Take a report unless it is a repeat; return what its agent is to hear."""
        # Before the lock: this is the only part that grows with the number of events.
        parts = [by_iteration(columns) for _, columns in report.events]
        with self._lock:
            agent = self._agents.of(report.agent_id, now_s=now_s)
            agent.take(report, now_s=now_s)
            if report.sequence > agent.received:
                number = agent.first_number(report)
                self._take(report, parts, number, now_s=now_s)
                agent.jobs.update(_named(report))
                agent.received = report.sequence
            # Behind the items: they are what has been heard.
            for heard in report.heard:
                if heard.job_id in self._jobs:
                    self._jobs[heard.job_id].take_heard(heard)
            warnings = tuple(
                (job_id, text)
                for job_id in sorted(agent.jobs)
                if job_id in self._jobs
                for text in self._jobs[job_id].warnings
            )
            return Answer(agent.acknowledged, agent.received, warnings)

    def crowded(self, report: Report) -> bool:
        """Return whether more reports would only fill the memory: what is complete comes first."""
        with self._lock:
            named = (self._jobs.get(job_id) for job_id in _named(report))
            return any(job.crowded() for job in named if job is not None)

    def next_ready(self, *, now_s: float, every: bool = False) -> IterationView | None:
        """Hand out one iteration to be published; None when none is ready.

        Ready is an iteration that every rank has finished, in rising order, or, out of turn, one
        of which nothing came for `deadline_s`. With `every`, all that has any events. A job has
        none while another of its iterations is handed out and not settled.
        """
        with self._lock:
            for job in self._jobs.values():
                if job.handed is not None:
                    continue
                deadline_s = 0.0 if every else self._deadline_s
                pending = job.ready(now_s=now_s, deadline_s=deadline_s)
                if pending is not None:
                    view = self._view(job, pending, provisional=False)
                    job.hand_out(pending)
                    return view
            return None

    def upcoming(self, least_events: int) -> IterationView | None:
        """Return the next iteration that is complete and large, while another is being written."""
        with self._lock:
            for job in self._jobs.values():
                pending = job.next_complete()
                if job.handed and pending and pending.count >= least_events:
                    return self._view(job, pending, provisional=False)
            return None

    def settle(self, job_id: str, settled: Settled) -> None:
        """Keep what a handed-out iteration came to."""
        with self._lock:
            self._jobs[job_id].settle(settled)

    def unpublished(self, job_id: str) -> tuple[Book | None, list[IterationView]]:
        """Return how far a job's files are, and what comes after them as it is now."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return None, []
            return job.book, [self._view(job, each, provisional=True) for each in job.unpublished()]

    def findings(self, job_id: str) -> list[Finding]:
        """Return what is odd about a job's published iterations."""
        with self._lock:
            return all_findings(self._jobs[job_id]) if job_id in self._jobs else []

    def waiting(self, *, now_s: float) -> list[IterationView]:
        """Return the iterations in which somebody may be waiting."""
        with self._lock:
            agents = self._agents.words(now_s=now_s)
            return [
                replace(self._view(job, pending, provisional=True), heard=job.ranks.heard(agents))
                for job in self._jobs.values()
                for pending in job.pending.values()
                if pending.waits
            ]

    def facts(self, job_id: str) -> JobFacts:
        """Return what hints need to know of a job."""
        with self._lock:
            return self._jobs[job_id].ranks.facts(job_id)

    def kept(self, job_id: str) -> tuple[Book | None, str]:
        """Return book and hint state of a job, as they were settled last."""
        with self._lock:
            job = self._jobs[job_id]
            return job.book, job.hint_state

    def show(
        self, job_id: str, *, hints: tuple[TimeoutHint, ...], warnings: tuple[str, ...]
    ) -> bool:
        """Keep the present hints of a job; return whether they are others than before."""
        with self._lock:
            job = self._jobs.get(job_id)
            changed = job is not None and job.hints != hints
            if job is not None:
                job.hints, job.warnings = hints, warnings
            return changed

    def changes(self, *, now_s: float, now_us: int) -> dict[object, Row]:
        """Return what is to be written, to be answered by `committed` or `failed`."""
        with self._lock:
            rows, self._failed = self._failed, {}
            for job in self._jobs.values():
                rows.update(job.changes(now_s=now_s, now_us=now_us))
            lowest = [each.lowest for job in self._jobs.values() for each in job.unpublished()]
            for agent in self._agents.rows(lowest, now_s=now_s, now_us=now_us):
                rows["agent", agent.agent_id] = agent
            return rows

    def committed(self, rows: Iterable[Row]) -> None:
        """Acknowledge what has been written."""
        with self._lock:
            for row in rows:
                if isinstance(row, AgentRow):
                    self._agents.committed(row)

    def failed(self, rows: dict[object, Row]) -> None:
        """Keep what could not be written for the next time; nothing is acknowledged."""
        with self._lock:
            self._failed = rows

    def finished(self, *, now_s: float, silent_s: float) -> list[tuple[str, float]]:
        """Return jobs that are over and the seconds since they were heard, longest first."""
        with self._lock:
            ages = {
                job.job_id: now_s - job.heard_s
                for job in self._jobs.values()
                if job.is_over(now_s=now_s, silent_s=silent_s)
            }
        return sorted(ages.items(), key=lambda each: -each[1])

    def forget(self, job_id: str) -> None:
        """Forget a job."""
        with self._lock:
            self._jobs.pop(job_id, None)
            if self._latest == job_id:
                self._latest = next(reversed(self._jobs), "")

    def forget_agents(self, *, before_s: float) -> list[str]:
        """Forget the agents that were not heard since then, and name them."""
        with self._lock:
            return self._agents.forget(before_s=before_s)

    def job_ids(self) -> list[str]:
        """Return every job there is."""
        with self._lock:
            return list(self._jobs)

    @property
    def backlog(self) -> int:
        """Iterations with events that have not been published."""
        with self._lock:
            return sum(len(job.unpublished()) for job in self._jobs.values())

    def fleet(self, *, now_s: float) -> Fleet:
        """Return a snapshot of all that is known, without the events."""
        with self._lock:
            return Fleet(
                jobs={job_id: job_view(job, now_s=now_s) for job_id, job in self._jobs.items()},
                latest=self._latest,
                agents=self._agents.statuses(now_s=now_s),
            )

    def _view(self, job: Job, pending: Pending, *, provisional: bool) -> IterationView:
        clocks = job.ranks.clocks(self._agents.hosts())
        return iteration_view(job, pending, clocks, provisional=provisional)

    def _take(self, report: Report, events: list[Parts], number: int, *, now_s: float) -> None:
        named = _named(report)
        if named - self._jobs.keys() and len(self._jobs.keys() | named) > MAX_JOBS:
            raise ExhaustedError(f"{len(self._jobs)} jobs are known, and no more are taken")
        for job_id in named:
            job = self._jobs.setdefault(job_id, Job(job_id, now_s=now_s))
            job.heard_s, job.heard = now_s, True
            self._latest = job_id
        for job_id, root in report.roots.items():
            self._jobs[job_id].take_root(root)
        origin = report.agent_id, report.sequence
        for session in report.sessions:
            self._jobs[session.job_id].take_session(session, origin)
        for job_id, rank, timeouts in report.timeouts:
            self._jobs[job_id].take_timeouts(rank, timeouts)
        # Events before balances: a balance may say that an iteration is complete.
        for (source, columns), parts in zip(report.events, events, strict=True):
            self._jobs[source.job_id].take_events(
                source, columns, parts, agent_id=report.agent_id, number=number, now_s=now_s
            )
        for status in report.iterations:
            self._jobs[status.job_id].take_balance(status, origin, now_s=now_s)


def _named(report: Report) -> set[str]:
    """Return the jobs that a report speaks of."""
    parts = (*report.sessions, *report.iterations, *(source for source, _ in report.events))
    return {
        *report.roots,
        *(part.job_id for part in parts),
        *(job_id for job_id, _, _ in report.timeouts),
    }

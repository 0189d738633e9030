"""Gathers what agents report, and says which iterations are ready to be merged.

The only mutable state of the coordinator; safe to use from several threads. It decides nothing
but readiness, and the clock is an argument.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rankdump.contract.status import Load
from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator.gather.job import Job
from rankdumpd.coordinator.gather.reading import report_from_wire
from rankdumpd.coordinator.values import Fleet, IterationView, JobView, Report

__all__ = ["Gather", "report_from_wire"]


class Gather:
    """Everything reported and not yet published, job by job."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._taken: dict[str, int] = {}
        self._loads: dict[str, Load] = {}
        self._latest = ""

    def take(self, report: Report, *, now_s: float) -> int:
        """Take a report unless it is a repeat; return the highest number taken of its agent."""
        with self._lock:
            taken = self._taken.get(report.agent_id, -1)
            if report.sequence <= taken:
                return taken
            for job_id, root in report.roots.items():
                self._job(job_id).name_root(root)
            for session in report.sessions:
                self._job(session.job_id).take_session(session)
            # Events before balances: a balance may say that an iteration is complete.
            for source, columns in report.events:
                self._job(source.job_id).take_events(source.rank, columns, now_s=now_s)
            for status in report.iterations:
                self._job(status.job_id).take_balance(status)
            self._taken[report.agent_id] = report.sequence
            self._loads[report.agent_id] = report.load
            return report.sequence

    def next_ready(self, *, now_s: float, every: bool = False) -> IterationView | None:
        """Hand out one iteration to be merged and forget its events; None when none is ready.

        Ready is an iteration that every rank has finished, in rising order; or, out of turn, one
        first reported `deadline_s` ago. With `every`, all that has any events.
        """
        with self._lock:
            for job in self._jobs.values():
                iteration = job.ready(now_s=now_s, deadline_s=0.0 if every else self._deadline_s)
                if iteration is not None:
                    return job.hand_out(iteration)
            return None

    def pending(self, job_id: str) -> list[IterationView]:
        """Return what is gathered of a job and not handed out, in rising order."""
        with self._lock:
            job = self._jobs.get(job_id)
            return [] if job is None else [job.view(iteration) for iteration in sorted(job.pending)]

    def settle(
        self, job_id: str, *, findings: Sequence[str], hints: Sequence[TimeoutHint] | None = None
    ) -> None:
        """Keep what a handed-out iteration came to; hints replace those kept before."""
        with self._lock:
            job = self._jobs[job_id]
            if hints is not None:
                job.hints = tuple(hints)
            job.add_findings(findings)

    @property
    def backlog(self) -> int:
        """Iterations with events that have not been handed out."""
        with self._lock:
            return sum(len(job.pending) for job in self._jobs.values())

    def fleet(self) -> Fleet:
        """Return a snapshot of all that is known, without the events."""
        with self._lock:
            jobs = {job_id: _job_view(job) for job_id, job in self._jobs.items()}
            return Fleet(jobs=jobs, latest=self._latest, load=_total(list(self._loads.values())))

    def _job(self, job_id: str) -> Job:
        self._latest = job_id
        return self._jobs.setdefault(job_id, Job(job_id))


def _job_view(job: Job) -> JobView:
    return JobView(
        job_id=job.job_id,
        roots=tuple(job.roots),
        sessions=tuple(job.sessions.values()),
        iterations=tuple(job.balances.values()),
        hints=job.hints,
        findings=job.all_findings(),
    )


def _total(loads: Sequence[Load]) -> Load:
    """Return what is under way on all hosts, and the room on the fullest one."""
    fullest = min(loads, key=lambda load: load.disk_free_bytes, default=Load())
    return Load(
        queued_records=sum(load.queued_records for load in loads),
        queued_bytes=sum(load.queued_bytes for load in loads),
        disk_free_bytes=fullest.disk_free_bytes,
        disk_total_bytes=fullest.disk_total_bytes,
    )

"""Status of an agent for people, scripts and monitoring, collected from the parts of the agent."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from rankdump._core import forecast
from rankdump._core.status import (
    DiskStatus,
    IterationStatus,
    JobNeed,
    MetricSample,
    SessionStatus,
    StatusView,
)
from rankdumpd.agent.backlog.backlog_packer import BacklogPacker
from rankdumpd.agent.blackbox.black_box import BlackBox
from rankdumpd.agent.ledger.retention import RetiredIterations
from rankdumpd.agent.limits.resource_limits import LedgerSpace, ResourceLimits
from rankdumpd.agent.report.reporter import CoordinatorReporter
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.session.registry import SessionRegistry
from rankdumpd.agent.shm.slab_folder import SlabFolder
from rankdumpd.server.metrics import MAX_LABELLED_SAMPLES


def sample_status(view: StatusView) -> Iterator[MetricSample]:
    """Yield the metric samples of a status; if there are many disks or jobs, of the fullest disks
    and the largest jobs only.
    """
    load, memory = view.load, view.memory
    yield MetricSample("rankdump_agent_queue_records", load.queued_records)
    yield MetricSample("rankdump_agent_queue_bytes", load.queued_bytes)
    yield MetricSample("rankdump_agent_memory_limit_bytes", memory.limit_bytes)
    states = Counter(session.state for session in view.sessions)
    for state, count in states.items():
        yield MetricSample("rankdump_agent_sessions", count, {"state": state.value})
    for disk in sorted(view.disks, key=lambda each: each.free_bytes)[:MAX_LABELLED_SAMPLES]:
        yield from _sample_disk(disk)
    for job in sorted(view.usage, key=lambda each: -each.bytes_stored)[:MAX_LABELLED_SAMPLES]:
        yield MetricSample("rankdump_agent_job_bytes", job.bytes_stored, {"job": job.job_id})


def _sample_disk(disk: DiskStatus) -> Iterator[MetricSample]:
    labels = {"root": disk.root}
    yield MetricSample("rankdump_agent_disk_free_bytes", disk.free_bytes, labels)
    yield MetricSample("rankdump_agent_disk_size_bytes", disk.total_bytes, labels)
    yield MetricSample("rankdump_agent_disk_floor_bytes", disk.floor_bytes, labels)


class AgentOverview:
    """Collects status from the parts of an agent; safe to use from several threads."""

    def __init__(
        self,
        registry: SessionRegistry,
        limits: ResourceLimits,
        slabs: SlabFolder,
        reporter: CoordinatorReporter,
        *,
        retention: RetiredIterations,
        ledger: LedgerSpace,
        backlog: BacklogPacker,
        black_box: BlackBox,
    ) -> None:
        self._registry, self._limits, self._slabs = registry, limits, slabs
        self._reporter, self._retention, self._ledger = reporter, retention, ledger
        self._backlog, self._black_box = backlog, black_box

    def view(self, findings: Iterable[str]) -> StatusView:
        """Return the status; `findings` contains findings of the other parts of the agent."""
        sessions = self._registry.list_sessions()
        summary = self._summarize(sessions)
        balances = [session.iterations() for session in sessions]
        needs = self._estimate_needs(sessions, summary.sessions, balances)
        return dataclasses.replace(
            summary,
            iterations=tuple(itertools.chain.from_iterable(balances)),
            needs=needs,
            findings=(
                *(sentence for session in sessions for sentence in session.findings()),
                *self._limits.findings(sessions),
                *forecast.describe_shortages(needs, summary.disks, summary.usage),
                *self._ledger.findings(),
                *findings,
            ),
        )

    def samples(self) -> list[MetricSample]:
        """Return the current metric samples of all parts."""
        queue_bytes, queue_limit_bytes = self._limits.queue
        slab_bytes, ledger = self._slabs.held_bytes, self._ledger.status()
        waiting, lost = self._reporter.events()
        backlog = self._backlog.status()
        return [
            *sample_status(self._summarize(self._registry.list_sessions())),
            *self._black_box.samples(),
            MetricSample("rankdump_agent_queue_limit_bytes", queue_limit_bytes),
            MetricSample("rankdump_agent_memory_bytes", queue_bytes, {"part": "queue"}),
            MetricSample("rankdump_agent_memory_bytes", slab_bytes, {"part": "slabs"}),
            MetricSample("rankdump_agent_unpacked_files", backlog.waiting_files),
            MetricSample("rankdump_agent_unpacked_bytes", backlog.waiting_bytes),
            MetricSample("rankdump_agent_ledger_bytes", ledger.used_bytes),
            MetricSample("rankdump_agent_ledger_disk_free_bytes", ledger.free_bytes),
            MetricSample("rankdump_agent_report_waiting_events", waiting),
            MetricSample("rankdump_agent_report_lost_events_total", lost),
        ]

    def _estimate_needs(
        self,
        sessions: Iterable[RankSession],
        statuses: Iterable[SessionStatus],
        balances: Iterable[Sequence[IterationStatus]],
    ) -> tuple[JobNeed, ...]:
        pinned = self._retention.pins
        found = forecast.sum_job_needs(
            need
            for session, status, iterations in zip(sessions, statuses, balances, strict=True)
            if (need := _estimate_need(session, status, iterations)) is not None
        )
        return tuple(n if n.job_id in pinned else self._limits.limit_need(n) for n in found)

    def _summarize(self, sessions: Sequence[RankSession]) -> StatusView:
        """Return the parts of the status whose size does not grow while a job runs."""
        black_box = self._black_box.status()
        live = sum(session.live for session in sessions)
        return StatusView(
            sessions=tuple(session.status() for session in sessions),
            load=self._limits.load_of(sessions),
            roots=tuple(dict.fromkeys(str(session.storage.tree.root) for session in sessions)),
            disks=self._limits.disks_of(sessions),
            usage=self._limits.jobs(self._retention.pins),
            memory=self._limits.memory(live, black_box.step_bytes),
            ledger=self._ledger.status(),
            backlog=self._backlog.status(),
            black_box=black_box,
        )


def _estimate_need(
    session: RankSession, status: SessionStatus, iterations: Sequence[IterationStatus]
) -> JobNeed | None:
    root = str(session.storage.tree.root)
    return forecast.estimate_job_need(status, session.plan, root, iterations)

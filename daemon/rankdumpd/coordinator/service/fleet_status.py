"""Status of all jobs and agents, as metrics and as answers for the command line; and the writer of
the state, which removes jobs that ended long ago.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rankdump._core.events import Finding
from rankdump._core.status import (
    AgentLoad,
    AgentStatus,
    MetricSample,
    OrderEntry,
    StatusView,
    sum_loads,
)
from rankdump._core.timeouts import HintLevel
from rankdump._wire.status_messages import entry_to_wire, finding_to_wire, view_to_wire
from rankdump.errors import CorruptedError, RankdumpError, RejectedError, UnavailableError
from rankdump.wire.v1 import coordinator_pb2 as pb
from rankdumpd.coordinator.fleet_views import FleetView, JobView
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.state import CoordinatorState
from rankdumpd.settings import CoordinatorSettings


def collect_fleet_samples(fleet: FleetView) -> Iterator[MetricSample]:
    """Yield the metrics of all jobs and agents, summed up."""
    jobs = fleet.jobs.values()
    connected = {agent.agent_id for agent in fleet.agents if agent.connected}
    # Other agents are gone because their jobs are over, and nothing waits for them.
    awaited = frozenset[str]().union(*(job.awaited_agents for job in jobs))
    states = {"connected": len(connected), "silent": len(awaited - connected)}
    for state, count in states.items():
        yield MetricSample("rankdump_coordinator_agents", count, {"state": state})
    kinds = Counter(finding.kind for job in jobs for finding in job.findings)
    for kind, count in kinds.items():
        yield MetricSample("rankdump_coordinator_findings", count, {"kind": kind.value})
    hints = [hint for job in jobs for hint in job.hints]
    levels = Counter(hint.level for hint in hints)
    for level in HintLevel:
        labels = {"level": level.value}
        yield MetricSample("rankdump_coordinator_timeout_hints", levels[level], labels)
    merges = [job.merge for job in jobs]
    lost = sum(agent.lost_events for agent in fleet.agents)
    for name, value in (
        ("rankdump_coordinator_agent_lost_events", lost),
        ("rankdump_coordinator_jobs", len(jobs)),
        ("rankdump_coordinator_pending_iterations", sum(m.pending_iterations for m in merges)),
        ("rankdump_coordinator_pending_events", sum(m.pending_events for m in merges)),
        ("rankdump_coordinator_merge_lag_seconds", max((m.lag_s for m in merges), default=0.0)),
        ("rankdump_coordinator_timeout_used_ratio", max((h.share for h in hints), default=0.0)),
    ):
        yield MetricSample(name, value)


_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1 << 20
_MAX_BALANCES = 20_000
"""Largest number of balances in one answer; more would exceed the size limit of gRPC messages."""
_MAX_SESSIONS = 8_192
_MAX_FINDINGS = 2_000


def select_jobs(fleet: FleetView, job_id: str) -> list[JobView]:
    """Return the job with this id; without an id all jobs. RejectedError for an unknown id."""
    if not job_id:
        return list(fleet.jobs.values())
    if job_id not in fleet.jobs:
        known = ", ".join(fleet.jobs) or "none"
        raise RejectedError(f"job {job_id!r} has not reported; known jobs: {known}")
    return [fleet.jobs[job_id]]


def build_status_view(fleet: FleetView, jobs: Sequence[JobView], problem: str) -> StatusView:
    """Return the status of these jobs; `problem` is the coordinator's problem, if any."""
    sessions = [session for job in jobs for session in job.sessions]
    balances = [balance for job in jobs for balance in job.iterations]
    findings = [finding for job in jobs for finding in job.findings]
    older = sum(job.older_iterations for job in jobs) + max(0, len(balances) - _MAX_BALANCES)
    more = sum(job.more_findings for job in jobs) + max(0, len(findings) - _MAX_FINDINGS)
    omitted = {
        "older sessions are not in this answer": max(0, len(sessions) - _MAX_SESSIONS),
        "older balances are not in this answer": older,
        "more findings are in the files beside the order": more,
    }
    return StatusView(
        sessions=tuple(sessions[-_MAX_SESSIONS:]),
        iterations=tuple(balances[-_MAX_BALANCES:]),
        load=_sum_present_loads(fleet, jobs),
        roots=tuple(dict.fromkeys(root for job in jobs for root in job.roots)),
        findings=tuple(_list_notices(fleet.agents, omitted, problem)),
        agents=fleet.agents,
        merges=tuple(job.merge for job in jobs),
        hints=tuple(hint for job in jobs for hint in job.hints),
        order_findings=tuple(findings[-_MAX_FINDINGS:]),
        waits=tuple(wait for job in jobs for wait in job.waits),
    )


def _sum_present_loads(fleet: FleetView, jobs: Sequence[JobView]) -> AgentLoad:
    """Return the load of the connected agents; if `jobs` are not all jobs, of their agents only."""
    chosen = frozenset[str]().union(*(job.agents for job in jobs))
    is_all = len(jobs) == len(fleet.jobs)
    return sum_loads(
        agent.load
        for agent in fleet.agents
        if agent.connected and (is_all or agent.agent_id in chosen)
    )


def paginate_order(parts: Iterable[OrderEntry | Finding]) -> Iterator[pb.OrderResponse]:
    """Yield entries and findings in pages, each of which fits into a message."""
    page, size = pb.OrderResponse(), 0
    for part in parts:
        if isinstance(part, Finding):
            message = finding_to_wire(part)
            page.findings.append(message)
        else:
            message = entry_to_wire(part)
            page.entries.append(message)
        size += message.ByteSize()
        if len(page.entries) + len(page.findings) == _PAGE_ENTRIES or size > _PAGE_BYTES:
            yield page
            page, size = pb.OrderResponse(), 0
    if size:
        yield page


def _list_notices(
    agents: Iterable[AgentStatus], omitted: Mapping[str, int], problem: str
) -> Iterator[str]:
    if problem:
        yield f"{problem}; reports are not acknowledged until this is resolved"
    yield from (f"{count} {what}" for what, count in omitted.items() if count)
    yield from map(_describe_lost_events, (agent for agent in agents if agent.lost_events))


def _describe_lost_events(agent: AgentStatus) -> str:
    host = agent.host or agent.agent_id
    return f"{agent.lost_events} events of {host} were lost before they reached the coordinator"


_logger = logging.getLogger(__name__)
_DAY_S = 86_400.0


class StateWriter:
    """Writes changes of the store to the state, and restores the store; for one thread
    at a time.
    """

    def __init__(
        self, store: ReportStore, state: CoordinatorState, settings: CoordinatorSettings
    ) -> None:
        self._store = store
        self._state = state
        self._settings = settings
        self.problem = ""
        """Why the state cannot be written; empty when it can be written."""

    def restore_store(self) -> None:
        """Fill the store from the state; CorruptedError if the state is damaged or too large to
        report.
        """
        now_s = time.monotonic()
        try:
            self._store.restore(self._state.rows(), now_s=now_s, now_us=_read_wall_clock_us())
            fleet = self._store.build_fleet_view(now_s=now_s)
            view_to_wire(build_status_view(fleet, select_jobs(fleet, ""), ""))
        except RankdumpError:
            raise
        except Exception as error:
            raise CorruptedError(f"{self._state.path} is damaged: {error!r}") from error

    def write_changes(self) -> None:
        """Write the changes of the store to the state, and acknowledge them."""
        rows = self._store.collect_changes(now_s=time.monotonic(), now_us=_read_wall_clock_us())
        if not rows:
            return
        try:
            self._state.write(rows.values())
        except BaseException as error:
            self._store.restore_changes(rows)
            if not isinstance(error, UnavailableError):
                raise
            if str(error) != self.problem:
                _logger.error("%s; no report is acknowledged until it can be written", error)
            self.problem = str(error)
            return
        if self.problem:
            _logger.warning("%s was written again: %d rows", self._state.path, len(rows))
        self.problem = ""
        self._store.mark_committed(rows.values())

    def forget_old_jobs(self) -> list[str]:
        """Remove finished jobs that are too old or take too much space; return their ids."""
        limit_s = self._settings.keep_days * _DAY_S
        now_s = time.monotonic()
        removed: list[str] = []
        try:
            for job_id, age_s in self._store.list_finished_jobs(now_s=now_s, silent_s=_DAY_S):
                too_large = self._state.size_bytes > self._settings.keep_bytes
                if age_s < limit_s and not too_large:
                    break
                self._state.forget(job_id)
                self._store.forget_job(job_id)
                removed.append(job_id)
                reason = f"the state exceeds {self._settings.keep_bytes} bytes" if too_large else ""
                reason = reason or f"it ended {age_s / _DAY_S:.0f} days ago"
                _logger.info(
                    "job %s was removed from the state, because %s; its tree is kept",
                    job_id,
                    reason,
                    extra={"job": job_id},
                )
            self._state.forget_agents(self._store.forget_agents(before_s=now_s - limit_s))
        except UnavailableError as error:
            _logger.error("%s; old jobs were not removed", error)
        return removed


def _read_wall_clock_us() -> int:
    return time.time_ns() // 1000

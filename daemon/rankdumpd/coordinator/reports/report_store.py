"""Store of the reports of all agents, job by job. It decides which iterations are ready, and up to
which item each agent is acknowledged.

It contains everything that agents have reported and that is not published yet, and is safe to use
from several threads. The clock is an argument.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from rankdump._core.events import Finding
from rankdump._core.freeze_record import FreezeReach, JobFreeze, RelayedFreeze
from rankdump._core.status import AgentLoad, AgentStatus, ClockEstimate, RankWait
from rankdump._core.timeouts import TimeoutHint
from rankdump.errors import ExhaustedError, RejectedError
from rankdumpd.coordinator.alarms.job_freezes import AgentRanks
from rankdumpd.coordinator.fleet_views import (
    AgentReport,
    FleetView,
    IterationView,
    JobFacts,
    PublicationResult,
    PublishedOffsets,
    ReportAnswer,
)
from rankdumpd.coordinator.reports.job import (
    IterationParts,
    PendingIteration,
    ReportedJob,
    build_iteration_view,
    build_job_view,
    list_job_findings,
    split_by_iteration,
)
from rankdumpd.coordinator.state import (
    AgentRow,
    BalanceRow,
    FindingRow,
    JobResultRow,
    JobRow,
    LateEventsRow,
    PublishedIterationRow,
    RankTimeoutsRow,
    SessionStatusRow,
    StateRow,
)

AGENT_SILENCE_TIMEOUT_S = 5.0
"""Seconds without a report after which an agent counts as silent; agents report once a second."""
MAX_AGENTS = 1 << 14
"""Largest number of agents that are remembered, each for days after its last report."""


@dataclass(slots=True)
class ReportingAgent:
    """One agent, as of its last report."""

    agent_id: str
    last_report_s: float
    host: str = ""
    host_id: str = ""
    """Id that distinguishes hosts with the same name."""
    received: int = 0
    acknowledged: int = 0
    """Number of the last item up to which all items are committed."""
    written: tuple[str, int] | None = None
    """Host and acknowledged number in the newest row of the state file; None if there is no row
    yet.
    """
    streams: int = 0
    clock: ClockEstimate = field(default_factory=ClockEstimate)
    load: AgentLoad = field(default_factory=AgentLoad)
    held_events: int = 0
    lost_events: int = 0
    jobs: set[str] = field(default_factory=set[str])

    def update(self, report: AgentReport, *, now_s: float) -> None:
        """Update the state of the agent from a report."""
        self.last_report_s = now_s
        self.host, self.host_id = report.host or self.host, report.host_id or self.host_id
        self.clock, self.load = report.clock, report.load
        self.held_events, self.lost_events = report.held_events, report.lost_events

    def find_first_number(self, report: AgentReport) -> int:
        """Return the lowest number that an item of a report can have."""
        return max(self.received + 1, report.sequence - report.items + 1)

    def is_silent(self, now_s: float) -> bool:
        """Return whether the agent has not reported for so long that it may be gone."""
        return now_s - self.last_report_s >= AGENT_SILENCE_TIMEOUT_S

    def describe(self, host: str, *, now_s: float) -> str:
        """Return a sentence on the backlog of the agent; `host` is the name shown for its host."""
        name = f"the agent of {host or self.agent_id}"
        if self.is_silent(now_s):
            return f"{name} last reported {now_s - self.last_report_s:.0f} s ago"
        held, queued = self.held_events, self.load.queued_records
        return f"{name} has {held:,} events to report and {queued:,} records queued"

    def status(self, host: str, *, now_s: float) -> AgentStatus:
        """Return the status of the agent; `host` is the name shown for its host."""
        return AgentStatus(
            agent_id=self.agent_id,
            host=host,
            heard_s=max(0.0, now_s - self.last_report_s),
            connected=self.streams > 0,
            clock=self.clock,
            held_events=self.held_events,
            lost_events=self.lost_events,
            load=self.load,
        )


class AgentRegistry:
    """All agents that have reported."""

    def __init__(self) -> None:
        self.by_id: dict[str, ReportingAgent] = {}

    def get_or_add(self, agent_id: str, *, now_s: float) -> ReportingAgent:
        """Return a known or a new agent; ExhaustedError when there are too many agents."""
        if agent_id not in self.by_id and len(self.by_id) >= MAX_AGENTS:
            raise ExhaustedError(f"{len(self.by_id)} agents have reported, which is the maximum")
        return self.by_id.setdefault(agent_id, ReportingAgent(agent_id, now_s))

    def describe_agents(self, *, now_s: float) -> dict[str, str]:
        """Return a sentence on the state of each agent."""
        hosts = self.hosts()
        return {name: a.describe(hosts[name][1], now_s=now_s) for name, a in self.by_id.items()}

    def describe_silence(self, agent_id: str, *, now_s: float) -> str:
        """Return since when an agent has not reported; empty if it reports."""
        agent = self.by_id.get(agent_id)
        if agent is None:
            return "its agent is not known"
        silent_s = now_s - agent.last_report_s
        return f"its agent last reported {silent_s:.0f} s ago" if agent.is_silent(now_s) else ""

    def hosts(self) -> dict[str, tuple[str, str]]:
        """Return for each agent the name of its host, and the unique name that is shown for the
        host.
        """
        return name_hosts({name: (agent.host, agent.host_id) for name, agent in self.by_id.items()})

    def list_statuses(self, *, now_s: float) -> tuple[AgentStatus, ...]:
        """Return the status of each agent."""
        hosts = self.hosts()
        return tuple(a.status(hosts[name][1], now_s=now_s) for name, a in self.by_id.items())

    def restore(self, row: AgentRow, *, now_s: float, now_us: int) -> None:
        """Restore an agent from its row."""
        last_report_s = now_s - max(0, now_us - row.heard_us) / 1e6
        known = row.acknowledged
        agent = ReportingAgent(
            row.agent_id, last_report_s, row.host, received=known, acknowledged=known
        )
        agent.written = row.host, known
        self.by_id[row.agent_id] = agent

    def rows(
        self, lowest: Iterable[Mapping[str, int]], *, now_s: float, now_us: int
    ) -> list[AgentRow]:
        """Return rows of the agents for which more items can be acknowledged than before.

        `lowest` contains, for each unpublished iteration, the lowest item number of each agent.
        """
        committed = {name: agent.received for name, agent in self.by_id.items()}
        for numbers in lowest:
            for name, number in numbers.items():
                if name in committed:
                    committed[name] = min(committed[name], number - 1)
        return [
            AgentRow(
                name, agent.host, committed[name], now_us - int((now_s - agent.last_report_s) * 1e6)
            )
            for name, agent in self.by_id.items()
            if agent.written != (agent.host, committed[name])
        ]

    def mark_committed(self, row: AgentRow) -> None:
        """Acknowledge the items that a written row covers."""
        agent = self.by_id.get(row.agent_id)
        if agent is not None:
            agent.acknowledged = row.acknowledged
            agent.written = row.host, row.acknowledged

    def forget(self, *, before_s: float) -> list[str]:
        """Forget the agents that have not reported since `before_s`; return their ids."""
        silent = [
            name for name, a in self.by_id.items() if a.last_report_s < before_s and not a.streams
        ]
        for name in silent:
            del self.by_id[name]
        return silent


def name_hosts(hosts: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, str]]:
    """Return the name of each host, and a unique name, which contains the id if several hosts share
    a name.

    >>> name_hosts({"a": ("node", "1"), "b": ("node", "1"), "c": ("localhost", "1")})["b"]
    ('node', 'node')
    >>> name_hosts({"a": ("localhost", "1"), "b": ("localhost", "2")})["b"]
    ('localhost', 'localhost (2)')
    """
    ids: defaultdict[str, set[str]] = defaultdict(set)
    for host, host_id in hosts.values():
        ids[host].add(host_id)
    return {
        agent: (host, f"{host} ({host_id or agent})" if len(ids[host]) > 1 else host)
        for agent, (host, host_id) in hosts.items()
    }


MAX_JOBS = 1 << 14
"""Largest number of jobs that are remembered, each for days after its end."""


class ReportStore:
    """Reported data of all jobs that is not published yet."""

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._jobs: dict[str, ReportedJob] = {}
        self._agents = AgentRegistry()
        self._failed: dict[object, StateRow] = {}
        self._latest = ""

    def restore(self, rows: Iterable[StateRow], *, now_s: float, now_us: int) -> None:
        """Restore the rows of an earlier process; called once, before any other method.

        Agents come first among the rows, and published iterations before balances. Agents resend
        items that were not acknowledged, after the events before them; until then these items must
        not make an iteration look complete.
        """
        with self._lock:
            for row in rows:
                self._restore_row(row, now_s=now_s, now_us=now_us)
            newest = max(self._jobs.values(), key=lambda job: job.last_report_s, default=None)
            self._latest = newest.job_id if newest else ""

    def count_stream(self, agent_id: str, change: int, *, now_s: float) -> None:
        """Note that a stream of an agent has begun, or ended."""
        with self._lock:
            self._agents.get_or_add(agent_id, now_s=now_s).streams += change

    def add_report(self, report: AgentReport, *, now_s: float) -> ReportAnswer:
        """Add a report unless it is a repetition; return the answer to its agent."""
        # Done without the lock, because the time that this takes grows with the number of events.
        parts = [list(split_by_iteration(columns)) for _, columns in report.events]
        with self._lock:
            agent = self._agents.get_or_add(report.agent_id, now_s=now_s)
            agent.update(report, now_s=now_s)
            if report.sequence > agent.received:
                number = agent.find_first_number(report)
                self._add_items(report, parts, number, now_s=now_s)
                agent.jobs.update(_list_job_ids(report))
                agent.received = report.sequence
            # Done after the items, because the coverage includes their events.
            for covered in report.coverage:
                if covered.job_id in self._jobs:
                    self._jobs[covered.job_id].update_coverage(covered)
            warnings = tuple(
                (job_id, text)
                for job_id in sorted(agent.jobs)
                if job_id in self._jobs
                for text in self._jobs[job_id].warnings
            )
            self._add_black_box_parts(report, now_s=now_s)
            freezes = self._list_relayed(agent.jobs, now_s=now_s)
            return ReportAnswer(agent.acknowledged, agent.received, warnings, freezes)

    def add_alarm(self, freeze: JobFreeze, *, now_s: float) -> bool:
        """Add a freeze that the coordinator itself found; return whether it begins a new freeze."""
        with self._lock:
            job = self._jobs.get(freeze.job_id)
            return job is not None and job.freezes.add_alarm(freeze, now_s=now_s)

    def request_freeze(self, freeze: JobFreeze, *, now_s: float) -> None:
        """Add a freeze that a person asked for; RejectedError for an unknown job."""
        with self._lock:
            job = self._jobs.get(freeze.job_id)
            if job is None:
                raise RejectedError(f"job {freeze.job_id!r} has not reported")
            job.freezes.request(freeze, now_s=now_s)

    def find_freeze_reach(self, freeze: JobFreeze) -> FreezeReach:
        """Return which agents a freeze has reached."""
        with self._lock:
            job = self._jobs.get(freeze.job_id)
            return FreezeReach() if job is None else job.freezes.find_reach(freeze.key)

    def find_outliers(self, *, now_us: int) -> list[JobFreeze]:
        """Return a freeze for each iteration with new outliers among the ranks of a job."""
        with self._lock:
            jobs = list(self._jobs.values())
            return [alarm for job in jobs for alarm in job.peer_steps.find_alarms(now_us)]

    def has_unpublished_backlog(self, report: AgentReport) -> bool:
        """Return whether a job in the report has more complete iterations than may wait for
        publication.
        """
        with self._lock:
            jobs = (self._jobs.get(job_id) for job_id in _list_job_ids(report))
            return any(job.has_unpublished_backlog() for job in jobs if job is not None)

    def take_next_ready(self, *, now_s: float, every: bool = False) -> IterationView | None:
        """Begin to publish the next ready iteration and return its view; None if no iteration is
        ready.

        An iteration is ready in rising order when every rank has finished it, or out of order when
        none of its data has arrived for `deadline_s`. With `every`, it is ready if it has any
        events. No iteration of a job is ready while another one of the job is being published.
        """
        with self._lock:
            for job in self._jobs.values():
                if job.in_publication is not None:
                    continue
                deadline_s = 0.0 if every else self._deadline_s
                pending = job.find_ready(now_s=now_s, deadline_s=deadline_s)
                if pending is not None:
                    view = self._view(job, pending, provisional=False)
                    job.start_publication(pending)
                    return view
            return None

    def find_upcoming(self, least_events: int) -> IterationView | None:
        """Return the next iteration that is complete and large, while another one is
        being written.
        """
        with self._lock:
            for job in self._jobs.values():
                pending = job.find_next_complete()
                if job.in_publication and pending and pending.count >= least_events:
                    return self._view(job, pending, provisional=False)
            return None

    def delay_publication(self, job_id: str) -> None:
        """Note that the iteration in publication cannot be written at present."""
        with self._lock:
            self._jobs[job_id].is_delayed = True

    def finish_publication(self, job_id: str, result: PublicationResult) -> None:
        """Store the result of a publication."""
        with self._lock:
            self._jobs[job_id].finish_publication(result)

    def list_unpublished(self, job_id: str) -> tuple[PublishedOffsets | None, list[IterationView]]:
        """Return the published offsets of a job, and provisional views of its unpublished
        iterations.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return None, []
            return job.offsets, [
                self._view(job, each, provisional=True) for each in job.list_unpublished()
            ]

    def list_findings(self, job_id: str) -> list[Finding]:
        """Return the findings about the published iterations of a job."""
        with self._lock:
            return list_job_findings(self._jobs[job_id]) if job_id in self._jobs else []

    def list_waiting_iterations(self, *, now_s: float) -> list[IterationView]:
        """Return views of the iterations that have open calls."""
        with self._lock:
            agents = self._agents.describe_agents(now_s=now_s)
            return [
                replace(
                    self._view(job, pending, provisional=True),
                    coverage=job.ranks.build_coverage(agents),
                )
                for job in self._jobs.values()
                for pending in job.pending.values()
                if pending.has_open_calls
            ]

    def build_job_facts(self, job_id: str) -> JobFacts:
        """Return the timeouts and sessions of a job, from which its hints are computed."""
        with self._lock:
            return self._jobs[job_id].ranks.build_facts(job_id)

    def get_last_publication(self, job_id: str) -> tuple[PublishedOffsets | None, str]:
        """Return the offsets and the hint state of a job after its last publication."""
        with self._lock:
            job = self._jobs[job_id]
            return job.offsets, job.hint_state

    def set_hints(
        self, job_id: str, *, hints: tuple[TimeoutHint, ...], warnings: tuple[str, ...]
    ) -> bool:
        """Set the hints of a job; return whether they differ from the earlier ones."""
        with self._lock:
            job = self._jobs.get(job_id)
            changed = job is not None and job.hints != hints
            if job is not None:
                job.hints, job.warnings = hints, warnings
            return changed

    def set_waits(
        self, job_id: str, waits: tuple[RankWait, ...], standing: tuple[Finding, ...]
    ) -> bool:
        """Set the calls that the ranks of a job wait in, and the findings about those calls that do
        not end. Return whether the findings differ from the earlier ones.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return False
            changed = job.standing != standing
            job.waits, job.standing = waits, standing
            return changed

    def collect_changes(self, *, now_s: float, now_us: int) -> dict[object, StateRow]:
        """Return the state rows to write; call `mark_committed` or `restore_changes` afterwards."""
        with self._lock:
            rows, self._failed = self._failed, {}
            for job in self._jobs.values():
                rows.update(job.changes(now_s=now_s, now_us=now_us))
            lowest = [each.lowest for job in self._jobs.values() for each in job.list_unpublished()]
            for agent in self._agents.rows(lowest, now_s=now_s, now_us=now_us):
                rows["agent", agent.agent_id] = agent
            return rows

    def mark_committed(self, rows: Iterable[StateRow]) -> None:
        """Acknowledge the items that the written rows cover."""
        with self._lock:
            for row in rows:
                if isinstance(row, AgentRow):
                    self._agents.mark_committed(row)

    def restore_changes(self, rows: dict[object, StateRow]) -> None:
        """Keep rows that could not be written for the next attempt; acknowledge nothing."""
        with self._lock:
            self._failed = rows

    def list_finished_jobs(self, *, now_s: float, silent_s: float) -> list[tuple[str, float]]:
        """Return ended jobs with the seconds since their last report, the longest ended first."""
        with self._lock:
            ages = {
                job.job_id: now_s - job.last_report_s
                for job in self._jobs.values()
                if job.has_ended(now_s=now_s, silent_s=silent_s)
            }
        return sorted(ages.items(), key=lambda each: -each[1])

    def forget_job(self, job_id: str) -> None:
        """Forget a job."""
        with self._lock:
            self._jobs.pop(job_id, None)
            if self._latest == job_id:
                self._latest = next(reversed(self._jobs), "")

    def forget_agents(self, *, before_s: float) -> list[str]:
        """Forget the agents that have not reported since `before_s`; return their ids."""
        with self._lock:
            return self._agents.forget(before_s=before_s)

    def list_job_ids(self) -> list[str]:
        """Return the ids of all jobs."""
        with self._lock:
            return list(self._jobs)

    def list_roots(self) -> list[str]:
        """Return the roots of the trees of all jobs, those of the earliest job first."""
        with self._lock:
            found = [root for job in self._jobs.values() for root in job.roots]
        return list(dict.fromkeys(found))

    @property
    def backlog(self) -> int:
        """Number of unpublished iterations that have events."""
        with self._lock:
            return sum(len(job.list_unpublished()) for job in self._jobs.values())

    def build_fleet_view(self, *, now_s: float) -> FleetView:
        """Return a snapshot of all jobs and agents, without events."""
        with self._lock:
            return FleetView(
                jobs={
                    job_id: build_job_view(job, now_s=now_s) for job_id, job in self._jobs.items()
                },
                latest=self._latest,
                agents=self._agents.list_statuses(now_s=now_s),
            )

    def _restore_row(self, row: StateRow, *, now_s: float, now_us: int) -> None:
        match row:
            case AgentRow():
                self._agents.restore(row, now_s=now_s, now_us=now_us)
            case JobRow():
                job = self._jobs[row.job_id] = ReportedJob(row.job_id, now_s=now_s)
                job.first_s = now_s - (now_us - row.first_us) / 1e6
                job.last_report_s = now_s - max(0, now_us - row.heard_us) / 1e6
                job.roots = dict.fromkeys(row.roots)
            case SessionStatusRow() | BalanceRow():
                job = self._jobs[row.status.job_id]
                agent = self._agents.by_id.get(row.agent_id)
                acknowledged = agent.acknowledged if agent else 0
                if isinstance(row, SessionStatusRow):
                    job.restore_session(row, acknowledged=acknowledged)
                else:
                    job.restore_balance(row, acknowledged=acknowledged)
                if agent and row.sequence <= acknowledged:
                    agent.jobs.add(job.job_id)
            case PublishedIterationRow():
                self._jobs[row.job_id].published.restore(row)
            case LateEventsRow():
                self._jobs[row.job_id].published.restore_late(row)
            case FindingRow():
                self._jobs[row.job_id].findings.append(row.finding)
            case RankTimeoutsRow():
                self._jobs[row.job_id].ranks.update_timeouts(row.rank, row.timeouts)
            case JobResultRow():
                job = self._jobs[row.job_id]
                job.offsets, job.hint_state = row.offsets, row.hint_state
                job.more_findings = row.more_findings

    def _add_black_box_parts(self, report: AgentReport, *, now_s: float) -> None:
        """Add the parts of a report that are neither numbered nor stored, because the agent repeats
        them or they are soon outdated.
        """
        for job_id in {freeze.job_id for freeze in report.freezes} & self._jobs.keys():
            own = [freeze for freeze in report.freezes if freeze.job_id == job_id]
            self._jobs[job_id].freezes.add_reported(report.agent_id, own, now_s=now_s)
        for step in report.steps:
            if step.job_id in self._jobs:
                self._jobs[step.job_id].peer_steps.add(step)

    def _list_relayed(self, job_ids: Iterable[str], *, now_s: float) -> tuple[RelayedFreeze, ...]:
        known = (self._jobs[job_id] for job_id in sorted(job_ids) if job_id in self._jobs)
        return tuple(
            relayed
            for job in known
            for relayed in job.freezes.list_relayed(
                partial(self._list_agent_ranks, job, now_s=now_s), now_s=now_s
            )
        )

    def _list_agent_ranks(
        self, job: ReportedJob, attempt: int, *, now_s: float
    ) -> dict[str, AgentRanks]:
        hosts, found = self._agents.hosts(), job.ranks.list_agent_ranks(attempt)
        return {
            name: AgentRanks(
                hosts.get(name, ("", name))[1],
                ranks,
                self._agents.describe_silence(name, now_s=now_s),
            )
            for name, ranks in found.items()
        }

    def _view(
        self, job: ReportedJob, pending: PendingIteration, *, provisional: bool
    ) -> IterationView:
        clocks = job.ranks.name_clocks(self._agents.hosts())
        return build_iteration_view(job, pending, clocks, provisional=provisional)

    def _add_items(
        self, report: AgentReport, events: list[IterationParts], number: int, *, now_s: float
    ) -> None:
        job_ids = _list_job_ids(report)
        if job_ids - self._jobs.keys() and len(self._jobs.keys() | job_ids) > MAX_JOBS:
            raise ExhaustedError(f"{len(self._jobs)} jobs have reported, which is the maximum")
        for job_id in job_ids:
            job = self._jobs.setdefault(job_id, ReportedJob(job_id, now_s=now_s))
            job.last_report_s, job.has_changed = now_s, True
            self._latest = job_id
        for job_id, root in report.roots.items():
            self._jobs[job_id].add_root(root)
        origin = report.agent_id, report.sequence
        for session in report.sessions:
            self._jobs[session.job_id].update_session(session, origin)
        for job_id, rank, timeouts in report.timeouts:
            self._jobs[job_id].update_timeouts(rank, timeouts)
        # Events are added before balances, because a balance may complete an iteration.
        for (source, columns), parts in zip(report.events, events, strict=True):
            self._jobs[source.job_id].add_events(
                source, columns, parts, agent_id=report.agent_id, number=number, now_s=now_s
            )
        for status in report.iterations:
            self._jobs[status.job_id].update_balance(status, origin, now_s=now_s)


def _list_job_ids(report: AgentReport) -> set[str]:
    """Return the ids of the jobs in a report."""
    parts = (*report.sessions, *report.iterations, *(source for source, _ in report.events))
    return {
        *report.roots,
        *(part.job_id for part in parts),
        *(job_id for job_id, _, _ in report.timeouts),
    }

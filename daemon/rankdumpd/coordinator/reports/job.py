"""Collected data of one job: unpublished events by iteration, findings, which iterations are ready,
and snapshots. No I/O; the clock is an argument, and the owner holds the lock.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

import numpy as np

from rankdump._core.events import (
    OPEN_END_POSITION,
    EventColumns,
    Finding,
    FindingKind,
    ProcessGroup,
)
from rankdump._core.status import (
    EventSource,
    IterationStatus,
    MergeStatus,
    RankWait,
    SessionState,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts, TimeoutHint
from rankdumpd.coordinator.alarms.job_alarms import PeerSteps
from rankdumpd.coordinator.alarms.job_freezes import JobFreezes
from rankdumpd.coordinator.fleet_views import (
    IterationView,
    JobView,
    PublicationResult,
    PublishedOffsets,
    ReportedRankCoverage,
)
from rankdumpd.coordinator.reports.job_progress import (
    ProgramPlace,
    PublishedIterations,
    RankRegistry,
)
from rankdumpd.coordinator.state import (
    BalanceRow,
    FindingRow,
    JobResultRow,
    JobRow,
    PublishedIterationRow,
    RankTimeoutsRow,
    SessionStatusRow,
    StateRow,
)

IterationParts: TypeAlias = list[tuple[int, EventColumns]]
"""Pairs of an iteration and the events of a batch that belong to it."""


@dataclass(slots=True)
class PendingIteration:
    """Unpublished events of one iteration of one run."""

    iteration: int
    run: int
    first_s: float
    """Time at which the first events of the iteration arrived."""
    last_s: float
    """Time at which the last report about the iteration arrived."""
    root: str = ""
    """Root of the job's tree when the first events arrived; empty when none was reported yet."""
    attempt: int = 0
    """Number of the attempt that ran the iteration."""
    events: dict[int, list[EventColumns]] = field(default_factory=dict[int, list[EventColumns]])
    """Batches of events of each rank."""
    starts: dict[int, int] = field(default_factory=dict[int, int])
    """Number of restarts of each of these ranks before these events."""
    lowest: dict[str, int] = field(default_factory=dict[str, int])
    """For each agent, the lowest item number that may have events of the iteration."""
    last_positions: dict[int, int] = field(default_factory=dict[int, int])
    """Last position of each rank in the iteration."""
    count: int = 0
    """Number of events of all ranks, each counted once, although agents resend events and report
    open calls again.
    """
    has_open_calls: bool = False
    """Whether any event was not complete when it arrived."""

    def add(
        self,
        rank: int,
        part: EventColumns,
        *,
        start: int,
        origin: tuple[str, int],
        now_s: float,
    ) -> None:
        """Add a part of a batch; `origin` is the agent and the lowest item number of its report."""
        self.count += self._count_new(rank, part)
        self.events.setdefault(rank, []).append(part)
        self.starts[rank] = start
        self.lowest.setdefault(*origin)
        self.last_s = now_s
        if not self.has_open_calls:
            self.has_open_calls = bool((part.columns["end_position"] == OPEN_END_POSITION).any())

    def _count_new(self, rank: int, part: EventColumns) -> int:
        """Return the number of events of a part that are not in earlier parts of the rank."""
        new = np.unique(part.columns["position"])
        last = self.last_positions.get(rank, 0)
        # Most parts begin behind all earlier parts, which then need not be searched.
        if len(new) and rank in self.events and int(new[0]) <= last:
            known = (batch.columns["position"] for batch in self.events[rank])
            new = np.setdiff1d(new, np.concatenate([each[each >= new[0]] for each in known]))
        self.last_positions[rank] = max(last, int(part.columns["position"].max(initial=0)))
        return len(new)


def split_by_iteration(columns: EventColumns) -> Iterator[tuple[int, EventColumns]]:
    """Yield the iterations of a batch in rising order, each with its events."""
    if columns.unseen:
        yield from _iter_unseen_parts(columns)
        columns = dataclasses.replace(columns, unseen=())
    numbers = columns.columns["iteration"]
    if not len(numbers):
        return
    lowest = int(numbers.min())
    # Most batches belong to one iteration, and should not be sorted to find that out.
    if lowest == int(numbers.max()):
        yield lowest, columns
        return
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order])) + 1
    for chosen in np.split(order, starts):
        part = {name: column[chosen] for name, column in columns.columns.items()}
        yield int(numbers[chosen[0]]), dataclasses.replace(columns, columns=part)


def _iter_unseen_parts(columns: EventColumns) -> Iterator[tuple[int, EventColumns]]:
    """Yield a part without events for each iteration that has unseen collectives, because a batch
    may have no events of that iteration.
    """
    empty = {name: column[:0] for name, column in columns.columns.items()}
    for iteration in sorted({each.iteration for each in columns.unseen}):
        unseen = tuple(each for each in columns.unseen if each.iteration == iteration)
        yield iteration, dataclasses.replace(columns, columns=empty, unseen=unseen)


MAX_FINDINGS = 1000
"""Largest number of findings that a job keeps; further ones are counted, and are in the file beside
the order.
"""
MAX_DELAYED_EVENTS = 200_000
"""Largest number of events of complete iterations that a job holds while its order cannot be
written.
"""
MAX_REPORT_DELAY_US = 1_000_000
"""An event that a rank began this many microseconds before it sent a batch is in that batch or an
earlier one.
"""
ABANDONED_JOB_TIMEOUT_S = 3600.0
"""Seconds without a report after which a job waits for no agent, because all its hosts are gone."""
CLOSED_JOB_TIMEOUT_S = 5.0
"""Seconds without a report after which a job with closed sessions only is over."""


class ReportedJob:
    """Ranks, unpublished events and findings of one job, and its state rows that are not on disk
    yet.
    """

    def __init__(self, job_id: str, *, now_s: float) -> None:
        self.job_id = job_id
        self.first_s = self.last_report_s = now_s
        self.has_changed = False
        """Whether a report has arrived since the job was last written to the state."""
        self.roots: dict[str, None] = {}
        """Roots of the trees that were reported; the order is published in the first one."""
        self._other_trees: dict[str, None] = {}
        self.ranks = RankRegistry()
        self.pending: dict[int, PendingIteration] = {}
        # Iterations of earlier runs, which are published before the iterations of the present run.
        self.earlier_runs: list[PendingIteration] = []
        self.in_publication: PendingIteration | None = None
        self.is_delayed = False
        """Whether that iteration could not be written, and is attempted again."""
        self.rows: dict[object, StateRow] = {}
        """State rows that have changed since they were last written, by their keys."""
        self.published = PublishedIterations(job_id, self.rows)
        self.offsets: PublishedOffsets | None = None
        self.hint_state = ""
        self.hints: tuple[TimeoutHint, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.waits: tuple[RankWait, ...] = ()
        """The call that each rank waits in."""
        self.standing: tuple[Finding, ...] = ()
        """Findings about such calls that do not end, in iterations that are not published yet."""
        self.reported_ends: set[tuple[int, int]] = set()
        """Ranks whose end is a published finding, each with its number of restarts before."""
        self.findings: list[Finding] = []
        self.more_findings = 0
        self.freezes = JobFreezes()
        self.peer_steps = PeerSteps(job_id)
        self._first: dict[tuple[str, str], int] = {}
        """Number of the report in which an agent first reported a session."""
        self._groups: dict[int, tuple[ProcessGroup, ...]] = {}

    def add_root(self, root: str) -> None:
        """Add the root of a tree; if all sessions have ended, the order moves to the new tree."""
        if root in self.roots:
            return
        if self.roots and not self.ranks.has_ended():
            self._other_trees[root] = None
            self.roots[root] = None
        else:
            self.roots = {root: None, **self.roots}

    def build_tree_findings(self) -> list[Finding]:
        """Return findings about ranks that dump into another tree than the one with the order."""
        first = next(iter(self.roots), "")
        return [
            Finding(
                FindingKind.TWO_TREES,
                -1,
                f"job {self.job_id!r} dumps into {first} and {other}, and its order is in {first}: "
                f"if these are two jobs, give each its own RANKDUMP_JOB_ID",
            )
            for other in self._other_trees
        ]

    def update_session(self, session: SessionStatus, origin: tuple[str, int]) -> None:
        """Update a session; `origin` is the agent and the number of its report."""
        self.ranks.update_session(session, origin[0])
        # A session that has ended does not belong to a run that another rank has begun since.
        if session.state is SessionState.OPEN:
            start = self.ranks.count_earlier_starts(session.rank)
            self._enter_run(session.rank, start, session.session_id)
        agent_id, number = origin
        first = self._first.setdefault((session.session_id, agent_id), number)
        self.rows["session", session.session_id] = SessionStatusRow(
            session, agent_id, number, first
        )

    def restore_session(self, row: SessionStatusRow, *, acknowledged: int) -> None:
        """Restore a session of an agent whose items up to `acknowledged` are committed.

        The session counts if its agent will not report the beginning again. It is restored as open
        if the agent will report the end again, because events come before the end.
        """
        status = row.status
        self._first[status.session_id, row.agent_id] = row.first
        if row.first > acknowledged:
            self.ranks.restore_session(status)
        elif row.sequence > acknowledged:
            opened = dataclasses.replace(status, state=SessionState.OPEN)
            self.ranks.update_session(opened, row.agent_id)
        else:
            self.ranks.update_session(status, row.agent_id)

    def update_balance(
        self, status: IterationStatus, origin: tuple[str, int], *, now_s: float
    ) -> None:
        """Add a balance; the deadline of its iteration starts again."""
        iteration = status.iteration
        self.ranks.update_balance(status, needed=self.needs_iteration(iteration))
        if iteration in self.pending:
            self.pending[iteration].last_s = now_s
        self.rows["balance", status.session_id, iteration] = BalanceRow(status, *origin)

    def restore_balance(self, row: BalanceRow, *, acknowledged: int) -> None:
        """Restore a balance; it counts if its agent will not report it again."""
        if row.sequence > acknowledged:
            self.ranks.restore_balance(row.status)
        else:
            self.ranks.update_balance(row.status, needed=self.needs_iteration(row.status.iteration))

    def update_coverage(self, covered: ReportedRankCoverage) -> None:
        """Update the time up to which the events of a rank are known."""
        if not self.ranks.has_left(covered.rank, covered.session_id):
            self.ranks.update_known_until(covered.rank, covered.until_us)

    def update_timeouts(self, rank: int, timeouts: RankTimeouts) -> None:
        """Set the timeout limits that a rank has read."""
        self.ranks.update_timeouts(rank, timeouts)
        self.rows["timeouts", rank] = RankTimeoutsRow(self.job_id, rank, timeouts)

    def needs_iteration(self, iteration: int) -> bool:
        """Return whether an iteration of the present run is still to be published."""
        return iteration not in self.published

    def add_events(
        self,
        source: EventSource,
        columns: EventColumns,
        parts: IterationParts,
        *,
        agent_id: str,
        number: int,
        now_s: float,
    ) -> None:
        """Add the events of a batch to their iterations; count events that are too late.

        A batch without events may still declare groups, and it contains the stall of its rank.
        """
        rank = source.rank
        self.ranks.set_agent(source.session_id, agent_id)
        groups = self._known_groups(rank, columns)
        has_left = self.ranks.has_left(rank, source.session_id)
        start = self.ranks.count_earlier_starts(rank, source.session_id)
        if not has_left:
            self.ranks.stalls[rank] = columns.stalled_us
            newest_us = columns.sent_us or int(columns.columns["end_us"].max(initial=0))
            if newest_us:
                self.ranks.update_known_until(rank, newest_us - MAX_REPORT_DELAY_US)
            self._enter_run(rank, start, source.session_id)
        run = self.published.run
        for iteration, whole in parts:
            if len(whole):
                last = int(whole.columns["position"].max())
                self.ranks.note_place(source.session_id, last, iteration)
            part = self.published.select_unknown(iteration, rank, start, whole)
            if not len(part) and not part.unseen:
                continue
            pending = self._find_earlier_run(iteration, rank, start)
            if pending is None and has_left:
                attempt = self.ranks.get_attempt(source.session_id)
                pending = self._find_earlier_iteration(iteration, attempt)
            elif pending is None:
                pending = self._get_or_add_iteration(iteration, now_s=now_s)
            if pending is None:
                late_run = run - 1 if has_left else run
                if len(part):
                    self.published.count_late(late_run, iteration, rank, start, part)
            else:
                part, origin = dataclasses.replace(part, groups=groups), (agent_id, number)
                pending.add(rank, part, start=start, origin=origin, now_s=now_s)

    def _get_or_add_iteration(self, iteration: int, *, now_s: float) -> PendingIteration | None:
        """Return an iteration of the present run, which is added if it is new; None if it is
        published.
        """
        if not self.needs_iteration(iteration):
            return None
        root = next(iter(self.roots), "")
        run, attempt = self.published.run, self.published.attempt
        return self.pending.setdefault(
            iteration, PendingIteration(iteration, run, now_s, now_s, root, attempt)
        )

    def _find_earlier_run(self, iteration: int, rank: int, start: int) -> PendingIteration | None:
        """Return an iteration of an earlier run that already has events of this start of a rank.

        An agent that restarted resends events that the coordinator has, but has not published. They
        would be in two runs if they were added to the present one.
        """
        return next(
            (
                pending
                for pending in self.earlier_runs
                if pending.iteration == iteration and pending.starts.get(rank) == start
            ),
            None,
        )

    def _find_earlier_iteration(self, iteration: int, attempt: int) -> PendingIteration | None:
        """Return an iteration of an earlier run that is not being published yet."""
        place = iteration, attempt
        return next((p for p in self.earlier_runs if (p.iteration, p.attempt) == place), None)

    def find_ready(self, *, now_s: float, deadline_s: float) -> PendingIteration | None:
        """Return the lowest iteration if it is ready, or an overdue one; None if there
        is neither.
        """
        if self.earlier_runs:
            return self.earlier_runs[0]
        blocked = not self.roots
        for iteration in sorted(self.pending):
            pending = self.pending[iteration]
            if now_s - pending.last_s >= deadline_s:
                return pending
            if not blocked and (self._is_complete(iteration) or self._is_closed(now_s, deadline_s)):
                return pending
            blocked = True
        return None

    def find_next_complete(self) -> PendingIteration | None:
        """Return the lowest iteration that is not being published, if it is complete."""
        lowest = min(self.pending, default=None)
        if lowest is None or self.earlier_runs or not self.ranks.is_finished_by_all(lowest):
            return None
        return self.pending[lowest]

    def has_unpublished_backlog(self) -> bool:
        """Return whether more iterations are complete than may wait for the one in publication.

        None may wait while it is being written. While it cannot be written, which may take hours,
        some may: what agents report of other jobs, and that ranks have ended, is behind them.
        """
        if self.in_publication is None:
            return False
        complete = filter(self.ranks.is_finished_by_all, self.pending)
        if self.is_delayed:
            return sum(self.pending[each].count for each in complete) > MAX_DELAYED_EVENTS
        return any(True for _ in complete)

    def start_publication(self, pending: PendingIteration) -> None:
        """Begin to publish an iteration; events that arrive from now on are late."""
        iteration = pending.iteration
        finished, complete = self.ranks.find_finished(iteration), self._is_complete(iteration)
        if pending in self.earlier_runs:
            self.earlier_runs.remove(pending)
            # Later events of the ranks belong to another run.
            finished, complete = set[int](), False
        else:
            del self.pending[iteration]
        reached = {} if complete else dict(pending.last_positions)
        starts = {rank: self.ranks.count_earlier_starts(rank) for rank in finished} | pending.starts
        ((usual, _),) = Counter(starts.values()).most_common(1) or ((0, 0),)
        row = PublishedIterationRow(
            job_id=self.job_id,
            run=pending.run,
            iteration=iteration,
            events=pending.count,
            finished=None if complete else tuple(sorted(finished)),
            positions={rank: at for rank, at in reached.items() if rank not in finished},
            start=usual,
            starts={rank: start for rank, start in starts.items() if start != usual},
        )
        self.published.start_iteration(row)
        self.in_publication = pending

    def finish_publication(self, result: PublicationResult) -> None:
        """Store the result of the publication in progress."""
        pending, self.in_publication = self.in_publication, None
        self.is_delayed = False
        if pending is None:
            return
        self.published.finish_iteration(pending.run, pending.iteration, written=result.written)
        if pending.run == self.published.run:
            self.ranks.forget_iteration(pending.iteration)
        self.offsets, self.hint_state = result.offsets, result.hint_state
        for finding in result.findings:
            self._add_finding(finding)
            if finding.kind is FindingKind.ENDED_RANK:
                self.reported_ends.update((r, self.find_start(pending, r)) for r in finding.ranks)
        self.rows["settled"] = JobResultRow(
            self.job_id, self.offsets, self.hint_state, self.more_findings
        )

    def find_start(self, pending: PendingIteration, rank: int) -> int:
        """Return how often a rank had been restarted before an iteration."""
        return pending.starts.get(rank, self.ranks.count_earlier_starts(rank))

    def list_unpublished(self) -> list[PendingIteration]:
        """Return the unpublished iterations in the order of their publication."""
        publishing = [] if self.in_publication is None else [self.in_publication]
        return [*publishing, *self.earlier_runs, *(self.pending[at] for at in sorted(self.pending))]

    def changes(self, *, now_s: float, now_us: int) -> dict[object, StateRow]:
        """Return the state rows that have changed since the last call, by their keys."""
        rows: dict[object, StateRow] = {(self.job_id, key): row for key, row in self.rows.items()}
        self.rows.clear()
        if self.has_changed:
            first_us, heard_us = (
                now_us - int((now_s - at) * 1e6) for at in (self.first_s, self.last_report_s)
            )
            rows[self.job_id, "job"] = JobRow(self.job_id, tuple(self.roots), first_us, heard_us)
            self.has_changed = False
        return rows

    def has_ended(self, *, now_s: float, silent_s: float) -> bool:
        """Return whether the job has ended, or is silent, and everything is published."""
        silent = now_s - self.last_report_s >= silent_s
        return not self.list_unpublished() and (silent or self.ranks.has_ended())

    def list_awaited_agents(self, *, now_s: float) -> frozenset[str]:
        """Return the agents with open sessions; none for a job that is over or abandoned."""
        is_over = self.has_ended(now_s=now_s, silent_s=ABANDONED_JOB_TIMEOUT_S)
        return frozenset() if is_over else self.ranks.list_open_agents()

    def _enter_run(self, rank: int, start: int, session_id: str) -> None:
        """Add a start of a rank to the present run, or begin a new run with it."""
        attempt = self.ranks.get_attempt(session_id)
        is_elastic = self.ranks.is_elastic(session_id)
        if self.published.enter_run(rank, start, attempt, is_elastic=is_elastic):
            self.ranks.forget_superseded_balances()
            self.earlier_runs += (self.pending[iteration] for iteration in sorted(self.pending))
            self.pending.clear()

    def _add_finding(self, finding: Finding) -> None:
        number = len(self.findings)
        if number == MAX_FINDINGS:
            self.more_findings += 1
            return
        self.findings.append(finding)
        self.rows["finding", number] = FindingRow(self.job_id, number, finding)

    def _is_complete(self, iteration: int) -> bool:
        return 0 < self.ranks.world_size <= len(self.ranks.find_finished(iteration))

    def _is_closed(self, now_s: float, deadline_s: float) -> bool:
        return (
            now_s - self.last_report_s >= min(CLOSED_JOB_TIMEOUT_S, deadline_s)
            and self.ranks.has_ended()
        )

    def _known_groups(self, rank: int, columns: EventColumns) -> tuple[ProcessGroup, ...]:
        """Return all groups that a rank has declared so far, because later batches need not repeat
        them.
        """
        known = self._groups.get(rank, ())
        if columns.groups and columns.groups != known:
            known = tuple({group.name: group for group in (*known, *columns.groups)}.values())
            self._groups[rank] = known
        return known


def _find_ranks_in_later_iteration(job: ReportedJob, pending: PendingIteration) -> frozenset[int]:
    """Return the ranks that are known to have begun another iteration after this one."""
    return frozenset(
        rank
        for rank, last in job.ranks.list_last_places(pending.starts).items()
        if last.iteration != pending.iteration
        and (
            last.position > pending.last_positions[rank]
            if rank in pending.last_positions
            else last.iteration > pending.iteration
        )
    )


def _find_ends_reported_elsewhere(
    job: ReportedJob, pending: PendingIteration, lost: Iterable[int]
) -> frozenset[int]:
    """Return the lost ranks whose end is, or will be, a finding of another iteration."""
    places = job.ranks.list_last_places(pending.starts)
    return frozenset(
        rank
        for rank in lost
        if (rank, job.find_start(pending, rank)) in job.reported_ends
        or (rank in places and _is_reported_by_another(job, pending, rank, places[rank]))
    )


def _is_reported_by_another(
    job: ReportedJob, pending: PendingIteration, rank: int, last: ProgramPlace
) -> bool:
    """Return whether an unpublished iteration is the one that a rank ended in."""
    start = job.find_start(pending, rank)
    return any(
        each.iteration == last.iteration != pending.iteration
        and each.starts.get(rank) == start
        and rank not in job.ranks.list_spans(each.iteration)
        for each in job.list_unpublished()
    )


_MAX_LATE_RANKS = 8


def build_iteration_view(
    job: ReportedJob, pending: PendingIteration, clocks: Mapping[int, str], *, provisional: bool
) -> IterationView:
    """Return the collected events of an iteration; `clocks` contains the name of each
    rank's clock.
    """
    ranks = job.ranks
    # The present state of the ranks does not apply to an iteration of an earlier run.
    is_over = pending.run != job.published.run
    finished = set(range(ranks.world_size)) if is_over else ranks.find_finished(pending.iteration)
    lost = ranks.list_lost(pending.starts)
    later = _find_ranks_in_later_iteration(job, pending) if lost else frozenset[int]()
    late = (rank for rank in range(ranks.world_size) if rank not in finished)
    return IterationView(
        job_id=job.job_id,
        iteration=pending.iteration,
        root=pending.root or next(iter(job.roots), ""),
        events={rank: tuple(batches) for rank, batches in pending.events.items()},
        excluded=ranks.list_excluded(),
        late=tuple(islice(late, _MAX_LATE_RANKS)),
        late_count=max(0, ranks.world_size - len(finished)),
        spans={} if is_over else ranks.list_spans(pending.iteration),
        clocks=clocks,
        stalls=dict(ranks.stalls),
        lost=lost,
        ranks_in_later_iteration=later & lost.keys(),
        ends_reported_elsewhere=_find_ends_reported_elsewhere(job, pending, lost),
        raised=ranks.list_raised(pending.starts),
        provisional=provisional,
        attempt=pending.attempt,
    )


def build_job_view(job: ReportedJob, *, now_s: float) -> JobView:
    """Return a snapshot of a job without its events."""
    return JobView(
        job_id=job.job_id,
        roots=tuple(job.roots),
        sessions=tuple(job.ranks.sessions.values()),
        iterations=tuple(job.ranks.balances.values()),
        older_iterations=job.ranks.forgotten_balances,
        merge=_merge_status(job, now_s=now_s),
        hints=job.hints,
        findings=(*list_job_findings(job), *job.standing),
        more_findings=job.more_findings,
        waits=job.waits,
        agents=job.ranks.list_agents(),
        awaited_agents=job.list_awaited_agents(now_s=now_s),
    )


def list_job_findings(job: ReportedJob) -> list[Finding]:
    """Return the findings about published iterations, then those about late events and trees."""
    late = job.published.build_late_findings(MAX_FINDINGS)
    return [*job.findings, *late, *job.build_tree_findings()]


_MAX_UNPUBLISHED = 16


def _merge_status(job: ReportedJob, *, now_s: float) -> MergeStatus:
    unpublished = job.list_unpublished()
    oldest = min((pending.first_s for pending in unpublished), default=now_s)
    return MergeStatus(
        job_id=job.job_id,
        published_iterations=job.published.iterations,
        published_events=job.published.events,
        pending_iterations=len(unpublished),
        pending_events=sum(pending.count for pending in unpublished),
        lag_s=max(0.0, now_s - oldest),
        unpublished=tuple(pending.iteration for pending in unpublished[:_MAX_UNPUBLISHED]),
    )

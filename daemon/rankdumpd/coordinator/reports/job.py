"""Collected data of one job: events that are not published yet by iteration, findings, readiness of
iterations, and snapshots of all that. No I/O, and the clock is an argument; the owner holds the
lock.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
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
    SessionState,
    SessionStatus,
)
from rankdump._core.timeouts import RankTimeouts, TimeoutHint
from rankdumpd.coordinator.fleet_views import (
    IterationView,
    JobView,
    PublicationResult,
    PublishedOffsets,
    ReportedRankCoverage,
)
from rankdumpd.coordinator.reports.job_progress import PublishedIterations, RankRegistry
from rankdumpd.coordinator.state.state_rows import (
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
"""Iterations, and the events of a batch that belong to each."""


@dataclass(slots=True)
class PendingIteration:
    """Unpublished events of one iteration."""

    iteration: int
    run: int
    first_s: float
    """When its first events arrived."""
    last_s: float
    """When the last of its reports arrived."""
    root: str = ""
    """Tree of the job when its first events came; empty when none was named yet."""
    events: dict[int, list[EventColumns]] = field(default_factory=dict[int, list[EventColumns]])
    """By rank."""
    starts: dict[int, int] = field(default_factory=dict[int, int])
    """How often each of these ranks had started over."""
    lowest: dict[str, int] = field(default_factory=dict[str, int])
    """Of each agent, the first number that may have events here."""
    count: int = 0
    """Events of all ranks."""
    has_open_calls: bool = False
    """Something among them was not complete when it came."""

    def add(
        self,
        rank: int,
        part: EventColumns,
        *,
        start: int,
        origin: tuple[str, int],
        now_s: float,
    ) -> None:
        """Take a part of a batch; `origin` is its agent and the lowest number that its report may
        have.
        """
        self.events.setdefault(rank, []).append(part)
        self.starts[rank] = start
        self.count += len(part)
        self.lowest.setdefault(*origin)
        self.last_s = now_s
        if not self.has_open_calls:
            self.has_open_calls = bool((part.columns["end_position"] == OPEN_END_POSITION).any())

    def last_positions(self) -> dict[int, int]:
        """Return how far each rank has come."""
        return {
            rank: max(int(batch.columns["position"].max()) for batch in batches)
            for rank, batches in self.events.items()
        }


def split_by_iteration(columns: EventColumns) -> IterationParts:
    """Return the events of each iteration of a batch, in rising order."""
    return list(_iter_iteration_parts(columns))


def _iter_iteration_parts(columns: EventColumns) -> Iterator[tuple[int, EventColumns]]:
    numbers = columns.columns["iteration"]
    if not len(numbers):
        return
    lowest = int(numbers.min())
    # Most batches lie within one iteration, and finding that out must not cost a sort.
    if lowest == int(numbers.max()):
        yield lowest, columns
        return
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order])) + 1
    for chosen in np.split(order, starts):
        part = {name: column[chosen] for name, column in columns.columns.items()}
        yield int(numbers[chosen[0]]), dataclasses.replace(columns, columns=part)


MAX_FINDINGS = 1000
"""Findings kept of a job; the rest is counted here and stands in the job's file."""
MAX_REPORT_DELAY_US = 1_000_000
"""Every event that a rank began this long before it sent a batch is in that batch or earlier."""
CLOSED_JOB_TIMEOUT_S = 5.0
"""A job whose sessions are all closed is over after this time without a report."""


class ReportedJob:
    """Ranks, unpublished events and findings of one job, and what of it is not on disk yet."""

    def __init__(self, job_id: str, *, now_s: float) -> None:
        self.job_id = job_id
        self.first_s = self.heard_s = now_s
        self.has_news = False
        """Something came since it was last written down."""
        self.roots: dict[str, None] = {}
        """Trees that were named; the first of them takes the order."""
        self._other_trees: dict[str, None] = {}
        self.ranks = RankRegistry()
        self.pending: dict[int, PendingIteration] = {}
        # Of a run that is over: a rank of theirs has started anew.
        self.sealed: list[PendingIteration] = []
        self.in_publication: PendingIteration | None = None
        self.rows: dict[object, StateRow] = {}
        """Changed since they were last written, by their keys."""
        self.published = PublishedIterations(job_id, self.rows)
        self.offsets: PublishedOffsets | None = None
        self.hint_state = ""
        self.hints: tuple[TimeoutHint, ...] = ()
        self.warnings: tuple[str, ...] = ()
        self.findings: list[Finding] = []
        self.more_findings = 0
        self._first: dict[tuple[str, str], int] = {}
        """The report in which an agent spoke of a session first."""
        self._groups: dict[int, tuple[ProcessGroup, ...]] = {}

    def add_root(self, root: str) -> None:
        """Take the name of a tree; of a job whose sessions are all over the next tree counts."""
        if root in self.roots:
            return
        if self.roots and not self.ranks.all_over():
            self._other_trees[root] = None
            self.roots[root] = None
        else:
            self.roots = {root: None, **self.roots}

    def tree_findings(self) -> list[Finding]:
        """Return findings about ranks that dump into another tree than that of the order."""
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
        """Take the state of a session; `origin` is agent and number of the report it came in."""
        self.ranks.update_session(session, origin[0])
        # One that is over has no part in a run that another rank's next life has begun.
        if session.state is SessionState.OPEN:
            self._enter(session.rank, self.ranks.start_of(session.rank))
        agent_id, number = origin
        first = self._first.setdefault((session.session_id, agent_id), number)
        self.rows["session", session.session_id] = SessionStatusRow(
            session, agent_id, number, first
        )

    def restore_session(self, row: SessionStatusRow, *, acknowledged: int) -> None:
        """Remember a session, of whose agent everything up to a number is acknowledged.

        It counts when its beginning will not be said again. Its end, where that will be said
        again, comes after events.
        """
        status = row.status
        self._first[status.session_id, row.agent_id] = row.first
        if row.first > acknowledged:
            self.ranks.restore_session(status)
        elif row.sequence > acknowledged:
            self.ranks.update_session(dataclasses.replace(status, state=SessionState.OPEN))
        else:
            self.ranks.update_session(status)

    def update_balance(
        self, status: IterationStatus, origin: tuple[str, int], *, now_s: float
    ) -> None:
        """Take a balance; the deadline of its iteration begins anew."""
        iteration = status.iteration
        self.ranks.update_balance(status, needed=self.needs_iteration(iteration))
        if iteration in self.pending:
            self.pending[iteration].last_s = now_s
        self.rows["balance", status.session_id, iteration] = BalanceRow(status, *origin)

    def update_coverage(self, covered: ReportedRankCoverage) -> None:
        """Note the time up to which a rank is known."""
        if not self.ranks.has_left(covered.rank, covered.session_id):
            self.ranks.update_heard_until(covered.rank, covered.until_us)

    def update_timeouts(self, rank: int, timeouts: RankTimeouts) -> None:
        """Take what a rank knows of its limits."""
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
        """Take a batch of events, each to its iteration; count those that come too late.

        One without events still says which groups there are, and how long its rank was held up.
        """
        rank = source.rank
        self.ranks.set_agent(source.session_id, agent_id)
        groups = self._known_groups(rank, columns)
        left = self.ranks.has_left(rank, source.session_id)
        start = self.ranks.start_of(rank, source.session_id)
        if not left:
            self.ranks.stalls[rank] = columns.stalled_us
            newest_us = columns.sent_us or int(columns.columns["end_us"].max(initial=0))
            if newest_us:
                self.ranks.update_heard_until(rank, newest_us - MAX_REPORT_DELAY_US)
            self._enter(rank, start)
        run = self.published.run
        for iteration, whole in parts:
            part = self.published.select_unknown(iteration, rank, start, whole)
            if not len(part):
                continue
            if left or not self.needs_iteration(iteration):
                self.published.count_late(run - 1 if left else run, iteration, rank, start, part)
            else:
                root = next(iter(self.roots), "")
                pending = self.pending.setdefault(
                    iteration, PendingIteration(iteration, run, now_s, now_s, root)
                )
                part, about = dataclasses.replace(part, groups=groups), (agent_id, number)
                pending.add(rank, part, start=start, origin=about, now_s=now_s)

    def find_ready(self, *, now_s: float, deadline_s: float) -> PendingIteration | None:
        """Return the lowest iteration whose turn it is, or one that is overdue."""
        if self.sealed:
            return self.sealed[0]
        waiting = not self.roots
        for iteration in sorted(self.pending):
            pending = self.pending[iteration]
            if now_s - pending.last_s >= deadline_s:
                return pending
            if not waiting and (self._complete(iteration) or self._over(now_s, deadline_s)):
                return pending
            waiting = True
        return None

    def next_complete(self) -> PendingIteration | None:
        """Return the lowest iteration that is not handed out, if it is complete."""
        lowest = min(self.pending, default=None)
        if lowest is None or self.sealed or not self.ranks.all_declared(lowest):
            return None
        return self.pending[lowest]

    def is_crowded(self) -> bool:
        """Return whether complete iterations come faster than they are published."""
        return self.in_publication is not None and any(map(self.ranks.all_declared, self.pending))

    def start_publication(self, pending: PendingIteration) -> None:
        """Let an iteration be published; from now on its events are late."""
        iteration = pending.iteration
        finished, complete = self.ranks.find_finished(iteration), self._complete(iteration)
        if pending in self.sealed:
            self.sealed.remove(pending)
            # What of its ranks came behind the seal is in another run.
            finished, complete = set[int](), False
        else:
            del self.pending[iteration]
        reached = {} if complete else pending.last_positions()
        starts = {rank: self.ranks.start_of(rank) for rank in finished} | pending.starts
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
        """Record the result of the publication in progress."""
        pending, self.in_publication = self.in_publication, None
        if pending is None:
            return
        self.published.finish_iteration(pending.run, pending.iteration, written=result.written)
        self.ranks.forget_iteration(pending.iteration)
        self.offsets, self.hint_state = result.offsets, result.hint_state
        for finding in result.findings:
            self._add_finding(finding)
        self.rows["settled"] = JobResultRow(
            self.job_id, self.offsets, self.hint_state, self.more_findings
        )

    def unpublished(self) -> list[PendingIteration]:
        """Return all that is not in the tree yet, in the order in which it will be."""
        handed = [] if self.in_publication is None else [self.in_publication]
        return [*handed, *self.sealed, *(self.pending[at] for at in sorted(self.pending))]

    def changes(self, *, now_s: float, now_us: int) -> dict[object, StateRow]:
        """Return what has changed since the last call, by its keys."""
        rows: dict[object, StateRow] = {(self.job_id, key): row for key, row in self.rows.items()}
        self.rows.clear()
        if self.has_news:
            first_us, heard_us = (
                now_us - int((now_s - at) * 1e6) for at in (self.first_s, self.heard_s)
            )
            rows[self.job_id, "job"] = JobRow(self.job_id, tuple(self.roots), first_us, heard_us)
            self.has_news = False
        return rows

    def is_over(self, *, now_s: float, silent_s: float) -> bool:
        """Return whether no more is to be expected of the job."""
        silent = now_s - self.heard_s >= silent_s
        return not self.unpublished() and (silent or self.ranks.all_over())

    def _enter(self, rank: int, start: int) -> None:
        """Let a life of a rank be part of the present run, or of a new one that begins with it."""
        if self.published.enter_run(rank, start):
            self.sealed += (self.pending[iteration] for iteration in sorted(self.pending))
            self.pending.clear()

    def _add_finding(self, finding: Finding) -> None:
        number = len(self.findings)
        if number == MAX_FINDINGS:
            self.more_findings += 1
            return
        self.findings.append(finding)
        self.rows["finding", number] = FindingRow(self.job_id, number, finding)

    def _complete(self, iteration: int) -> bool:
        return 0 < self.ranks.world_size <= len(self.ranks.find_finished(iteration))

    def _over(self, now_s: float, deadline_s: float) -> bool:
        return (
            now_s - self.heard_s >= min(CLOSED_JOB_TIMEOUT_S, deadline_s) and self.ranks.all_over()
        )

    def _known_groups(self, rank: int, columns: EventColumns) -> tuple[ProcessGroup, ...]:
        """Return every group that a rank has declared so far: it need not repeat them."""
        known = self._groups.get(rank, ())
        if columns.groups and columns.groups != known:
            known = tuple({group.name: group for group in (*known, *columns.groups)}.values())
            self._groups[rank] = known
        return known


_MAX_LATE_RANKS = 8


def build_iteration_view(
    job: ReportedJob, pending: PendingIteration, clocks: Mapping[int, str], *, provisional: bool
) -> IterationView:
    """Return what is gathered of an iteration; `clocks` says which clock each rank reads."""
    ranks = job.ranks
    gone = ranks.find_finished(pending.iteration)
    late = (rank for rank in range(ranks.world_size) if rank not in gone)
    return IterationView(
        job_id=job.job_id,
        iteration=pending.iteration,
        root=pending.root or next(iter(job.roots), ""),
        events={rank: tuple(batches) for rank, batches in pending.events.items()},
        excluded=ranks.excluded(),
        late=tuple(islice(late, _MAX_LATE_RANKS)),
        late_count=max(0, ranks.world_size - len(gone)),
        spans=ranks.spans(pending.iteration),
        clocks=clocks,
        stalls=dict(ranks.stalls),
        provisional=provisional,
    )


def build_job_view(job: ReportedJob, *, now_s: float) -> JobView:
    """Return how a job stands, without its events."""
    return JobView(
        job_id=job.job_id,
        roots=tuple(job.roots),
        sessions=tuple(job.ranks.sessions.values()),
        iterations=tuple(job.ranks.balances.values()),
        older_iterations=job.ranks.forgotten_balances,
        merge=_merge_status(job, now_s=now_s),
        hints=job.hints,
        findings=tuple(list_job_findings(job)),
        more_findings=job.more_findings,
    )


def list_job_findings(job: ReportedJob) -> list[Finding]:
    """Return the findings about published iterations, then those about late events and trees."""
    late = job.published.late_findings(MAX_FINDINGS)
    return [*job.findings, *late, *job.tree_findings()]


def _merge_status(job: ReportedJob, *, now_s: float) -> MergeStatus:
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

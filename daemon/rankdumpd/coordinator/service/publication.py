"""Publication of iterations, first in files and then in the state; the hints of all jobs; and the
merge of the next iteration while another one is being written.

The merge of a large iteration runs mostly without the interpreter's lock. It is pure: an order that
was merged ahead is used if the iteration has not changed since then, else the iteration is merged
again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rankdump._core.backoff import RetrySchedule
from rankdump._core.events import Finding, FindingKind
from rankdump._core.freeze_record import JobFreeze
from rankdump._core.number_ranges import name_first_ranks
from rankdump._core.status import RankWait
from rankdump._core.timeouts import TimeoutHint
from rankdump.errors import ExhaustedError
from rankdumpd.coordinator.alarms.job_alarms import find_wait_alarms
from rankdumpd.coordinator.fleet_views import GlobalOrder, IterationView, PublicationResult
from rankdumpd.coordinator.hints.assessment import build_hints
from rankdumpd.coordinator.hints.open_waits import (
    STANDING_KINDS,
    explain_hint,
    find_open_waits,
    find_rank_waits,
    mark_stuck_waits,
    may_be_stuck,
    select_standing_findings,
)
from rankdumpd.coordinator.hints.rank_warnings import WarningKey, build_warnings
from rankdumpd.coordinator.hints.spread_history import HintState, update_hint_state
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.publish.publisher import OrderPublisher
from rankdumpd.coordinator.publish.tree_files import write_hints
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import StateWriter
from rankdumpd.server.background_thread import BackgroundThread
from rankdumpd.server.metrics import MetricCounters

MIN_PREMERGE_EVENTS = 200_000
"""Smallest number of events for which an iteration is merged ahead."""
_PREMERGE_INTERVAL_S = 0.05

_logger = logging.getLogger(__name__)


class OrderPremerger:
    """Merges one iteration ahead in a thread; `merge_view` is called from one thread at a time."""

    def __init__(self, upcoming: Callable[[int], IterationView | None]) -> None:
        """`upcoming` returns a complete iteration with at least a given number of
        events, or None.
        """
        self._upcoming = upcoming
        self._merging = threading.Lock()
        self._ready: tuple[IterationView, GlobalOrder] | None = None
        self.is_writing = False
        """Whether an iteration is being written; merging ahead saves time only then."""
        self.thread = BackgroundThread(self._run, "rankdumpd-merge-ahead")

    def merge_view(self, view: IterationView) -> GlobalOrder:
        """Return the order of an iteration, which was merged ahead or is merged now."""
        # This waits for a merge in progress, because that is probably the merge of this view.
        with self._merging:
            ready, self._ready = self._ready, None
        if ready is not None and ready[0] == view:
            return ready[1]
        return merge_iteration(view)

    def _run(self) -> None:
        while not self.thread.wait(_PREMERGE_INTERVAL_S):
            if self.is_writing:
                try:
                    self._merge_upcoming()
                except Exception:
                    # The merge for the publication will raise the same error, which is then
                    # reported.
                    _logger.debug("merging ahead failed", exc_info=True)

    def _merge_upcoming(self) -> None:
        with self._merging:
            view = self._upcoming(MIN_PREMERGE_EVENTS)
            if view is None or (self._ready and self._ready[0] == view):
                return
            self._ready = None
            self._ready = view, merge_iteration(view)


MAX_REMEMBERED_WARNINGS = 256
"""Largest number of warnings of a job whose texts are kept."""


class StandingCauses:
    """Findings about calls that do not end, in running and in published iterations of each job."""

    def __init__(self, store: ReportStore) -> None:
        self._store = store
        self._merged: dict[tuple[str, int], tuple[int, tuple[Finding, ...]]] = {}
        """Findings of running iterations, by job and iteration, with the number of events that were
        merged.
        """
        self._standing: dict[tuple[str, int], tuple[Finding, ...]] = {}
        """Those of these findings whose ranks have all waited for long, by job and iteration."""

    def update(self, views: Sequence[IterationView], *, now_us: int) -> set[str]:
        """Search running iterations; return the jobs whose findings have changed.

        An iteration is merged only if one of its ranks may be stuck.
        """
        before, self._merged, self._standing = self._merged, {}, {}
        waits_by_job: defaultdict[str, list[RankWait]] = defaultdict(list)
        for view in views:
            key, waits = (view.job_id, view.iteration), find_rank_waits(view, now_us)
            standing: tuple[Finding, ...] = ()
            if may_be_stuck(waits):
                self._merged[key] = self._merge(view, before.get(key))
                standing = select_standing_findings(self._merged[key][1], waits)
                self._standing[key] = standing
            waits_by_job[view.job_id] += mark_stuck_waits(waits, standing)
        return {
            job_id
            for job_id in self._store.list_job_ids()
            if self._store.set_waits(
                job_id, tuple(waits_by_job[job_id]), tuple(self.list_running(job_id))
            )
        }

    def list_running(self, job_id: str) -> list[Finding]:
        """Return the findings of a job about running iterations."""
        return [
            finding
            for (job, _), found in self._standing.items()
            for finding in found
            if job == job_id
        ]

    def list_findings(self, job_id: str) -> list[Finding]:
        """Return the findings of a job, those of running iterations first."""
        running = self.list_running(job_id)
        published = self._store.list_findings(job_id)
        return [*running, *(each for each in published if each.kind in STANDING_KINDS)]

    def forget_iteration(self, view: IterationView) -> None:
        """Forget the findings about a running iteration, because it is published."""
        self._merged.pop((view.job_id, view.iteration), None)
        self._standing.pop((view.job_id, view.iteration), None)

    @staticmethod
    def _merge(
        view: IterationView, before: tuple[int, tuple[Finding, ...]] | None
    ) -> tuple[int, tuple[Finding, ...]]:
        count = sum(len(batch) for batches in view.events.values() for batch in batches)
        if before is not None and before[0] == count:
            return before
        found = (each for each in merge_iteration(view).findings if each.kind in STANDING_KINDS)
        return count, tuple(found)


@dataclass(slots=True)
class _JobHints:
    """Data that the hints of a job are computed from, and the results."""

    state: HintState = field(default_factory=HintState)
    open: tuple[TimeoutHint, ...] = ()
    """Hints about calls that ranks wait in now."""
    root: str = ""
    """Root of the tree that the latest iteration with open calls belongs to."""
    written: tuple[str, ...] = ()
    """Content of the hints file that was written last."""
    warnings: dict[WarningKey, str] = field(default_factory=dict[WarningKey, str])


class HintUpdater:
    """Keeps the hints of all jobs up to date; for one thread at a time."""

    def __init__(self, store: ReportStore, *, roots: Sequence[str] = ()) -> None:
        """`roots` are the folders that trees may be in; if empty, trees may be anywhere."""
        self._store, self.roots = store, roots
        self._jobs: defaultdict[str, _JobHints] = defaultdict(_JobHints)
        self._causes = StandingCauses(store)

    def restore_states(self) -> None:
        """Restore the hints of all jobs in the store."""
        for job_id in self._store.list_job_ids():
            _, text = self._store.get_last_publication(job_id)
            try:
                if text:
                    self._jobs[job_id].state = HintState.from_json(text)
                    self._refresh(job_id)
            except Exception:
                # An error in stored hints must not prevent the publication of orders.
                _logger.exception(
                    "job %s: stored hints cannot be read and are computed again",
                    job_id,
                    extra={"job": job_id},
                )

    def observe_iteration(self, order: GlobalOrder, view: IterationView) -> str:
        """Add a merged iteration; return the hint state of its job as JSON text."""
        job = self._jobs[view.job_id]
        job.state = update_hint_state(job.state, order, view.stalls)
        return job.state.to_json()

    def update_published(self, view: IterationView) -> None:
        """Update the hints of a job after the publication of an iteration, and write them beside
        the dump.
        """
        job_id = view.job_id
        try:
            # No rank waits any more in a call of a published iteration.
            job = self._jobs[job_id]
            job.open = tuple(wait for wait in job.open if wait.iteration != view.iteration)
            self._causes.forget_iteration(view)
            self._refresh(job_id, view.root)
        except Exception:
            # An error in the hints must not undo the publication of the iteration.
            _logger.exception("job %s: hints could not be updated", job_id, extra={"job": job_id})

    def update_open_waits(self, *, now_us: int, now_s: float) -> list[JobFreeze]:
        """Update the hints about open waits, and remove hints about waits that are over.

        Return a freeze for each wait past half of its timeout.
        """
        alarms: list[JobFreeze] = []
        found: defaultdict[str, list[TimeoutHint]] = defaultdict(list)
        views = self._store.list_waiting_iterations(now_s=now_s)
        stuck = self._causes.update(views, now_us=now_us)
        for view in views:
            job = self._jobs[view.job_id]
            job.root = view.root
            facts = self._store.build_job_facts(view.job_id)
            hints = find_open_waits(view, facts, now_us, job.state)
            alarms += find_wait_alarms(view, hints, now_us)
            found[view.job_id] += hints
        for job_id in {*self._jobs, *stuck}:
            job, waits = self._jobs[job_id], tuple(found.get(job_id, ()))
            if waits != job.open or job_id in stuck:
                job.open = waits
                self._refresh(job_id, job.root)
        return alarms

    def forget_job(self, job_id: str) -> None:
        """Forget the hints of a job."""
        self._jobs.pop(job_id, None)

    def _refresh(self, job_id: str, root: str = "") -> None:
        job, facts = self._jobs[job_id], self._store.build_job_facts(job_id)
        published = build_hints(job.state, facts)
        causes = self._causes.list_findings(job_id)
        hints = tuple(
            explain_hint(hint, causes, facts.sessions) for hint in (*published, *job.open)
        )
        running = (finding.text for finding in self._causes.list_running(job_id))
        lines = build_warnings(hints, job.warnings, causes=running)
        job.warnings = dict([*(job.warnings | lines).items()][-MAX_REMEMBERED_WARNINGS:])
        texts = tuple(lines.values())
        if not self._store.set_hints(job_id, hints=hints, warnings=texts) or not root:
            return
        # Open waits grow all the time, so the file is written only when a wait begins or ends, or
        # when a warning changes.
        content = (repr(published), *texts, *(hint.group for hint in hints if hint.waiting))
        if job.written != content:
            job.written = content
            problem = write_hints(root, job_id, hints, roots=self.roots)
            if problem:
                _logger.warning("job %s: %s", job_id, problem, extra={"job": job_id})


MIN_PUBLISH_RETRY_S = 1.0
MAX_PUBLISH_RETRY_S = 30.0
"""Longest pause in seconds before the publication of an iteration is attempted again;
MIN_PUBLISH_RETRY_S is the first pause.
"""


@dataclass(frozen=True, slots=True)
class _DelayedIteration:
    """An iteration that could not be written and will be attempted again."""

    view: IterationView
    reason: str
    hurried: bool
    """Whether it was attempted before the end of its pause, because the coordinator stops."""


class IterationPublisher:
    """Merges and publishes one iteration after the other; for one thread at a time."""

    def __init__(
        self,
        store: ReportStore,
        hints: HintUpdater,
        state: StateWriter,
        orders: OrderPublisher,
        counters: MetricCounters,
    ) -> None:
        self._store, self._hints, self._state = store, hints, state
        self._orders, self._counters = orders, counters
        self._premerger = OrderPremerger(store.find_upcoming)
        self._delayed: dict[str, _DelayedIteration] = {}
        """The iteration of each job that will be attempted again, by job id."""
        self._retries = RetrySchedule(MIN_PUBLISH_RETRY_S, MAX_PUBLISH_RETRY_S)
        self.lost = 0
        """Number of iterations that could not be published."""
        self.finished_count = 0
        """Number of finished attempts to publish an iteration, successful or not."""

    def start(self) -> None:
        """Start the thread that merges ahead."""
        self._premerger.thread.start()

    def stop(self) -> None:
        """Stop the thread that merges ahead; may be repeated."""
        self._premerger.thread.stop()

    @property
    def problems(self) -> list[str]:
        """One sentence for each job whose order cannot be written at present."""
        return [
            f"job {job_id}: its order cannot be written and is tried again: {each.reason}"
            for job_id, each in list(self._delayed.items())
        ]

    def publish_next(self, *, every: bool = False) -> bool:
        """Publish one iteration, or attempt to; return whether there was an iteration to attempt.

        With `every`, delayed iterations are attempted once more before the end of their pause.
        """
        now_s = time.monotonic()
        view = self._next_due(now_s, every=every) or self._store.take_next_ready(
            now_s=now_s, every=every
        )
        if view is None:
            return False
        self._publish(view)
        self.finished_count += 1
        return True

    def _next_due(self, now_s: float, *, every: bool) -> IterationView | None:
        """Return a delayed iteration whose next attempt is due."""
        for job_id, delayed in self._delayed.items():
            if self._retries.is_due(job_id, now_s=now_s) or (every and not delayed.hurried):
                self._delayed[job_id] = replace(delayed, hurried=every)
                return delayed.view
        return None

    def _publish(self, view: IterationView) -> None:
        try:
            result = self._write(view)
        except ExhaustedError as error:
            self._postpone(view, str(error))
            return
        except Exception as error:
            # A failure of one iteration must not prevent the publication of others.
            _logger.exception(
                "job %s: iteration %d could not be published",
                view.job_id,
                view.iteration,
                extra={"job": view.job_id, "iteration": view.iteration},
            )
            result = self._give_up(view, error)
        if not result.written:
            self.lost += 1
            self._counters.add("rankdump_coordinator_lost_iterations_total")
        self._store.finish_publication(view.job_id, result)
        self._state.write_changes()
        self._hints.update_published(view)
        if self._retries.forget(view.job_id):
            del self._delayed[view.job_id]
            _logger.warning(
                "job %s: its order can be written again", view.job_id, extra={"job": view.job_id}
            )

    def _postpone(self, view: IterationView, reason: str) -> None:
        before = self._delayed.get(view.job_id)
        if before is None or before.reason != reason:
            _logger.error(
                "job %s: iteration %d cannot be written and is tried again: %s",
                view.job_id,
                view.iteration,
                reason,
                extra={"job": view.job_id, "iteration": view.iteration},
            )
        self._store.delay_publication(view.job_id)
        self._retries.postpone(view.job_id, now_s=time.monotonic())
        hurried = before is not None and before.hurried
        self._delayed[view.job_id] = _DelayedIteration(view, reason, hurried)

    def _write(self, view: IterationView) -> PublicationResult:
        offsets, _ = self._store.get_last_publication(view.job_id)
        order = self._premerger.merge_view(view)
        self._premerger.is_writing = True
        try:
            written, problem = self._orders.append(
                order, job_id=view.job_id, root=view.root, offsets=offsets
            )
        finally:
            self._premerger.is_writing = False
        if written is not None:
            self._counters.add("rankdump_coordinator_published_iterations_total")
            self._counters.add("rankdump_coordinator_published_events_total", len(order))
        findings = [*_build_partial_findings(view), *order.findings]
        if problem:
            findings.append(_make_unpublished_finding(view, problem))
        offsets, findings_problem = self._orders.append_findings(
            findings, job_id=view.job_id, root=view.root, offsets=written or offsets
        )
        if findings_problem:
            text = f"iteration {view.iteration}: {findings_problem}"
            findings.append(_make_unpublished_finding(view, text))
        hint_state = self._update_hint_state(order, view)
        return PublicationResult(offsets, written is not None, tuple(findings), hint_state)

    def _update_hint_state(self, order: GlobalOrder, view: IterationView) -> str:
        try:
            return self._hints.observe_iteration(order, view)
        except Exception:
            # The order is in the tree already, and an error in the hints must not remove it.
            _logger.exception(
                "job %s: hints could not be updated with iteration %d",
                view.job_id,
                order.iteration,
                extra={"job": view.job_id, "iteration": order.iteration},
            )
            return self._store.get_last_publication(view.job_id)[1]

    def _give_up(self, view: IterationView, error: Exception) -> PublicationResult:
        offsets, hint_state = self._store.get_last_publication(view.job_id)
        problem = f"its order could not be made and its events are lost: {error!r}"
        text = f"iteration {view.iteration}: {problem}"
        finding = _make_unpublished_finding(view, text)
        return PublicationResult(offsets, False, (finding,), hint_state)


def _make_unpublished_finding(view: IterationView, text: str) -> Finding:
    return Finding(FindingKind.UNPUBLISHED, view.iteration, text, attempt=view.attempt)


def _build_partial_findings(view: IterationView) -> Iterator[Finding]:
    """Yield a finding if an iteration is merged before all ranks have finished it."""
    if view.late_count:
        late = name_first_ranks(view.late, view.late_count)
        text = f"iteration {view.iteration}: merged before {late} had finished it"
        yield Finding(
            FindingKind.PARTIAL, view.iteration, text, ranks=view.late, attempt=view.attempt
        )

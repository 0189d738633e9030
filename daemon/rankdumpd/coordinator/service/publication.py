"""Publication of iterations, one after the other, from the collected events into files and then
into the state; the hints of every job; and the merge of the next iteration while one is being
written.

The merge of a large iteration runs mostly outside the interpreter's lock. It is pure, so an
order that was merged ahead counts when the iteration is still the same, and is merged again when
not.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from rankdump._core.events import Finding, FindingKind
from rankdump._core.timeouts import TimeoutHint
from rankdump.errors import ExhaustedError
from rankdumpd.coordinator.execution_order import GlobalOrder
from rankdumpd.coordinator.fleet_views import IterationView, PublicationResult
from rankdumpd.coordinator.hints.assessment import build_hints
from rankdumpd.coordinator.hints.open_waits import find_open_waits
from rankdumpd.coordinator.hints.rank_warnings import WarningKey, build_warnings
from rankdumpd.coordinator.hints.spread_history import HintState, update_hint_state
from rankdumpd.coordinator.merge.iteration_merge import merge_iteration
from rankdumpd.coordinator.publish.publisher import OrderPublisher, write_findings
from rankdumpd.coordinator.publish.tree_files import write_hints
from rankdumpd.coordinator.reports.report_store import ReportStore
from rankdumpd.coordinator.service.fleet_status import StateWriter
from rankdumpd.server.metrics import MetricCounters

MIN_PREMERGE_EVENTS = 200_000
"""Smaller iterations are merged in less time than it takes to talk about it."""
_PREMERGE_INTERVAL_S = 0.05

_logger = logging.getLogger(__name__)


class OrderPremerger:
    """One merge ahead; `order_of` is called from one thread at a time."""

    def __init__(self, upcoming: Callable[[int], IterationView | None]) -> None:
        """Ask `upcoming` for a complete iteration of so many events that waits to be handed out."""
        self._upcoming = upcoming
        self._merging = threading.Lock()
        self._ready: tuple[IterationView, GlobalOrder] | None = None
        self._busy = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look out."""
        self._thread = threading.Thread(target=self._run, name="rankdumpd-merge-ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End; may be repeated, and called without `start`."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def merge_view(self, view: IterationView) -> GlobalOrder:
        """Return the order of an iteration, merged already or now."""
        # While it is being merged ahead, waiting for that is the quickest way.
        with self._merging:
            ready, self._ready = self._ready, None
        if ready is not None and _is_same_view(ready[0], view):
            return ready[1]
        return merge_iteration(view)

    def set_writing(self, is_writing: bool) -> None:
        """Say whether an iteration is being written: only then there is something to gain."""
        if is_writing:
            self._busy.set()
        else:
            self._busy.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_PREMERGE_INTERVAL_S):
            if self._busy.is_set():
                try:
                    self._look()
                except Exception:
                    # Whatever it is, it will be said when the iteration's turn comes.
                    _logger.debug("merging ahead failed", exc_info=True)

    def _look(self) -> None:
        with self._merging:
            view = self._upcoming(MIN_PREMERGE_EVENTS)
            if view is None or (self._ready and _is_same_view(self._ready[0], view)):
                return
            self._ready = None
            self._ready = view, merge_iteration(view)


def _is_same_view(one: IterationView, other: IterationView) -> bool:
    """Return whether the same order comes out of two views; batches are compared by identity."""
    return all(getattr(one, field) == getattr(other, field) for field in _ORDER_FIELDS)


_ORDER_FIELDS = (
    "job_id",
    "iteration",
    "events",
    "excluded",
    "late",
    "late_count",
    "spans",
    "clocks",
    "provisional",
)


MAX_REMEMBERED_WARNINGS = 256
"""Things of a job of which it is remembered how they were said."""


class HintUpdater:
    """Hints of all jobs; its owner calls from one thread at a time."""

    def __init__(self, gather: ReportStore, *, roots: Sequence[str] = ()) -> None:
        """`roots` are the folders that trees may be in, any when there are none."""
        self._gather, self._roots = gather, roots
        self._states: dict[str, HintState] = {}
        self._live: dict[str, tuple[TimeoutHint, ...]] = {}
        self._written: dict[str, tuple[str, ...]] = {}
        self._said: dict[str, dict[WarningKey, str]] = {}

    def restore_states(self) -> None:
        """Take up the hints of jobs that are known from before."""
        for job_id in self._gather.job_ids():
            _, text = self._gather.get_last_publication(job_id)
            try:
                if text:
                    self._states[job_id] = HintState.from_json(text)
                    self._show(job_id)
            except Exception:
                # Hints that cannot be read must not keep orders from being published.
                _logger.exception("job %s: its hints begin anew", job_id, extra={"job": job_id})

    def observe_iteration(self, order: GlobalOrder, view: IterationView) -> str:
        """Take an iteration in; return the state of its job as JSON text."""
        before = self._states.get(view.job_id, HintState())
        state = self._states[view.job_id] = update_hint_state(before, order, view.stalls)
        return state.to_json()

    def update_published(self, job_id: str, root: str) -> None:
        """Show what an iteration has changed, and write it beside the dump."""
        try:
            self._show(job_id, root)
        except Exception:
            # The iteration is published whatever becomes of the hints.
            _logger.exception("job %s: no hints", job_id, extra={"job": job_id})

    def update_open_waits(self, *, now_us: int, now_s: float) -> None:
        """See who waits at present; a job in which nobody does any more has no such hint."""
        found: defaultdict[str, list[TimeoutHint]] = defaultdict(list)
        roots: dict[str, str] = {}
        for view in self._gather.list_waiting_iterations(now_s=now_s):
            roots[view.job_id] = view.root
            state = self._states.get(view.job_id)
            found[view.job_id] += find_open_waits(
                view, self._gather.build_job_facts(view.job_id), now_us, state
            )
        for job_id in {*self._live, *found}:
            live = tuple(found.get(job_id, ()))
            if live != self._live.get(job_id, ()):
                self._live[job_id] = live
                self._show(job_id, roots.get(job_id, ""))
        self._live = {job_id: live for job_id, live in self._live.items() if live}

    def forget_job(self, job_id: str) -> None:
        """Forget a job."""
        for known in (self._states, self._live, self._written, self._said):
            known.pop(job_id, None)

    def _show(self, job_id: str, root: str = "") -> None:
        state = self._states.get(job_id, HintState())
        settled = build_hints(state, self._gather.build_job_facts(job_id))
        hints = (*settled, *self._live.get(job_id, ()))
        before = self._said.get(job_id, {})
        lines = build_warnings(hints, before)
        self._said[job_id] = dict([*(before | lines).items()][-MAX_REMEMBERED_WARNINGS:])
        said = tuple(lines.values())
        if not self._gather.set_hints(job_id, hints=hints, warnings=said) or not root:
            return
        # A wait grows all the time; the file is for people, who read what has been said.
        worth = (repr(settled), *said)
        if self._written.get(job_id) != worth:
            self._written[job_id] = worth
            problem = write_hints(root, job_id, hints, roots=self._roots)
            if problem:
                _logger.warning("job %s: %s", job_id, problem, extra={"job": job_id})


MIN_PUBLISH_RETRY_S = 1.0
MAX_PUBLISH_RETRY_S = 30.0
"""Longest pause before a disk that refused is tried again."""


@dataclass(frozen=True, slots=True)
class _DelayedIteration:
    """An iteration that its disk had no room for."""

    view: IterationView
    why: str
    at_s: float
    """When it is tried again."""
    pause_s: float
    hurried: bool
    """It was tried out of turn, because no more time is left."""


class IterationPublisher:
    """Its owner calls from one thread at a time."""

    def __init__(
        self,
        gather: ReportStore,
        hinting: HintUpdater,
        keeping: StateWriter,
        *,
        table_events: int,
        trace_events: int,
        meters: MetricCounters,
        roots: Sequence[str] = (),
    ) -> None:
        """`roots` are the folders that trees may be in, any when there are none."""
        self._gather = gather
        self._hinting = hinting
        self._keeping, self._meters = keeping, meters
        self._roots = roots
        self._publisher = OrderPublisher(
            table_events=table_events, trace_events=trace_events, roots=roots
        )
        self._ahead = OrderPremerger(gather.find_upcoming)
        self._waiting: dict[str, _DelayedIteration] = {}
        """By job: what is handed out, and waits for its disk."""
        self.lost = 0
        """Iterations that could not be published."""

    def start(self) -> None:
        """Begin to merge ahead."""
        self._ahead.start()

    def stop(self) -> None:
        """Merge nothing ahead any more; may be repeated."""
        self._ahead.stop()

    @property
    def problems(self) -> list[str]:
        """Why orders are not published at present, a sentence for each job."""
        return [
            f"job {job_id}: its order waits for its disk and is tried again: {each.why}"
            for job_id, each in list(self._waiting.items())
        ]

    def publish_next(self, *, every: bool = False) -> bool:
        """Publish one iteration; return whether there was one that did not have to wait.

        With `every`, those that wait are tried once more without their pause.
        """
        now_s = time.monotonic()
        view = self._due(now_s, every=every) or self._gather.take_next_ready(
            now_s=now_s, every=every
        )
        return view is not None and self._settled(view)

    def _due(self, now_s: float, *, every: bool) -> IterationView | None:
        """Return an iteration that waited long enough."""
        for job_id, waiting in self._waiting.items():
            if waiting.at_s <= now_s or (every and not waiting.hurried):
                self._waiting[job_id] = replace(waiting, hurried=every)
                return waiting.view
        return None

    def _settled(self, view: IterationView) -> bool:
        try:
            settled = self._published(view)
        except ExhaustedError as error:
            self._wait(view, str(error))
            return True
        except Exception as error:
            # The edge of the worker: one bad iteration must not hold up the others.
            _logger.exception(
                "job %s, iteration %d",
                view.job_id,
                view.iteration,
                extra={"job": view.job_id, "iteration": view.iteration},
            )
            settled = self._given_up(view, error)
        if not settled.written:
            self.lost += 1
            self._meters.add("rankdump_coordinator_lost_iterations_total")
        self._gather.finish_publication(view.job_id, settled)
        self._keeping.write_changes()
        self._hinting.update_published(view.job_id, view.root)
        if self._waiting.pop(view.job_id, None):
            _logger.warning(
                "job %s: its order is published again", view.job_id, extra={"job": view.job_id}
            )
        return True

    def _wait(self, view: IterationView, why: str) -> None:
        before = self._waiting.get(view.job_id)
        pause_s = min(2 * before.pause_s, MAX_PUBLISH_RETRY_S) if before else MIN_PUBLISH_RETRY_S
        hurried = before is not None and before.hurried
        if before is None or before.why != why:
            _logger.error(
                "job %s, iteration %d waits: %s",
                view.job_id,
                view.iteration,
                why,
                extra={"job": view.job_id, "iteration": view.iteration},
            )
        at_s = time.monotonic() + pause_s
        self._waiting[view.job_id] = _DelayedIteration(view, why, at_s, pause_s, hurried)

    def _published(self, view: IterationView) -> PublicationResult:
        offsets, _ = self._gather.get_last_publication(view.job_id)
        order = self._ahead.merge_view(view)
        self._ahead.set_writing(True)
        try:
            written, problem = self._publisher.append(
                order, job_id=view.job_id, root=view.root, offsets=offsets
            )
        finally:
            self._ahead.set_writing(False)
        if written is not None:
            self._meters.add("rankdump_coordinator_published_iterations_total")
            self._meters.add("rankdump_coordinator_published_events_total", len(order))
        findings = [*_build_partial_findings(view), *order.findings]
        if problem:
            findings.append(Finding(FindingKind.UNPUBLISHED, view.iteration, problem))
        offsets, unnoted = write_findings(
            findings,
            job_id=view.job_id,
            root=view.root,
            offsets=written or offsets,
            roots=self._roots,
        )
        if unnoted:
            text = f"iteration {view.iteration}: {unnoted}"
            findings.append(Finding(FindingKind.UNPUBLISHED, view.iteration, text))
        hint_state = self._observed(order, view)
        return PublicationResult(offsets, written is not None, tuple(findings), hint_state)

    def _observed(self, order: GlobalOrder, view: IterationView) -> str:
        try:
            return self._hinting.observe_iteration(order, view)
        except Exception:
            # What is in the tree must count as published whatever becomes of the hints.
            _logger.exception(
                "job %s, iteration %d: no hints",
                view.job_id,
                order.iteration,
                extra={"job": view.job_id, "iteration": order.iteration},
            )
            return self._gather.get_last_publication(view.job_id)[1]

    def _given_up(self, view: IterationView, error: Exception) -> PublicationResult:
        offsets, hint_state = self._gather.get_last_publication(view.job_id)
        text = f"iteration {view.iteration}: its events are lost: {error!r}"
        found = Finding(FindingKind.UNPUBLISHED, view.iteration, text)
        return PublicationResult(offsets, False, (found,), hint_state)


def _build_partial_findings(view: IterationView) -> Iterator[Finding]:
    """Say which ranks an iteration is merged without having heard all of."""
    if view.late_count:
        named = " ".join(map(str, view.late))
        more = view.late_count - len(view.late)
        others = f" and {more} more" if more else ""
        text = f"iteration {view.iteration}: merged before rank {named}{others} had finished it"
        yield Finding(FindingKind.PARTIAL, view.iteration, text, ranks=view.late)

"""Takes one iteration after the other from the gathered events into files, then into the state."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rankdump.contract.errors import ExhaustedError
from rankdump.contract.findings import Finding, FindingKind
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.publish import Publisher, note
from rankdumpd.coordinator.service.ahead import Ahead
from rankdumpd.coordinator.service.hinting import Hinting
from rankdumpd.coordinator.service.keeping import Keeping
from rankdumpd.coordinator.values import GlobalOrder, IterationView, Settled

_LOG = logging.getLogger(__name__)

FIRST_S = 1.0
LAST_S = 30.0
"""Longest pause before a disk that refused is tried again."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An iteration that its disk had no room for."""

    view: IterationView
    why: str
    at_s: float
    """When it is tried again."""
    pause_s: float
    hurried: bool
    """It was tried out of turn, because no more time is left."""


class Publishing:
    """Its owner calls from one thread at a time."""

    def __init__(
        self,
        gather: Gather,
        hinting: Hinting,
        keeping: Keeping,
        *,
        table_events: int,
        trace_events: int,
        roots: Sequence[str] = (),
    ) -> None:
        """`roots` are the folders that trees may be in, any when there are none."""
        self._gather = gather
        self._hinting = hinting
        self._keeping = keeping
        self._roots = roots
        self._publisher = Publisher(
            table_events=table_events, trace_events=trace_events, roots=roots
        )
        self._ahead = Ahead(gather.upcoming)
        self._waiting: dict[str, _Waiting] = {}
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

    def next(self, *, every: bool = False) -> bool:
        """Publish one iteration; return whether there was one that did not have to wait.

        With `every`, those that wait are tried once more without their pause.
        """
        now_s = time.monotonic()
        view = self._due(now_s, every=every) or self._gather.next_ready(now_s=now_s, every=every)
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
            _LOG.exception("job %s, iteration %d", view.job_id, view.iteration)
            settled = self._given_up(view, error)
        self.lost += not settled.written
        self._gather.settle(view.job_id, settled)
        self._keeping.flush()
        self._hinting.published(view.job_id, view.root)
        if self._waiting.pop(view.job_id, None):
            _LOG.warning("job %s: its order is published again", view.job_id)
        return True

    def _wait(self, view: IterationView, why: str) -> None:
        before = self._waiting.get(view.job_id)
        pause_s = min(2 * before.pause_s, LAST_S) if before else FIRST_S
        hurried = before is not None and before.hurried
        if before is None or before.why != why:
            _LOG.error("job %s, iteration %d waits: %s", view.job_id, view.iteration, why)
        at_s = time.monotonic() + pause_s
        self._waiting[view.job_id] = _Waiting(view, why, at_s, pause_s, hurried)

    def _published(self, view: IterationView) -> Settled:
        book, _ = self._gather.kept(view.job_id)
        order = self._ahead.order_of(view)
        self._ahead.writing(True)
        try:
            written, problem = self._publisher.append(
                order, job_id=view.job_id, root=view.root, book=book
            )
        finally:
            self._ahead.writing(False)
        findings = [*_partial(view), *order.findings]
        if problem:
            findings.append(Finding(FindingKind.UNPUBLISHED, view.iteration, problem))
        book, unnoted = note(
            findings,
            job_id=view.job_id,
            root=view.root,
            book=written or book,
            roots=self._roots,
        )
        if unnoted:
            text = f"iteration {view.iteration}: {unnoted}"
            findings.append(Finding(FindingKind.UNPUBLISHED, view.iteration, text))
        hint_state = self._observed(order, view)
        return Settled(book, written is not None, tuple(findings), hint_state)

    def _observed(self, order: GlobalOrder, view: IterationView) -> str:
        try:
            return self._hinting.state_after(order, view)
        except Exception:
            # What is in the tree must count as published whatever becomes of the hints.
            _LOG.exception("job %s, iteration %d: no hints", view.job_id, order.iteration)
            return self._gather.kept(view.job_id)[1]

    def _given_up(self, view: IterationView, error: Exception) -> Settled:
        book, hint_state = self._gather.kept(view.job_id)
        text = f"iteration {view.iteration}: its events are lost: {error!r}"
        found = Finding(FindingKind.UNPUBLISHED, view.iteration, text)
        return Settled(book, False, (found,), hint_state)


def _partial(view: IterationView) -> Iterator[Finding]:
    """Say which ranks an iteration is merged without having heard all of."""
    if view.late_count:
        named = " ".join(map(str, view.late))
        more = view.late_count - len(view.late)
        others = f" and {more} more" if more else ""
        text = f"iteration {view.iteration}: merged before rank {named}{others} had finished it"
        yield Finding(FindingKind.PARTIAL, view.iteration, text, ranks=view.late)

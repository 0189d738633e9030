"""Keeps the hints of every job present: from what is published, and from who waits now."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator.gather import Gather
from rankdumpd.coordinator.hints import HintState, hints_of, observed, waiting, warnings
from rankdumpd.coordinator.hints.warning import Thing
from rankdumpd.coordinator.publish.hint_file import write_hints
from rankdumpd.coordinator.values import GlobalOrder, IterationView

MAX_SAID = 256
"""Things of a job of which it is remembered how they were said."""
_LOG = logging.getLogger(__name__)


class Hinting:
    """Hints of all jobs; its owner calls from one thread at a time."""

    def __init__(self, gather: Gather, *, roots: Sequence[str] = ()) -> None:
        """`roots` are the folders that trees may be in, any when there are none."""
        self._gather, self._roots = gather, roots
        self._states: dict[str, HintState] = {}
        self._live: dict[str, tuple[TimeoutHint, ...]] = {}
        self._written: dict[str, tuple[str, ...]] = {}
        self._said: dict[str, dict[Thing, str]] = {}

    def recall(self) -> None:
        """Take up the hints of jobs that are known from before."""
        for job_id in self._gather.job_ids():
            _, text = self._gather.kept(job_id)
            try:
                if text:
                    self._states[job_id] = HintState.from_json(text)
                    self._show(job_id)
            except Exception:
                # Hints that cannot be read must not keep orders from being published.
                _LOG.exception("job %s: its hints begin anew", job_id, extra={"job": job_id})

    def state_after(self, order: GlobalOrder, view: IterationView) -> str:
        """Take an iteration in; return the state of its job as JSON text."""
        before = self._states.get(view.job_id, HintState())
        state = self._states[view.job_id] = observed(before, order, view.stalls)
        return state.to_json()

    def published(self, job_id: str, root: str) -> None:
        """Show what an iteration has changed, and write it beside the dump."""
        try:
            self._show(job_id, root)
        except Exception:
            # The iteration is published whatever becomes of the hints.
            _LOG.exception("job %s: no hints", job_id, extra={"job": job_id})

    def look(self, *, now_us: int, now_s: float) -> None:
        """See who waits at present; a job in which nobody does any more has no such hint."""
        found: defaultdict[str, list[TimeoutHint]] = defaultdict(list)
        roots: dict[str, str] = {}
        for view in self._gather.waiting(now_s=now_s):
            roots[view.job_id] = view.root
            state = self._states.get(view.job_id)
            found[view.job_id] += waiting(view, self._gather.facts(view.job_id), now_us, state)
        for job_id in {*self._live, *found}:
            live = tuple(found.get(job_id, ()))
            if live != self._live.get(job_id, ()):
                self._live[job_id] = live
                self._show(job_id, roots.get(job_id, ""))
        self._live = {job_id: live for job_id, live in self._live.items() if live}

    def forget(self, job_id: str) -> None:
        """Forget a job."""
        for known in (self._states, self._live, self._written, self._said):
            known.pop(job_id, None)

    def _show(self, job_id: str, root: str = "") -> None:
        state = self._states.get(job_id, HintState())
        settled = hints_of(state, self._gather.facts(job_id))
        hints = (*settled, *self._live.get(job_id, ()))
        before = self._said.get(job_id, {})
        lines = warnings(hints, before)
        self._said[job_id] = dict([*(before | lines).items()][-MAX_SAID:])
        said = tuple(lines.values())
        if not self._gather.show(job_id, hints=hints, warnings=said) or not root:
            return
        # A wait grows all the time; the file is for people, who read what has been said.
        worth = (repr(settled), *said)
        if self._written.get(job_id) != worth:
            self._written[job_id] = worth
            problem = write_hints(root, job_id, hints, roots=self._roots)
            if problem:
                _LOG.warning("job %s: %s", job_id, problem, extra={"job": job_id})

"""What is gathered of one job; its owner holds the lock. No I/O, and the clock is an argument."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from rankdump.contract.events import EventColumns, ProcessGroup
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus
from rankdump.contract.timeouts import TimeoutHint
from rankdumpd.coordinator.values import IterationView

MAX_FINDINGS = 1000
"""Findings kept of a job; the rest is counted here and stands in the job's file."""
_LATE_NAMED = 8


@dataclass(slots=True)
class Pending:
    """Events of one iteration."""

    first_s: float
    """When the first of them came."""
    events: dict[int, list[EventColumns]] = field(default_factory=dict[int, list[EventColumns]])


class Job:
    """Sessions, balances and unpublished events of one job."""

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.roots: dict[str, None] = {}
        self.sessions: dict[str, SessionStatus] = {}
        self.balances: dict[tuple[str, int], IterationStatus] = {}
        self.pending: dict[int, Pending] = {}
        self.hints: tuple[TimeoutHint, ...] = ()
        self._world_size = 0
        self._session_of_rank: dict[int, str] = {}
        self._groups: dict[int, dict[str, ProcessGroup]] = {}
        # Iterations handed out, with the ranks that had finished them; None means every rank.
        self._handed_out: dict[int, frozenset[int] | None] = {}
        self._findings: list[str] = []
        self._more_findings = 0
        self._late_events: dict[tuple[int, int], int] = {}

    def name_root(self, root: str) -> None:
        """Remember a tree of the job; the first one named is where the order goes."""
        self.roots[root] = None

    def take_session(self, session: SessionStatus) -> None:
        """Take the state of a session; a rank's newest one speaks for the rank."""
        if session.session_id not in self.sessions:
            if session.rank in self._session_of_rank:
                # A rank that starts over counts its iterations anew.
                self._handed_out.clear()
            self._session_of_rank[session.rank] = session.session_id
            self._world_size = session.world_size
        self.sessions[session.session_id] = session

    def take_balance(self, status: IterationStatus) -> None:
        """Take the balance of one iteration of one rank."""
        self.balances[status.session_id, status.iteration] = status

    def take_events(self, rank: int, columns: EventColumns, *, now_s: float) -> None:
        """Take a batch of events, each to its iteration; count those that come too late."""
        known = self._groups.setdefault(rank, {})
        known.update((group.name, group) for group in columns.groups)
        for iteration, part in _by_iteration(columns, tuple(known.values())):
            if iteration not in self._handed_out:
                pending = self.pending.setdefault(iteration, Pending(now_s))
                pending.events.setdefault(rank, []).append(part)
                continue
            finished = self._handed_out[iteration]
            # A rank that had finished can only be repeating itself, after its agent restarted.
            if finished is not None and rank not in finished:
                key = (iteration, rank)
                self._late_events[key] = self._late_events.get(key, 0) + len(part)

    def ready(self, *, now_s: float, deadline_s: float) -> int | None:
        """Return the lowest iteration whose turn it is, or one that is overdue."""
        waiting = False
        for iteration in sorted(self.pending):
            if now_s - self.pending[iteration].first_s >= deadline_s:
                return iteration
            if not waiting and self.roots and self._complete(iteration):
                return iteration
            waiting = True
        return None

    def hand_out(self, iteration: int) -> IterationView:
        """Return an iteration and forget its events."""
        view = self.view(iteration)
        del self.pending[iteration]
        complete = self._complete(iteration)
        self._handed_out[iteration] = None if complete else frozenset(self._finished(iteration))
        return view

    def view(self, iteration: int) -> IterationView:
        """Return what is gathered of an iteration."""
        pending = self.pending[iteration]
        gone = self._finished(iteration)
        late = (rank for rank in range(self._world_size) if rank not in gone)
        return IterationView(
            job_id=self.job_id,
            iteration=iteration,
            root=next(iter(self.roots), ""),
            events={rank: tuple(batches) for rank, batches in pending.events.items()},
            excluded=frozenset(self._excluded()),
            late=tuple(islice(late, _LATE_NAMED)),
            late_count=max(0, self._world_size - len(gone)),
        )

    def add_findings(self, findings: Sequence[str]) -> None:
        """Keep findings, and count those there is no room for."""
        room = MAX_FINDINGS - len(self._findings)
        self._findings += findings[:room]
        self._more_findings += max(0, len(findings) - room)

    def all_findings(self) -> tuple[str, ...]:
        """Return what was found so far, in this job's words."""
        late = (
            f"iteration {iteration}: {count} events of rank {rank} came after it was published "
            "and are not in the order"
            for (iteration, rank), count in self._late_events.items()
        )
        more = f"{self._more_findings} more findings are in the file beside the order"
        return (*self._findings, *([more] if self._more_findings else []), *late)

    def _complete(self, iteration: int) -> bool:
        return 0 < self._world_size <= len(self._finished(iteration))

    def _finished(self, iteration: int) -> set[int]:
        """Return the ranks from which nothing more of an iteration is to be expected."""
        return {
            rank
            for rank, session_id in self._session_of_rank.items()
            if rank < self._world_size and self._is_finished(self.sessions[session_id], iteration)
        }

    def _is_finished(self, session: SessionStatus, iteration: int) -> bool:
        balance = self.balances.get((session.session_id, iteration))
        closed = session.state is SessionState.CLOSED or bool(session.excluded)
        return closed or (balance is not None and balance.complete)

    def _excluded(self) -> Iterator[int]:
        for rank, session_id in self._session_of_rank.items():
            if self.sessions[session_id].excluded:
                yield rank


def _by_iteration(
    columns: EventColumns, groups: tuple[ProcessGroup, ...]
) -> Iterator[tuple[int, EventColumns]]:
    """Yield the events of each iteration, with every group their rank has declared so far."""
    numbers = columns.columns["iteration"]
    iterations: list[int] = np.unique(numbers).tolist()
    for iteration in iterations:
        if len(iterations) == 1:
            yield iteration, EventColumns(columns.names, groups, columns.columns)
            return
        chosen = numbers == iteration
        part = {name: column[chosen] for name, column in columns.columns.items()}
        yield iteration, EventColumns(columns.names, groups, part)

"""How an agent stands, for people, scripts and monitoring."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from rankdump.contract import outlook
from rankdump.contract.room import JobNeed, MetricSample
from rankdump.contract.status import IterationStatus, SessionStatus, StatusView
from rankdumpd.agent.ledger_room import LedgerRoom
from rankdumpd.agent.limits import Limits
from rankdumpd.agent.metered import of_ledger, of_memory, of_report, of_status
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.sessions import Session


class Overview:
    """Looks at the rooms of an agent and changes none; safe to use from several threads."""

    def __init__(
        self,
        registry: Registry,
        limits: Limits,
        *,
        pins: Callable[[], Iterable[str]],
        slab_bytes: Callable[[], int],
        ledger: LedgerRoom,
        events: Callable[[], tuple[int, int]],
    ) -> None:
        """`events` says how many wait for the coordinator, and how many it will never hear."""
        self._registry, self._limits = registry, limits
        self._pins, self._slab_bytes, self._events = pins, slab_bytes, events
        self._ledger = ledger

    def view(self, said: Iterable[str]) -> StatusView:
        """Return everything people may want to know; `said` is what rooms say themselves."""
        sessions = self._registry.all()
        summary = self._summary(sessions)
        balances = [session.iterations() for session in sessions]
        needs = self._needs(sessions, summary.sessions, balances)
        return dataclasses.replace(
            summary,
            iterations=tuple(itertools.chain.from_iterable(balances)),
            needs=needs,
            findings=(
                *(sentence for session in sessions for sentence in session.findings()),
                *self._limits.findings(sessions),
                *outlook.findings(needs, summary.disks, summary.usage),
                *self._ledger.findings(),
                *said,
            ),
        )

    def samples(self) -> list[MetricSample]:
        """Return the numbers of this moment."""
        queue_bytes, queue_limit_bytes = self._limits.queue
        return [
            *of_status(self._summary(self._registry.all())),
            *of_memory(
                queue_bytes=queue_bytes,
                queue_limit_bytes=queue_limit_bytes,
                slab_bytes=self._slab_bytes(),
            ),
            *of_ledger(self._ledger.status()),
            *of_report(*self._events()),
        ]

    def _needs(
        self,
        sessions: Iterable[Session],
        statuses: Iterable[SessionStatus],
        balances: Iterable[Sequence[IterationStatus]],
    ) -> tuple[JobNeed, ...]:
        pinned = frozenset(self._pins())
        found = outlook.together(
            need
            for session, status, iterations in zip(sessions, statuses, balances, strict=True)
            if (need := _need_of(session, status, iterations)) is not None
        )
        return tuple(n if n.job_id in pinned else self._limits.staying(n) for n in found)

    def _summary(self, sessions: Sequence[Session]) -> StatusView:
        """Return what does not grow while a job runs."""
        return StatusView(
            sessions=tuple(session.status() for session in sessions),
            load=self._limits.load_of(sessions),
            roots=tuple(dict.fromkeys(str(session.outlet.tree.root) for session in sessions)),
            disks=self._limits.disks_of(sessions),
            usage=self._limits.jobs(self._pins()),
            memory=self._limits.memory(sum(session.live for session in sessions)),
            ledger=self._ledger.status(),
        )


def _need_of(
    session: Session, status: SessionStatus, iterations: Sequence[IterationStatus]
) -> JobNeed | None:
    root = str(session.outlet.tree.root)
    return outlook.need_of(status, session.plan, root, iterations)

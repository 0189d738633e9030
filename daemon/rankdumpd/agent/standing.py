"""How an agent stands, for people, for its coordinator and for monitoring."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from rankdump.contract.room import DiskStatus, MemoryStatus, MetricSample
from rankdump.contract.status import Load, StatusView
from rankdumpd.agent.budget import Budget
from rankdumpd.agent.disk import DiskGauge
from rankdumpd.agent.metered import of_memory, of_report, of_status
from rankdumpd.agent.registry import Registry
from rankdumpd.agent.report import Reporter
from rankdumpd.agent.sessions import Session
from rankdumpd.agent.slabs import Slabs
from rankdumpd.agent.values import Policy


class Standing:
    """Looks at the rooms of an agent and changes none; safe to use from several threads."""

    def __init__(
        self,
        registry: Registry,
        budget: Budget,
        slabs: Slabs,
        disk: DiskGauge,
        *,
        policy: Policy,
        memory_bytes: int,
        queue_bytes: int,
    ) -> None:
        """`memory_bytes` is what all may take together, `queue_bytes` what the queue may."""
        self._registry, self._budget, self._slabs, self._disk = registry, budget, slabs, disk
        self._policy = policy
        self._memory_bytes, self._queue_bytes = memory_bytes, queue_bytes

    def load(self) -> Load:
        """Return what is under way, and the room on the fullest disk."""
        return self.load_of(self._registry.all())

    def load_of(self, sessions: Iterable[Session]) -> Load:
        """Return the same as far as these sessions are concerned."""
        rooms = [self._disk.room(session.outlet.tree.root) for session in sessions]
        free, total = min(rooms, default=(0, 0))
        return Load(self._budget.items, self._budget.used_bytes, free, total)

    def view(self, more: Iterable[str]) -> StatusView:
        """Return everything people may want to know, with more to say behind it."""
        sessions = self._registry.all()
        said = (sentence for session in sessions for sentence in session.findings())
        return dataclasses.replace(
            self._summary(sessions),
            iterations=tuple(status for session in sessions for status in session.iterations()),
            findings=(*said, *more),
        )

    def samples(self, reporter: Reporter) -> list[MetricSample]:
        """Return the numbers of this moment."""
        return [
            *of_status(self._summary(self._registry.all())),
            *of_memory(
                queue_bytes=self._budget.used_bytes,
                queue_limit_bytes=self._queue_bytes,
                slab_bytes=self._slabs.held_bytes,
            ),
            *of_report(*reporter.events()),
        ]

    def _summary(self, sessions: Sequence[Session]) -> StatusView:
        """Return what does not grow while a job runs."""
        roots = dict.fromkeys(session.outlet.tree.root for session in sessions)
        rooms = {str(root): self._disk.room(root) for root in roots}
        floor = self._policy.keep_free_bytes
        taken = self._budget.used_bytes + self._slabs.held_bytes
        return StatusView(
            sessions=tuple(session.status() for session in sessions),
            load=self.load_of(sessions),
            roots=tuple(rooms),
            disks=tuple(DiskStatus(root, *room, floor) for root, room in rooms.items()),
            memory=MemoryStatus(taken, self._memory_bytes),
        )

"""The limits of an agent applied to its sessions: the resource usage that decides on a record, disk
and job status, and warnings for limits that are near. It never waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from rankdump._core import forecast
from rankdump._core.status import AgentLoad, DiskStatus, JobNeed, JobUsage, MemoryStatus
from rankdumpd.agent.limits import admission as rules
from rankdumpd.agent.limits.admission import ResourcePolicy, ResourceUsage
from rankdumpd.agent.limits.disk_space import DiskGauge
from rankdumpd.agent.limits.usage import DumpUsage, QueueBudget
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.shm.slab_folder import SESSION_BYTES, MemoryShares, SlabFolder
from rankdumpd.settings import AgentSettings

MAX_EARLIER_TREES = 16
"""Trees without a known session whose disks are in the status."""


class ResourceLimits:
    """The use of each limit; safe to use from several threads, and never waits."""

    def __init__(
        self,
        policy: ResourcePolicy,
        memory_shares: MemoryShares,
        budget: QueueBudget,
        usage: DumpUsage,
        slabs: SlabFolder,
    ) -> None:
        self.policy = policy
        """May be replaced by another at any time."""
        self._memory_shares, self._budget, self._usage = memory_shares, budget, usage
        self._slabs = slabs
        self._disk = DiskGauge()

    def usage_of(self, session: RankSession) -> ResourceUsage:
        """Return the usage by which a tensor of a session is admitted."""
        return self.usage_at(session.storage.tree.root, session.request.job_id)

    def usage_at(self, root: Path, job_id: str) -> ResourceUsage:
        """Return the usage by which a tensor of a job is admitted to a tree."""
        return ResourceUsage(
            self.policy,
            self._disk.space(root),
            queued_records=self._budget.items,
            queued_bytes=self._budget.used_bytes,
            used_bytes=self._usage.total,
            job_bytes=self._usage.job_bytes(job_id),
        )

    def find_shortage(self, root: Path, job_id: str, byte_count: int) -> str:
        """Return why a tree has no space for so many bytes of a job; empty when it has."""
        return rules.find_shortage(self.usage_at(root, job_id), byte_count)

    def find_ring_room(self, live_sessions: int) -> int:
        """Return how much memory queue, slabs and sessions leave to the rings of steps."""
        shares = self._memory_shares
        taken = shares.queue_bytes + self._slabs.held_bytes + live_sessions * SESSION_BYTES
        return max(0, shares.total_bytes - taken)

    def load_of(self, sessions: Iterable[RankSession]) -> AgentLoad:
        """Return the frames in flight, and the space on the fullest disk of some sessions."""
        spaces = [self._disk.space(root) for root in _list_roots(sessions)]
        fullest = min(spaces, key=lambda space: space.free_bytes, default=rules.DiskSpace())
        return AgentLoad(
            self._budget.items, self._budget.used_bytes, fullest.free_bytes, fullest.total_bytes
        )

    @property
    def queue(self) -> tuple[int, int]:
        """Bytes that are received and not committed, and their limit."""
        return self._budget.used_bytes, self._budget.limit_bytes

    def disks_of(self, sessions: Iterable[RankSession]) -> tuple[DiskStatus, ...]:
        """Return the disks of the trees of some sessions, and of the largest ones of before.

        After a restart no session is known until a rank opens one.
        """
        unfinished: Counter[Path] = Counter()
        for session in sessions:
            unfinished[session.storage.tree.root] += not session.over
        for root in self._usage.list_largest_roots(MAX_EARLIER_TREES):
            unfinished[Path(root)] += 0
        return tuple(self._make_disk_status(root, count) for root, count in unfinished.items())

    def jobs(self, pinned: Iterable[str]) -> tuple[JobUsage, ...]:
        """Return every job with a dump here, or with a pin."""
        kept = set(pinned)
        known = {job_id: (taken, retired) for job_id, taken, retired in self._usage.jobs()}
        return tuple(
            JobUsage(job_id, taken, self.policy.job_bytes, job_id in kept, retired)
            for job_id in sorted(known.keys() | kept)
            for taken, retired in [known.get(job_id, (0, 0))]
        )

    def limit_need(self, need: JobNeed) -> JobNeed:
        """Return the need of a job until retention removes its old iterations."""
        return forecast.limit_need_to_retention(need, self.policy.retain_bytes, self._usage.total)

    def memory(self, live_sessions: int, ring_bytes: int) -> MemoryStatus:
        """Return the memory of queue, slabs, sessions, and rings of steps with that size."""
        held = self._slabs.held_bytes + live_sessions * SESSION_BYTES + ring_bytes
        used = self._budget.used_bytes + held
        return MemoryStatus(used, self._memory_shares.total_bytes)

    def findings(self, sessions: Iterable[RankSession]) -> list[str]:
        """Return the limits that are near or reached, a sentence each, and silent disks."""
        near = [
            finding for root in _list_roots(sessions) for finding in self._list_disk_warnings(root)
        ]
        near += rules.list_cap_warnings(self.policy, self._usage.total)
        for job_id, taken, _ in self._usage.jobs():
            near += rules.list_job_warnings(self.policy, job_id, taken)
        return [*near, *self._disk.findings()]

    def warnings(self, session: RankSession) -> list[str]:
        """Return warnings for a rank: the limits because of which its tensors are dropped."""
        if not rules.find_limit_reason(self.usage_of(session), 0):
            return []
        root, job_id = session.storage.tree.root, session.request.job_id
        return [
            *self._list_disk_warnings(root),
            *rules.list_cap_warnings(self.policy, self._usage.total),
            *rules.list_job_warnings(self.policy, job_id, self._usage.job_bytes(job_id)),
        ]

    def _list_disk_warnings(self, root: Path) -> list[str]:
        return list(rules.list_disk_warnings(self.policy, str(root), self._disk.space(root)))

    def _make_disk_status(self, root: Path, unfinished_ranks: int) -> DiskStatus:
        space = self._disk.space(root)
        return DiskStatus(
            root=str(root),
            free_bytes=space.free_bytes,
            total_bytes=space.total_bytes,
            floor_bytes=rules.compute_floor_bytes(self.policy, space),
            free_inodes=space.free_inodes,
            total_inodes=space.total_inodes,
            used_bytes=self._usage.root_bytes(str(root)),
            limit_bytes=self.policy.disk_bytes,
            floor_inodes=rules.compute_floor_inodes(self.policy, space),
            unfinished_ranks=unfinished_ranks,
        )


def _list_roots(sessions: Iterable[RankSession]) -> list[Path]:
    return list(dict.fromkeys(session.storage.tree.root for session in sessions))


def make_policy(settings: AgentSettings, record_bytes: int) -> ResourcePolicy:
    """Return the limits in the settings, and that of the largest record."""
    return ResourcePolicy(
        max_record_bytes=record_bytes,
        keep_free_bytes=settings.keep_free_bytes,
        keep_free_ratio=settings.keep_free_ratio,
        keep_free_inodes_ratio=settings.keep_free_inodes_ratio,
        disk_bytes=settings.disk_bytes,
        job_bytes=settings.job_bytes,
        retain_s=settings.retain_days * 86_400,
        retain_bytes=settings.retain_bytes,
    )

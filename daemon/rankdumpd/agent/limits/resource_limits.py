"""The limits of an agent applied to its sessions: the resource usage that admission needs, the
status of disks and jobs, and warnings for limits that are near.

Free space on the disks of trees and of the ledger is sampled at most once a second in separate
threads, which may hang; callers never wait longer than SAMPLE_TIMEOUT_S.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rankdump._core import forecast
from rankdump._core.status import (
    AgentLoad,
    DiskStatus,
    JobNeed,
    JobUsage,
    LedgerStatus,
    MemoryStatus,
)
from rankdump._core.units import format_bytes
from rankdumpd.agent.limits import admission as rules
from rankdumpd.agent.limits.admission import DiskSpace, ResourcePolicy, ResourceUsage
from rankdumpd.agent.limits.usage import DumpUsage, QueueBudget
from rankdumpd.agent.session.rank_session import RankSession
from rankdumpd.agent.shm.slab_folder import SESSION_BYTES, MemoryShares, SlabFolder
from rankdumpd.settings import AgentSettings

_logger = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 1.0
SAMPLE_TIMEOUT_S = 0.1
"""Longest time in seconds that a caller waits for a disk; a slower disk is read in the
background.
"""
SILENCE_TIMEOUT_S = 5.0
"""Seconds after which a disk that does not answer becomes a finding."""
_MAX_ROOTS = 4096


@dataclass(slots=True)
class _DiskSample:
    """The last known space of the disk of one root."""

    space: DiskSpace = field(default_factory=DiskSpace)
    """The last space that was read without an error."""
    taken_s: float | None = None
    asked_s: float | None = None
    """Time since which a thread waits for the disk; None when no thread waits."""
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str = ""


def read_disk_space(root: Path) -> DiskSpace:
    """Return the space of a root's disk; the root itself need not exist. OSError when
    that fails.
    """
    while not root.exists() and root != root.parent:
        root = root.parent
    found = os.statvfs(root)
    unit = found.f_frsize
    return DiskSpace(found.f_bavail * unit, found.f_blocks * unit, found.f_favail, found.f_files)


class DiskGauge:
    """Disk space by root; safe to use from several threads.

    A disk that hangs delays no caller: the last good sample stays in use.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        look_up: Callable[[Path], DiskSpace] = read_disk_space,
    ) -> None:
        self._clock, self._look_up = clock, look_up
        self._lock = threading.Lock()
        self._disks: dict[str, _DiskSample] = {}

    def space(self, root: Path) -> DiskSpace:
        """Return the space of a root's disk, at most a second old unless the disk hangs."""
        name, now = str(root), self._clock()
        with self._lock:
            disk = self._get_sample(name)
            if disk.taken_s is not None and now - disk.taken_s < SAMPLE_INTERVAL_S:
                return disk.space
            if disk.asked_s is None:
                disk.asked_s = now
                disk.answered.clear()
                # One thread for each disk, because a disk that hangs must not delay the others.
                threading.Thread(
                    target=self._sample, args=(root, disk), name="rankdumpd-disk", daemon=True
                ).start()
            left_s = SAMPLE_TIMEOUT_S - (now - disk.asked_s)
        if left_s > 0:
            disk.answered.wait(left_s)
        return disk.space

    def findings(self) -> list[str]:
        """Return a finding for each disk that does not report its free space."""
        now = self._clock()
        with self._lock:
            disks = list(self._disks.items())
        return [finding for name, disk in disks if (finding := _describe_silence(name, disk, now))]

    def _get_sample(self, name: str) -> _DiskSample:
        if name not in self._disks:
            if len(self._disks) >= _MAX_ROOTS:
                self._disks = {n: d for n, d in self._disks.items() if d.asked_s is not None}
            self._disks[name] = _DiskSample()
        return self._disks[name]

    def _sample(self, root: Path, disk: _DiskSample) -> None:
        space, problem = None, ""
        try:
            space = self._look_up(root)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != disk.problem:
                about = {"root": str(root)}
                _logger.warning(
                    "cannot determine the free space under %s: %s", root, error, extra=about
                )
        with self._lock:
            disk.space = space or disk.space
            # Set the time after an error as well, so that the disk is not sampled again at once.
            disk.taken_s, disk.asked_s, disk.problem = self._clock(), None, problem
        disk.answered.set()


def _describe_silence(name: str, disk: _DiskSample, now: float) -> str:
    free_bytes, known = disk.space.free_bytes, disk.space.total_bytes
    before = f"{free_bytes} bytes were free at its last report" if known else "it never did"
    if disk.asked_s is not None and now - disk.asked_s >= SILENCE_TIMEOUT_S:
        silent_s = now - disk.asked_s
        return f"disk of {name} has not reported its free space for {silent_s:.0f} s: {before}"
    if disk.problem:
        return f"disk of {name} does not report its free space ({disk.problem}): {before}"
    return ""


LOW_SPACE_BYTES = 256 << 20
_LOW_SPACE_DIVISOR = 10
"""Divisor of a disk's total size; with less free space than the quotient, a small disk counts as
nearly full.
"""


class LedgerSpace:
    """Space of the state folder, read at most once a second; never delays its caller for long."""

    def __init__(
        self, folder: Path, look_up: Callable[[Path], DiskSpace] = read_disk_space
    ) -> None:
        self._folder, self._look_up = folder, look_up
        self._gauge = DiskGauge(look_up=self._measure)
        self._used_bytes = 0

    def status(self) -> LedgerStatus:
        """Return the present space; all zero when it was never read."""
        space = self._gauge.space(self._folder)
        return LedgerStatus(
            str(self._folder), self._used_bytes, space.free_bytes, space.total_bytes
        )

    def findings(self) -> list[str]:
        """Return findings about a disk that is nearly full or does not answer."""
        return [*list_ledger_warnings(self.status()), *self._gauge.findings()]

    def _measure(self, folder: Path) -> DiskSpace:
        space = self._look_up(folder)
        # The database, its write-ahead log and the log's index, which SQLite creates and removes.
        self._used_bytes = sum(path.stat().st_size for path in folder.glob("ledger.sqlite*"))
        return space


def list_ledger_warnings(ledger: LedgerStatus) -> list[str]:
    """Return a sentence when little space is left: ranks wait while the ledger cannot grow."""
    near = min(LOW_SPACE_BYTES, ledger.total_bytes // _LOW_SPACE_DIVISOR)
    if ledger.free_bytes >= near:
        return []
    return [
        f"state folder {ledger.folder}: {format_bytes(ledger.free_bytes)} free of "
        f"{format_bytes(ledger.total_bytes)}, the ledger takes "
        f"{format_bytes(ledger.used_bytes)}; "
        f"ranks wait when the disk is full (agent.state_dir)"
    ]


MAX_EARLIER_TREES = 16
"""Largest number of trees without a known session whose disks are in the status."""


class ResourceLimits:
    """Usage and limits of the resources of an agent; safe to use from several threads, and never
    waits.
    """

    def __init__(
        self,
        policy: ResourcePolicy,
        memory_shares: MemoryShares,
        budget: QueueBudget,
        usage: DumpUsage,
        slabs: SlabFolder,
    ) -> None:
        self.policy = policy
        """May be replaced at any time."""
        self._memory_shares, self._budget, self._usage = memory_shares, budget, usage
        self._slabs = slabs
        self._disk = DiskGauge()

    def usage_of(self, session: RankSession) -> ResourceUsage:
        """Return the usage that decides on tensors of a session."""
        return self.usage_at(session.storage.tree.root, session.request.job_id)

    def usage_at(self, root: Path, job_id: str) -> ResourceUsage:
        """Return the usage that decides on tensors of a job in a tree."""
        return ResourceUsage(
            self.policy,
            self._disk.space(root),
            queued_records=self._budget.items,
            queued_bytes=self._budget.used_bytes,
            used_bytes=self._usage.total,
            job_bytes=self._usage.job_bytes(job_id),
        )

    def find_shortage(self, root: Path, job_id: str, byte_count: int) -> str:
        """Return why a tree has no space for `byte_count` more bytes of a job; empty
        when it has.
        """
        return rules.find_shortage(self.usage_at(root, job_id), byte_count)

    def find_ring_room(self, live_sessions: int) -> int:
        """Return how many bytes of memory the queue, slabs and sessions leave for the rings of
        steps.
        """
        shares = self._memory_shares
        taken = shares.queue_bytes + self._slabs.held_bytes + live_sessions * SESSION_BYTES
        return max(0, shares.total_bytes - taken)

    def load_of(self, sessions: Iterable[RankSession]) -> AgentLoad:
        """Return the number of frames in flight, and the space on the fullest disk of some
        sessions.
        """
        spaces = [self._disk.space(root) for root in _list_roots(sessions)]
        fullest = min(spaces, key=lambda space: space.free_bytes, default=rules.DiskSpace())
        return AgentLoad(
            self._budget.items, self._budget.used_bytes, fullest.free_bytes, fullest.total_bytes
        )

    @property
    def queue(self) -> tuple[int, int]:
        """Bytes that are received and not yet committed, and their limit."""
        return self._budget.used_bytes, self._budget.limit_bytes

    def disks_of(self, sessions: Iterable[RankSession]) -> tuple[DiskStatus, ...]:
        """Return the status of the disks that have the trees of these sessions, or the largest
        earlier trees.

        After a restart no session is known until a rank opens one.
        """
        unfinished: Counter[Path] = Counter()
        for session in sessions:
            unfinished[session.storage.tree.root] += not session.over
        for root in self._usage.list_largest_roots(MAX_EARLIER_TREES):
            unfinished[Path(root)] += 0
        return tuple(self._make_disk_status(root, count) for root, count in unfinished.items())

    def jobs(self, pinned: Iterable[str]) -> tuple[JobUsage, ...]:
        """Return the usage of every job that has a dump here or is pinned."""
        kept = set(pinned)
        known = {job_id: (taken, retired) for job_id, taken, retired in self._usage.jobs()}
        return tuple(
            JobUsage(job_id, taken, self.policy.job_bytes, job_id in kept, retired)
            for job_id in sorted(known.keys() | kept)
            for taken, retired in [known.get(job_id, (0, 0))]
        )

    def limit_need(self, need: JobNeed) -> JobNeed:
        """Return the need of a job, reduced by what retention will remove in the meantime."""
        return forecast.limit_need_to_retention(need, self.policy.retain_bytes, self._usage.total)

    def memory(self, live_sessions: int, ring_bytes: int) -> MemoryStatus:
        """Return the memory of queue, slabs, sessions and of rings of steps with `ring_bytes`
        bytes.
        """
        held = self._slabs.held_bytes + live_sessions * SESSION_BYTES + ring_bytes
        used = self._budget.used_bytes + held
        return MemoryStatus(used, self._memory_shares.total_bytes)

    def findings(self, sessions: Iterable[RankSession]) -> list[str]:
        """Return a sentence for each limit that is near or reached, and for each disk that does not
        answer.
        """
        near = [
            finding for root in _list_roots(sessions) for finding in self._list_disk_warnings(root)
        ]
        near += rules.list_cap_warnings(self.policy, self._usage.total)
        for job_id, taken, _ in self._usage.jobs():
            near += rules.list_job_warnings(self.policy, job_id, taken)
        return [*near, *self._disk.findings()]

    def warnings(self, session: RankSession) -> list[str]:
        """Return warnings for a rank about the limits because of which its tensors are dropped."""
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
    """Return the limits that the settings give; `record_bytes` is that for the largest record."""
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

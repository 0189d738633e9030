"""The views of all workers as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rankdump.contract.room import DiskStatus, JobUsage, MemoryStatus
from rankdump.contract.status import StatusView, total_load


def merged(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return one view of disjoint ranks, with what else there is to say behind it."""
    said = (*(sentence for view in views for sentence in view.findings), *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=total_load(view.load for view in views),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(said)),
        disks=_disks(view.disks for view in views),
        usage=_usage(view.usage for view in views),
        memory=MemoryStatus(
            used_bytes=sum(view.memory.used_bytes for view in views),
            limit_bytes=sum(view.memory.limit_bytes for view in views),
        ),
    )


def _disks(seen: Iterable[Iterable[DiskStatus]]) -> tuple[DiskStatus, ...]:
    """Return each disk once; what workers take on it, and may take, together."""
    found: dict[str, DiskStatus] = {}
    for disk in (disk for disks in seen for disk in disks):
        before = found.get(disk.root)
        if before is not None:
            used = before.used_bytes + disk.used_bytes
            limit = before.limit_bytes + disk.limit_bytes
            disk = replace(disk, used_bytes=used, limit_bytes=limit)
        found[disk.root] = disk
    return tuple(found.values())


def _usage(seen: Iterable[Iterable[JobUsage]]) -> tuple[JobUsage, ...]:
    """Return each job once; each worker has a share of what it may take."""
    found: dict[str, JobUsage] = {}
    for job in (job for jobs in seen for job in jobs):
        before = found.get(job.job_id, JobUsage(job.job_id))
        found[job.job_id] = JobUsage(
            job_id=job.job_id,
            bytes_stored=before.bytes_stored + job.bytes_stored,
            limit_bytes=before.limit_bytes + job.limit_bytes,
            pinned=before.pinned or job.pinned,
            retired_iterations=before.retired_iterations + job.retired_iterations,
        )
    return tuple(found.values())

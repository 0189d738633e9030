"""The views of all workers as one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from rankdump.contract import outlook
from rankdump.contract.room import DiskStatus, JobUsage, LedgerStatus, MemoryStatus
from rankdump.contract.status import StatusView, total_load


def merged(views: Sequence[StatusView], findings: Iterable[str]) -> StatusView:
    """Return one view of disjoint ranks, with what else there is to say behind it."""
    disks, usage = _disks(view.disks for view in views), _usage(view.usage for view in views)
    needs = outlook.together(need for view in views for need in view.needs)
    ahead = outlook.findings(needs, disks, usage)
    said = (*_said(views, apart=bool(ahead)), *ahead, *findings)
    return StatusView(
        sessions=tuple(session for view in views for session in view.sessions),
        iterations=tuple(status for view in views for status in view.iterations),
        load=total_load(view.load for view in views),
        roots=tuple(dict.fromkeys(root for view in views for root in view.roots)),
        findings=tuple(dict.fromkeys(said)),
        disks=disks,
        usage=usage,
        memory=MemoryStatus(
            used_bytes=sum(view.memory.used_bytes for view in views),
            limit_bytes=sum(view.memory.limit_bytes for view in views),
        ),
        needs=needs,
        ledger=_ledger([view.ledger for view in views if view.ledger.folder]),
    )


def _said(views: Iterable[StatusView], *, apart: bool) -> Iterator[str]:
    """Yield what workers say; `apart` from what their own parts of limits leave room for."""
    for view in views:
        own = outlook.findings(view.needs, view.disks, view.usage) if apart else ()
        yield from (sentence for sentence in view.findings if sentence not in own)


def _ledger(seen: Sequence[LedgerStatus]) -> LedgerStatus:
    """Return all ledgers as one, in the folder above those of the workers."""
    if not seen:
        return LedgerStatus()
    return LedgerStatus(
        folder=seen[0].folder.rpartition("/")[0],
        used_bytes=sum(each.used_bytes for each in seen),
        free_bytes=min(each.free_bytes for each in seen),
        total_bytes=min(each.total_bytes for each in seen),
    )


def _disks(seen: Iterable[Iterable[DiskStatus]]) -> tuple[DiskStatus, ...]:
    """Return each disk once; what workers take on it, and may take, together."""
    found: dict[str, DiskStatus] = {}
    for disk in (disk for disks in seen for disk in disks):
        before = found.get(disk.root)
        if before is not None:
            used = before.used_bytes + disk.used_bytes
            limit = before.limit_bytes + disk.limit_bytes
            ranks = before.unfinished_ranks + disk.unfinished_ranks
            disk = replace(disk, used_bytes=used, limit_bytes=limit, unfinished_ranks=ranks)
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

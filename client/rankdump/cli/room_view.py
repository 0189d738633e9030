"""Limits and what is used of them, a line each. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rankdump.cli.text import counted, size
from rankdump.contract.room import DiskStatus, JobUsage, LedgerStatus
from rankdump.contract.status import StatusView


def room_lines(view: StatusView) -> list[str]:
    """Return what is under way, and what room each disk, job and the memory have left."""
    load = view.load
    queued = f"queued: {counted(load.queued_records, 'tensor')}, {size(load.queued_bytes)}"
    memory = view.memory
    if memory.limit_bytes:
        queued += f"; memory: {size(memory.used_bytes)} of {size(memory.limit_bytes)}"
    if not view.disks:
        queued += f"; disk: {size(load.disk_free_bytes)} free of {size(load.disk_total_bytes)}"
    ledger = [_ledger(view.ledger)] if view.ledger.folder else []
    return [queued, *map(_disk, view.disks), *ledger, *_jobs(view)]


def _disk(disk: DiskStatus) -> str:
    if not disk.total_bytes:
        return f"disk of {disk.root}: it never said how much is free"
    free = f"{size(disk.free_bytes)} free of {size(disk.total_bytes)}"
    kept = f", {size(disk.floor_bytes)} stay free" if disk.floor_bytes else ""
    files = f", {disk.free_inodes:,} files more" if disk.total_inodes else ""
    taken = _share(disk.used_bytes, disk.limit_bytes)
    return f"disk of {disk.root}: {free}{kept}{files}; dumps take {taken}"


def _ledger(ledger: LedgerStatus) -> str:
    taken = f"ledger in {ledger.folder}: {size(ledger.used_bytes)}"
    if not ledger.total_bytes:
        return taken
    return f"{taken}; {size(ledger.free_bytes)} free of {size(ledger.total_bytes)}"


def _share(used: int, limit: int) -> str:
    return f"{size(used)} of {size(limit)}" if limit else size(used)


def _jobs(view: StatusView) -> Iterator[str]:
    # One job without a limit takes what its table says already.
    several = len(view.usage) > 1
    for job in view.usage:
        if several or job.limit_bytes or job.pinned or job.retired_iterations:
            yield _job(job)


def _job(job: JobUsage) -> str:
    said = [_share(job.bytes_stored, job.limit_bytes)]
    if job.pinned:
        said.append("pinned")
    if job.retired_iterations:
        said.append(f"{counted(job.retired_iterations, 'manifest')} retired")
    return f"job {job.job_id}: {', '.join(said)}"

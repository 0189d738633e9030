"""What the iterations that jobs have still to dump will need, and where it does not fit. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rankdump.contract.forecast import (
    DiskRoom,
    Observed,
    Taken,
    forecast,
    planned,
    times,
    total,
    weighed,
)
from rankdump.contract.plan import DumpPlan
from rankdump.contract.room import DiskStatus, JobNeed, JobUsage
from rankdump.contract.sizes import size
from rankdump.contract.status import IterationStatus, SessionState, SessionStatus

FEW = 10
"""A plan without an end is spoken of when no more iterations than these fit."""
_MOST = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class _Limit:
    """Something that may be used up, and how that is said."""

    room: DiskRoom
    where: str
    said: str
    """How many bytes there are, with a place for them."""
    tensors_only: bool = False
    """Tables, manifests and the rest of a file's last block do not count."""


def need_of(
    session: SessionStatus, plan: DumpPlan, root: str, iterations: Iterable[IterationStatus]
) -> JobNeed | None:
    """Return what a session has still to dump, by the largest iteration that it ended.

    None where nothing is known or to come: before the first end, of a rank that is gone, and
    where only some operators of some iterations raise or overflow.
    """
    selection = plan.selection
    ended = [status for status in iterations if status.complete]
    if session.state is not SessionState.OPEN or selection.trigger != "always" or not ended:
        return None
    left = planned(selection.iterations, after=max(status.iteration for status in ended))
    if left == 0 or not any(status.kept for status in ended):
        return None
    most = max(ended, key=lambda status: status.bytes_stored)
    each = weighed(most, tabulated=plan.content.tabulated)
    return JobNeed(
        job_id=session.job_id,
        root=root,
        iterations=min(left or 0, _MOST),
        bytes_stored=each.bytes_stored,
        disk_bytes=each.disk_bytes,
        inodes=each.inodes,
    )


def together(needs: Iterable[JobNeed]) -> tuple[JobNeed, ...]:
    """Return what each job needs in each tree, all of its ranks together."""
    found: dict[tuple[str, str], JobNeed] = {}
    for need in needs:
        key = need.job_id, need.root
        before = found.get(key)
        found[key] = need if before is None else _sum(before, need)
    return tuple(found.values())


def before_removal(need: JobNeed, retain_bytes: int, used_bytes: int) -> JobNeed:
    """Return what is needed until old iterations go, where dumps may stay up to so many bytes."""
    if not retain_bytes or not need.bytes_stored:
        return need
    # One more: what is old goes after something new has come.
    most = max(0, retain_bytes - used_bytes) // need.bytes_stored + 1
    return replace(need, iterations=min(need.iterations or most, most))


def findings(
    needs: Iterable[JobNeed], disks: Iterable[DiskStatus], usage: Sequence[JobUsage]
) -> list[str]:
    """Return what does not fit, or hardly, a sentence for each limit."""
    needs, disks = list(needs), list(disks)
    found: list[str] = []
    for disk in disks:
        if disk.total_bytes:
            found += _said([n for n in needs if n.root == disk.root], _of_disk(disk))
    cap = max((disk.limit_bytes for disk in disks), default=0)
    if cap:
        used = sum(job.bytes_stored for job in usage)
        found += _said(needs, _of_cap(cap, used, "dumps", "disk_bytes"))
    for job in usage:
        if job.limit_bytes:
            limit = _of_cap(job.limit_bytes, job.bytes_stored, "its dump", "job_bytes")
            found += _said([n for n in needs if n.job_id == job.job_id], limit)
    return found


def _sum(one: JobNeed, other: JobNeed) -> JobNeed:
    endless = not (one.iterations and other.iterations)
    return replace(
        one,
        # A rank that is ahead has fewer to come: it is soon caught up with.
        iterations=0 if endless else max(one.iterations, other.iterations),
        # What agents say is any number; together it still has to fit into a message.
        bytes_stored=min(_MOST, one.bytes_stored + other.bytes_stored),
        disk_bytes=min(_MOST, one.disk_bytes + other.disk_bytes),
        inodes=min(_MOST, one.inodes + other.inodes),
    )


def _of_disk(disk: DiskStatus) -> _Limit:
    room = DiskRoom(
        free_bytes=max(0, disk.free_bytes - disk.floor_bytes),
        total_bytes=disk.total_bytes,
        free_inodes=max(0, disk.free_inodes - disk.floor_inodes),
        total_inodes=disk.total_inodes,
        keep_free_ratio=0.0,
    )
    floor = " above the floor (agent.keep_free_ratio, agent.keep_free_bytes)"
    said = "{} are free" + (floor if disk.floor_bytes else "")
    return _Limit(room, f" on the disk of {disk.root}", said)


def _of_cap(limit_bytes: int, used_bytes: int, whose: str, key: str) -> _Limit:
    free_bytes = max(0, limit_bytes - used_bytes)
    room = DiskRoom(free_bytes, limit_bytes, keep_free_ratio=0.0)
    return _Limit(room, "", f"{whose} may take {{}} more (agent.{key})", tensors_only=True)


def _said(needs: Sequence[JobNeed], limit: _Limit) -> Iterator[str]:
    for need in needs:
        if not need.iterations:
            each = _taken(need, limit)
            fitting = _fitting(each, None, limit)
            if fitting < FEW:
                who = f"job {need.job_id}: each iteration needs"
                yield f"{_lacking(who, each, limit, short=fitting + 1)}: {fitting} more fit"
    ending = [need for need in needs if need.iterations]
    whole = total(times(_taken(need, limit), need.iterations) for need in ending)
    if not ending or _fitting(whole, 1, limit):
        return
    if len(ending) > 1:
        names = ", ".join(dict.fromkeys(need.job_id for need in ending))
        yield _lacking(f"jobs {names}: their iterations to come need", whole, limit)
        return
    for need in ending:
        fitting = _fitting(_taken(need, limit), need.iterations, limit)
        more = f"{need.iterations:,} more iteration{'' if need.iterations == 1 else 's'}"
        verb = "needs" if need.iterations == 1 else "need"
        yield f"{_lacking(f'job {need.job_id}: {more} {verb}', whole, limit)}: {fitting:,} fit"


def _taken(need: JobNeed, limit: _Limit) -> Taken:
    disk_bytes = need.bytes_stored if limit.tensors_only else need.disk_bytes
    return Taken(files=need.inodes, bytes_stored=need.bytes_stored, disk_bytes=disk_bytes)


def _fitting(each: Taken, count: int | None, limit: _Limit) -> int:
    return forecast(Observed(1, 1, each, Taken()), count, limit.room).fitting


def _lacking(who: str, needed: Taken, limit: _Limit, *, short: int = 1) -> str:
    """Say what is needed and what there is, of the two that `short` times as much is short of."""
    room = limit.room
    if short * needed.disk_bytes > room.usable_bytes:
        there = limit.said.format(size(room.usable_bytes))
        return f"{who} {size(needed.disk_bytes)}{limit.where}, and {there}"
    files = f"{needed.inodes:,} files and folders{limit.where}"
    return f"{who} {files}, and it has room for {room.usable_inodes:,} more"

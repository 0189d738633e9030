"""Forecast of the files, bytes, disk space and time that a plan needs, based on its iterations so
far, and of the limits that the remaining iterations of running jobs will exceed. Pure: no clock, no
disk, no network.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace

from rankdump._core.plan import DumpPlan, IterationSelection
from rankdump._core.status import (
    DiskStatus,
    IterationStatus,
    JobNeed,
    JobUsage,
    SessionState,
    SessionStatus,
)
from rankdump._core.units import format_bytes

KEEP_FREE_RATIO = 0.1
"""Share of a disk that agents leave free by default."""
FEW_ITERATIONS = 10
"""A plan without an end is reported if fewer iterations than this fit on the disk."""
_BLOCK_BYTES = 4096
_MAX_COUNT = (1 << 63) - 1
"""Limit of counts and sums, which must fit into a message: agents may report any number."""
_RECORD_BYTES = 400
"""Average bytes of a tensor's record in a manifest."""
_ROW_BYTES = 200
"""Average bytes of a row of statistics."""


@dataclass(frozen=True, slots=True)
class DumpSize:
    """Size of a dump or of a part of it."""

    tensors: int = 0
    files: int = 0
    """Number of files on the disk, including tables and manifests; links to the same bytes count
    once.
    """
    folders: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    disk_bytes: int = 0
    """Bytes on the disk in whole blocks, including folders."""
    stall_us: int = 0
    """Longest time in microseconds for which dumping delayed a rank."""
    wall_us: int = 0
    """Longest time in microseconds from the first tensor of a rank to its last."""

    @property
    def inodes(self) -> int:
        """Number of files and folders."""
        return self.files + self.folders


_NOTHING = DumpSize()


@dataclass(frozen=True, slots=True)
class ObservedDump:
    """Sizes measured in a dump."""

    iterations: int
    """Number of iterations that are complete on all measured ranks."""
    ranks: int
    per_iteration: DumpSize
    """Size of the largest iteration."""
    per_job: DumpSize
    """Size of what is written once: constants, graphs and execution orders."""
    problems: tuple[str, ...] = ()
    """Sentences about unreadable manifests, whose iterations are not part of the sizes."""


@dataclass(frozen=True, slots=True)
class DiskCapacity:
    """Capacity of a disk, and the part of it that agents leave free."""

    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0
    """Number of inodes of the disk; 0 if it has no limit of inodes."""
    keep_free_ratio: float = KEEP_FREE_RATIO

    @property
    def usable_bytes(self) -> int:
        """Bytes that a dump may take before its tensors are dropped."""
        return max(0, self.free_bytes - math.ceil(self.total_bytes * self.keep_free_ratio))

    @property
    def usable_inodes(self) -> int | None:
        """Inodes that a dump may take; None if there is no limit."""
        return max(0, self.free_inodes) if self.total_inodes else None

    def count_fitting(self, each: DumpSize, once: DumpSize = _NOTHING) -> int:
        """Return how many times the size `each` fits beside the size `once`."""
        fitting = _count_times(self.usable_bytes - once.disk_bytes, each.disk_bytes)
        if self.usable_inodes is None:
            return fitting
        return min(fitting, _count_times(self.usable_inodes - once.inodes, each.inodes))


def _count_times(left: int, each: int) -> int:
    if left < 0:
        return 0
    return left // each if each else _MAX_COUNT


@dataclass(frozen=True, slots=True)
class DumpForecast:
    """Needs of a plan, and whether the disk can satisfy them."""

    iterations: int | None
    """Number of iterations of the plan; None if it has no end: the sizes are then those of one
    iteration.
    """
    tensors: int
    files: int
    bytes_in: int
    bytes_stored: int
    disk_bytes: int
    stall_us: int
    wall_us: int
    usable_bytes: int
    total_bytes: int
    """Capacity of the disk in bytes."""
    keep_free_ratio: float
    fitting: int
    """Number of iterations that fit on the disk."""
    fits: bool
    reason: str = ""
    """Why the dump does not fit; empty if it fits."""


def count_planned_iterations(iterations: IterationSelection, *, after: int = -1) -> int | None:
    """Return how many iterations after the iteration `after` a plan selects; None for a plan
    without an end.
    """
    if iterations.spans is None:
        return None
    count, behind = 0, after
    for low, high in sorted(iterations.spans):
        first = max(low, behind + 1)
        count += max(0, high - first + 1)
        behind = max(behind, high)
    return count


def forecast_dump(
    observed: ObservedDump, iterations: int | None, capacity: DiskCapacity
) -> DumpForecast:
    """Return the forecast for this number of iterations.

    None stands for a plan without an end, which fits if one more iteration fits.
    """
    count = 1 if iterations is None else iterations
    every, once = multiply_size(observed.per_iteration, count), observed.per_job
    fitting = capacity.count_fitting(observed.per_iteration, observed.per_job)
    reason = "" if count <= fitting else _explain_shortage(observed, count, capacity)
    return DumpForecast(
        iterations=iterations,
        tensors=every.tensors + once.tensors,
        files=every.files + once.files,
        bytes_in=every.bytes_in + once.bytes_in,
        bytes_stored=every.bytes_stored + once.bytes_stored,
        disk_bytes=every.disk_bytes + once.disk_bytes,
        stall_us=every.stall_us,
        wall_us=every.wall_us,
        usable_bytes=capacity.usable_bytes,
        total_bytes=capacity.total_bytes,
        keep_free_ratio=capacity.keep_free_ratio,
        fitting=fitting,
        fits=not reason,
        reason=reason,
    )


def estimate_iteration_size(status: IterationStatus, *, tabulated: bool) -> DumpSize:
    """Return the size of an iteration of a rank, estimated from its sums without looking at its
    files.

    A file is rounded up to whole blocks, which adds half a block on average. `tabulated` says that
    each tensor has a row of statistics. A tensor that shares a file counts as if it had its own.
    """
    rows = status.kept_tensors if tabulated else status.degraded
    blocks = status.stored * _BLOCK_BYTES
    tensors = max(blocks, status.bytes_stored + blocks // 2)
    table = _round_to_blocks(rows * _ROW_BYTES)
    manifest = _round_to_blocks(status.kept_tensors * _RECORD_BYTES + 1)
    return DumpSize(
        tensors=status.kept_tensors,
        files=status.stored + bool(rows) + 1,
        folders=1,
        bytes_in=status.bytes_in,
        bytes_stored=status.bytes_stored,
        disk_bytes=tensors + table + manifest + _BLOCK_BYTES,
        stall_us=status.stall_us,
    )


def multiply_size(taken: DumpSize, count: int) -> DumpSize:
    """Return `count` times a size."""
    return DumpSize(*(count * value for value in astuple(taken)))


def find_largest_size(some: Sequence[DumpSize]) -> DumpSize:
    """Return the size with the most disk bytes, combined with the longest times of all sizes."""
    return _set_longest_times(max(some, key=lambda taken: taken.disk_bytes), some)


def sum_sizes(some: Iterable[DumpSize]) -> DumpSize:
    """Return the sum of sizes, with the longest of their times, because ranks run in parallel."""
    every = list(some)
    total = DumpSize(*map(sum, zip(*map(astuple, every), strict=True)))
    return _set_longest_times(total, every)


def _round_to_blocks(byte_count: int) -> int:
    return -(-byte_count // _BLOCK_BYTES) * _BLOCK_BYTES


def _set_longest_times(taken: DumpSize, some: Sequence[DumpSize]) -> DumpSize:
    return replace(
        taken,
        stall_us=max((each.stall_us for each in some), default=0),
        wall_us=max((each.wall_us for each in some), default=0),
    )


def _explain_shortage(observed: ObservedDump, count: int, capacity: DiskCapacity) -> str:
    each, once = observed.per_iteration, observed.per_job
    needed, usable = count * each.disk_bytes + once.disk_bytes, capacity.usable_bytes
    if needed > usable:
        return f"{format_bytes(needed)} are needed, but only {format_bytes(usable)} may be used"
    needed = count * each.inodes + once.inodes
    left = f"{capacity.usable_inodes:,}"
    return f"{needed:,} files and folders are needed, but the disk has inodes for only {left}"


@dataclass(frozen=True, slots=True)
class _SpaceLimit:
    """A limit of space, and the words that describe it."""

    capacity: DiskCapacity
    where: str
    available: str
    """Text about the available bytes, with `{}` in the place of the number."""
    tensors_only: bool = False
    """Whether only bytes of tensors count, and not tables, manifests and the unused part of a
    file's last block.
    """


def estimate_job_need(
    session: SessionStatus, plan: DumpPlan, root: str, iterations: Iterable[IterationStatus]
) -> JobNeed | None:
    """Return the space that a session still needs, based on the largest iteration that it has
    ended.

    None if nothing is known or left to dump: before the first iteration has ended, for a session
    that is not open, and for a plan that dumps only operators that raise or overflow.
    """
    selection = plan.selection
    ended = [status for status in iterations if status.complete]
    if session.state is not SessionState.OPEN or selection.trigger != "always" or not ended:
        return None
    left = count_planned_iterations(
        selection.iterations, after=max(status.iteration for status in ended)
    )
    if left == 0 or not any(status.kept_tensors for status in ended):
        return None
    most = max(ended, key=lambda status: status.bytes_stored)
    each = estimate_iteration_size(most, tabulated=plan.content.has_tables)
    return JobNeed(
        job_id=session.job_id,
        root=root,
        iterations=min(left or 0, _MAX_COUNT),
        bytes_stored=each.bytes_stored,
        disk_bytes=each.disk_bytes,
        inodes=each.inodes,
    )


def sum_job_needs(needs: Iterable[JobNeed]) -> tuple[JobNeed, ...]:
    """Return the needs of each job in each tree, summed over its ranks."""
    found: dict[tuple[str, str], JobNeed] = {}
    for need in needs:
        key = need.job_id, need.root
        before = found.get(key)
        found[key] = need if before is None else _add_needs(before, need)
    return tuple(found.values())


def limit_need_to_retention(need: JobNeed, retain_bytes: int, used_bytes: int) -> JobNeed:
    """Return the need of a job until its old iterations are retired, which happens above
    `retain_bytes`.
    """
    if not retain_bytes or not need.bytes_stored:
        return need
    # One iteration more than fit, because an old iteration is retired only after a new one has
    # come.
    most = max(0, retain_bytes - used_bytes) // need.bytes_stored + 1
    return replace(need, iterations=min(need.iterations or most, most))


def describe_shortages(
    needs: Iterable[JobNeed], disks: Iterable[DiskStatus], usage: Sequence[JobUsage]
) -> list[str]:
    """Return a sentence for each limit that the needs exceed or nearly reach."""
    needs, disks = list(needs), list(disks)
    found: list[str] = []
    for disk in disks:
        if disk.total_bytes:
            found += _describe_limit(
                [n for n in needs if n.root == disk.root], _make_disk_limit(disk)
            )
    cap = max((disk.limit_bytes for disk in disks), default=0)
    if cap:
        used = sum(job.bytes_stored for job in usage)
        found += _describe_limit(needs, _make_cap_limit(cap, used, "dumps", "disk_bytes"))
    for job in usage:
        if job.limit_bytes:
            limit = _make_cap_limit(job.limit_bytes, job.bytes_stored, "its dump", "job_bytes")
            found += _describe_limit([n for n in needs if n.job_id == job.job_id], limit)
    return found


def _add_needs(one: JobNeed, other: JobNeed) -> JobNeed:
    endless = not (one.iterations and other.iterations)
    return replace(
        one,
        # A rank that is ahead of the others has fewer iterations left, but the others catch up
        # soon.
        iterations=0 if endless else max(one.iterations, other.iterations),
        bytes_stored=min(_MAX_COUNT, one.bytes_stored + other.bytes_stored),
        disk_bytes=min(_MAX_COUNT, one.disk_bytes + other.disk_bytes),
        inodes=min(_MAX_COUNT, one.inodes + other.inodes),
    )


def _make_disk_limit(disk: DiskStatus) -> _SpaceLimit:
    capacity = DiskCapacity(
        free_bytes=max(0, disk.free_bytes - disk.floor_bytes),
        total_bytes=disk.total_bytes,
        free_inodes=max(0, disk.free_inodes - disk.floor_inodes),
        total_inodes=disk.total_inodes,
        keep_free_ratio=0.0,
    )
    floor = " above the floor (agent.keep_free_ratio, agent.keep_free_bytes)"
    available = "{} are free" + (floor if disk.floor_bytes else "")
    return _SpaceLimit(capacity, f" on the disk of {disk.root}", available)


def _make_cap_limit(limit_bytes: int, used_bytes: int, whose: str, key: str) -> _SpaceLimit:
    free_bytes = max(0, limit_bytes - used_bytes)
    capacity = DiskCapacity(free_bytes, limit_bytes, keep_free_ratio=0.0)
    return _SpaceLimit(capacity, "", f"{whose} may take {{}} more (agent.{key})", tensors_only=True)


def _describe_limit(needs: Sequence[JobNeed], limit: _SpaceLimit) -> Iterator[str]:
    for need in needs:
        if not need.iterations:
            each = _make_dump_size(need, limit)
            fitting = limit.capacity.count_fitting(each)
            if fitting < FEW_ITERATIONS:
                who = f"job {need.job_id}: each iteration needs"
                yield (
                    f"{_describe_shortage(who, each, limit, short=fitting + 1)}: {fitting} more fit"
                )
    ending = [need for need in needs if need.iterations]
    whole = sum_sizes(
        multiply_size(_make_dump_size(need, limit), need.iterations) for need in ending
    )
    if not ending or limit.capacity.count_fitting(whole):
        return
    if len(ending) > 1:
        names = ", ".join(dict.fromkeys(need.job_id for need in ending))
        yield _describe_shortage(f"jobs {names}: their iterations to come need", whole, limit)
        return
    for need in ending:
        fitting = limit.capacity.count_fitting(_make_dump_size(need, limit))
        more = f"{need.iterations:,} more iteration{'' if need.iterations == 1 else 's'}"
        verb = "needs" if need.iterations == 1 else "need"
        yield (
            f"{_describe_shortage(f'job {need.job_id}: {more} {verb}', whole, limit)}: "
            f"{fitting:,} fit"
        )


def _make_dump_size(need: JobNeed, limit: _SpaceLimit) -> DumpSize:
    disk_bytes = need.bytes_stored if limit.tensors_only else need.disk_bytes
    return DumpSize(files=need.inodes, bytes_stored=need.bytes_stored, disk_bytes=disk_bytes)


def _describe_shortage(who: str, needed: DumpSize, limit: _SpaceLimit, *, short: int = 1) -> str:
    """Return a text about needed and available bytes, or about files if `short` times the bytes
    would fit.
    """
    capacity = limit.capacity
    if short * needed.disk_bytes > capacity.usable_bytes:
        available = limit.available.format(format_bytes(capacity.usable_bytes))
        return f"{who} {format_bytes(needed.disk_bytes)}{limit.where}, and {available}"
    files = f"{needed.inodes:,} files and folders{limit.where}"
    return f"{who} {files}, and it has inodes for {capacity.usable_inodes:,} more"

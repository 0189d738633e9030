"""Forecast of the files, bytes, disk space and time that a plan needs, from its iterations so far,
and of limits that the remaining iterations of running jobs exceed. Pure: no clock, no disk, no
network.
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
"""A plan without an end is reported when fewer iterations than these fit."""
_BLOCK_BYTES = 4096
_MAX_COUNT = (1 << 63) - 1
"""Limit of counts and sums, which must fit into a message; agents may report any number."""
_RECORD_BYTES = 400
"""A tensor in a manifest, on average."""
_ROW_BYTES = 200
"""A row of statistics, on average."""


@dataclass(frozen=True, slots=True)
class DumpSize:
    """Size of a dump or of a part of it."""

    tensors: int = 0
    files: int = 0
    """Files on the disk, tables and manifests included; links to the same bytes count once."""
    folders: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    disk_bytes: int = 0
    """In whole blocks, folders included."""
    stall_us: int = 0
    """Longest time that a rank was held up."""
    wall_us: int = 0
    """From the first tensor of a rank to its last."""

    @property
    def inodes(self) -> int:
        """Files and folders."""
        return self.files + self.folders


_NOTHING = DumpSize()


@dataclass(frozen=True, slots=True)
class ObservedDump:
    """Sizes measured in a dump."""

    iterations: int
    """Number of iterations that are complete on the same ranks."""
    ranks: int
    per_iteration: DumpSize
    """The largest iteration."""
    per_job: DumpSize
    """Constants, graphs and orders, which are written once."""
    problems: tuple[str, ...] = ()
    """Sentences about manifests that could not be read, whose iterations are not in it."""


@dataclass(frozen=True, slots=True)
class DiskCapacity:
    """A disk, and how much of it agents leave free."""

    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0
    """0 where the disk has no limit of inodes."""
    keep_free_ratio: float = KEEP_FREE_RATIO

    @property
    def usable_bytes(self) -> int:
        """Bytes that a dump may take before its tensors are dropped."""
        return max(0, self.free_bytes - math.ceil(self.total_bytes * self.keep_free_ratio))

    @property
    def usable_inodes(self) -> int | None:
        """Inodes that a dump may take; None where there is no limit."""
        return max(0, self.free_inodes) if self.total_inodes else None

    def count_fitting(self, each: DumpSize, once: DumpSize = _NOTHING) -> int:
        """Return how many times a size fits beside another one."""
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
    """Needs of a plan, and whether the disk meets them."""

    iterations: int | None
    """None where the plan has no end; the sizes are then those of one iteration."""
    tensors: int
    files: int
    bytes_in: int
    bytes_stored: int
    disk_bytes: int
    stall_us: int
    wall_us: int
    usable_bytes: int
    total_bytes: int
    """Of the disk."""
    keep_free_ratio: float
    fitting: int
    """How many iterations fit."""
    fits: bool
    reason: str = ""
    """Why it does not fit; empty when it does."""


def count_planned_iterations(iterations: IterationSelection, *, after: int = -1) -> int | None:
    """Return how many iterations a plan selects, after that one; None for one without an end."""
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
    """Return the forecast for that many iterations.

    None stands for a plan without an end, which fits as long as one more iteration does.
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
    """Return the size of an iteration of a rank by its sums, without a look at its files.

    A file is rounded up to whole blocks, half a block on average; `tabulated` tensors have a row
    of statistics each. Tensors that share a file count as if they had one of their own.
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
    """Return the size with most disk bytes, with the longest times of any."""
    return _set_longest_times(max(some, key=lambda taken: taken.disk_bytes), some)


def sum_sizes(some: Iterable[DumpSize]) -> DumpSize:
    """Return the sum of sizes; times are the longest, because ranks run in parallel."""
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
    """A limit of space, and its wording."""

    capacity: DiskCapacity
    where: str
    available: str
    """Text for the available bytes, with `{}` in their place."""
    tensors_only: bool = False
    """Tables, manifests and the rest of a file's last block do not count."""


def estimate_job_need(
    session: SessionStatus, plan: DumpPlan, root: str, iterations: Iterable[IterationStatus]
) -> JobNeed | None:
    """Return what a session still has to dump, by the largest iteration that it ended.

    None where nothing is known or left to dump: before the first end, for a session that is not
    open, and where only operators that raise or overflow are dumped.
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
    """Return what each job needs in each tree, all of its ranks together."""
    found: dict[tuple[str, str], JobNeed] = {}
    for need in needs:
        key = need.job_id, need.root
        before = found.get(key)
        found[key] = need if before is None else _add_needs(before, need)
    return tuple(found.values())


def limit_need_to_retention(need: JobNeed, retain_bytes: int, used_bytes: int) -> JobNeed:
    """Return the need until old iterations are retired, as they are above `retain_bytes`."""
    if not retain_bytes or not need.bytes_stored:
        return need
    # One more: an old iteration is retired after a new one has come.
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
        # A rank that is ahead has fewer left, and the others catch up soon.
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
    """Describe needed and available bytes, or files if `short` times the bytes would fit."""
    capacity = limit.capacity
    if short * needed.disk_bytes > capacity.usable_bytes:
        available = limit.available.format(format_bytes(capacity.usable_bytes))
        return f"{who} {format_bytes(needed.disk_bytes)}{limit.where}, and {available}"
    files = f"{needed.inodes:,} files and folders{limit.where}"
    return f"{who} {files}, and it has inodes for {capacity.usable_inodes:,} more"

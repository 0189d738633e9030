"""What a plan will need, from what its iterations took so far: files, bytes, room, time. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankdump.contract.plan import Iterations
from rankdump.contract.sizes import size
from rankdump.contract.status import IterationStatus

KEEP_FREE_RATIO = 0.1
"""Share of a disk that agents leave free unless they are told otherwise."""
_BLOCK_BYTES = 4096
_ENDLESS = (1 << 63) - 1
"""How many fit of what takes nothing."""
_RECORD_BYTES = 400
"""What a manifest says of a tensor, or so."""
_ROW_BYTES = 200
"""A row of figures, or so."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What some of a dump takes."""

    tensors: int = 0
    files: int = 0
    """Of the disk: links to the same bytes are one. With tables and manifests."""
    folders: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    disk_bytes: int = 0
    """In whole blocks, folders as well."""
    stall_us: int = 0
    """Longest time that a rank was held up."""
    wall_us: int = 0
    """From the first tensor of a rank to its last."""

    @property
    def inodes(self) -> int:
        """Entries of the disk's table of files."""
        return self.files + self.folders


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of a dump."""

    iterations: int
    """How many, complete on the same ranks."""
    ranks: int
    each: Taken
    """The largest of them."""
    once: Taken
    """What comes once for all: constants, graphs, orders."""


@dataclass(frozen=True, slots=True)
class DiskRoom:
    """A disk, and how much of it agents leave free."""

    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0
    """0 where the disk has no table of files that could be full."""
    keep_free_ratio: float = KEEP_FREE_RATIO

    @property
    def usable_bytes(self) -> int:
        """What a dump may take before its tensors are dropped."""
        return max(0, self.free_bytes - math.ceil(self.total_bytes * self.keep_free_ratio))

    @property
    def usable_inodes(self) -> int | None:
        """The same of files; None where there is no limit."""
        return max(0, self.free_inodes) if self.total_inodes else None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is needed, and whether it is there."""

    iterations: int | None
    """None where the plan has no end: what follows is then of one iteration."""
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


def planned(iterations: Iterations, *, after: int = -1) -> int | None:
    """Return how many iterations a plan selects, after that one; None for one without an end."""
    if iterations.spans is None:
        return None
    count, behind = 0, after
    for low, high in sorted(iterations.spans):
        first = max(low, behind + 1)
        count += max(0, high - first + 1)
        behind = max(behind, high)
    return count


def forecast(observed: Observed, iterations: int | None, room: DiskRoom) -> Forecast:
    """Return what so many iterations need.

    None stands for a plan without an end. Nobody knows how many will come: it counts as fitting
    while one more does.
    """
    count = 1 if iterations is None else iterations
    every, once = times(observed.each, count), observed.once
    fitting = _fitting(observed, room)
    reason = "" if count <= fitting else _reason(observed, count, room)
    return Forecast(
        iterations=iterations,
        tensors=every.tensors + once.tensors,
        files=every.files + once.files,
        bytes_in=every.bytes_in + once.bytes_in,
        bytes_stored=every.bytes_stored + once.bytes_stored,
        disk_bytes=every.disk_bytes + once.disk_bytes,
        stall_us=every.stall_us,
        wall_us=every.wall_us,
        usable_bytes=room.usable_bytes,
        total_bytes=room.total_bytes,
        keep_free_ratio=room.keep_free_ratio,
        fitting=fitting,
        fits=not reason,
        reason=reason,
    )


def weighed(status: IterationStatus, *, tabulated: bool) -> Taken:
    """Return what an iteration of a rank takes, by its sums: for when nobody looks at its files.

    A file goes up to whole blocks, which is half a block on average; `tabulated` tensors have a
    row of figures each. Tensors that share a file count as if they had one of their own.
    """
    rows = status.kept if tabulated else status.degraded
    blocks = status.stored * _BLOCK_BYTES
    tensors = max(blocks, status.bytes_stored + blocks // 2)
    table, manifest = _blocks(rows * _ROW_BYTES), _blocks(status.kept * _RECORD_BYTES + 1)
    return Taken(
        tensors=status.kept,
        files=status.stored + bool(rows) + 1,
        folders=1,
        bytes_in=status.bytes_in,
        bytes_stored=status.bytes_stored,
        disk_bytes=tensors + table + manifest + _BLOCK_BYTES,
        stall_us=status.stall_us,
    )


def times(taken: Taken, count: int) -> Taken:
    """Return what so many of the same take."""
    return Taken(
        count * taken.tensors,
        count * taken.files,
        count * taken.folders,
        count * taken.bytes_in,
        count * taken.bytes_stored,
        count * taken.disk_bytes,
        count * taken.stall_us,
        count * taken.wall_us,
    )


def largest(some: Sequence[Taken]) -> Taken:
    """Return the one that takes most room, with the longest times of any."""
    most = max(some, key=lambda taken: taken.disk_bytes)
    return _with_times(most, some)


def total(some: Iterable[Taken]) -> Taken:
    """Return what all take together; of times the longest, for ranks run side by side."""
    every = list(some)
    return _with_times(
        Taken(
            tensors=sum(taken.tensors for taken in every),
            files=sum(taken.files for taken in every),
            folders=sum(taken.folders for taken in every),
            bytes_in=sum(taken.bytes_in for taken in every),
            bytes_stored=sum(taken.bytes_stored for taken in every),
            disk_bytes=sum(taken.disk_bytes for taken in every),
        ),
        every,
    )


def _blocks(byte_count: int) -> int:
    return -(-byte_count // _BLOCK_BYTES) * _BLOCK_BYTES


def _with_times(taken: Taken, some: Sequence[Taken]) -> Taken:
    return Taken(
        taken.tensors,
        taken.files,
        taken.folders,
        taken.bytes_in,
        taken.bytes_stored,
        taken.disk_bytes,
        stall_us=max((each.stall_us for each in some), default=0),
        wall_us=max((each.wall_us for each in some), default=0),
    )


def _fitting(observed: Observed, room: DiskRoom) -> int:
    each, once = observed.each, observed.once
    fitting = _times_in(room.usable_bytes - once.disk_bytes, each.disk_bytes)
    inodes = room.usable_inodes
    return fitting if inodes is None else min(fitting, _times_in(inodes - once.inodes, each.inodes))


def _times_in(left: int, each: int) -> int:
    if left < 0:
        return 0
    return left // each if each else _ENDLESS


def _reason(observed: Observed, count: int, room: DiskRoom) -> str:
    each, once = observed.each, observed.once
    needed = count * each.disk_bytes + once.disk_bytes
    if needed > room.usable_bytes:
        return f"{size(needed)} are needed, and {size(room.usable_bytes)} may be taken"
    needed = count * each.inodes + once.inodes
    left = f"{room.usable_inodes:,}"
    return f"{needed:,} files and folders are needed, and the disk has room for {left}"

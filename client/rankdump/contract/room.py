"""Limits of an agent and what is used of them, as people and monitoring see them. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DiskStatus:
    """A disk that dumps stand on."""

    root: str
    """A tree on it."""
    free_bytes: int = 0
    total_bytes: int = 0
    floor_bytes: int = 0
    """Tensors are refused rather than leave less than this."""
    free_inodes: int = 0
    total_inodes: int = 0
    used_bytes: int = 0
    """What dumps of this agent take on it."""
    limit_bytes: int = 0
    """What they may take; 0: no limit."""
    floor_inodes: int = 0
    """Tensors are refused rather than leave room for fewer files."""
    unfinished_ranks: int = 0
    """Ranks with that tree that may send more, or of which something is still to be written."""


@dataclass(frozen=True, slots=True)
class JobUsage:
    """What the dump of a job takes."""

    job_id: str
    bytes_stored: int = 0
    limit_bytes: int = 0
    """What it may take; 0: no limit."""
    pinned: bool = False
    """It is not removed, whatever its age."""
    retired_iterations: int = 0
    """Iterations of ranks that were removed because of their age, or for room."""


@dataclass(frozen=True, slots=True)
class JobNeed:
    """What each iteration that a job has still to dump into a tree will take, all ranks together.

    By the largest that each rank has ended.
    """

    job_id: str
    root: str
    iterations: int = 0
    """How many are to come by the plan; 0: it has no end."""
    bytes_stored: int = 0
    """Of tensors."""
    disk_bytes: int = 0
    """In whole blocks, with tables, manifests and folders."""
    inodes: int = 0
    """Files and folders."""


@dataclass(frozen=True, slots=True)
class LedgerStatus:
    """What an agent's ledger takes, and the room that its disk has left."""

    folder: str = ""
    used_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    """Of the disk."""


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """What queue, slabs and sessions take together."""

    used_bytes: int = 0
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class MetricSample:
    """A number as Prometheus names it."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict[str, str])

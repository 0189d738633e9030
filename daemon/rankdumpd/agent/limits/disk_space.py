"""Free space on the disks of trees and of the ledger, sampled at most once a second by threads that
may hang there. Callers never wait longer than SAMPLE_TIMEOUT_S.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rankdump._core.status import LedgerStatus
from rankdump._core.units import format_bytes
from rankdumpd.agent.limits.admission import DiskSpace

SAMPLE_INTERVAL_S = 1.0
SAMPLE_TIMEOUT_S = 0.1
"""Longest time that a caller waits for a disk; a slower one is left to its thread."""
SILENCE_TIMEOUT_S = 5.0
"""Time after which a disk that does not answer becomes a finding."""
_MAX_ROOTS = 4096

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _DiskSample:
    """The last known space of one root's disk."""

    space: DiskSpace = field(default_factory=DiskSpace)
    """The last good one."""
    taken_s: float | None = None
    asked_s: float | None = None
    """Since when a thread waits for the disk; None when none does."""
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str = ""


def read_disk_space(root: Path) -> DiskSpace:
    """Return the space of a root's disk, which need not exist yet; OSError when that fails."""
    while not root.exists() and root != root.parent:
        root = root.parent
    found = os.statvfs(root)
    unit = found.f_frsize
    return DiskSpace(found.f_bavail * unit, found.f_blocks * unit, found.f_favail, found.f_files)


class DiskGauge:
    """Space by root; safe to use from several threads.

    A disk that hangs blocks no caller: the last good sample stays in use.
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
        """Return the disk's space, at most a second old unless the disk hangs."""
        name, now = str(root), self._clock()
        with self._lock:
            disk = self._get_sample(name)
            if disk.taken_s is not None and now - disk.taken_s < SAMPLE_INTERVAL_S:
                return disk.space
            if disk.asked_s is None:
                disk.asked_s = now
                disk.answered.clear()
                # One thread for each disk: a disk that hangs must not delay the others.
                threading.Thread(
                    target=self._sample, args=(root, disk), name="rankdumpd-disk", daemon=True
                ).start()
            left_s = SAMPLE_TIMEOUT_S - (now - disk.asked_s)
        if left_s > 0:
            disk.answered.wait(left_s)
        return disk.space

    def findings(self) -> list[str]:
        """Return which disks do not report their free space, and for how long."""
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
            # After an error the disk is not sampled again at once, either.
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
"""A small disk is low below its total size divided by this."""


class LedgerSpace:
    """Space of the state folder, read at most once a second; never waits for long."""

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
        """Return sentences on a disk that is nearly full or does not answer."""
        return [*list_ledger_warnings(self.status()), *self._gauge.findings()]

    def _measure(self, folder: Path) -> DiskSpace:
        space = self._look_up(folder)
        # The database, its log and its index, which SQLite makes and removes.
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

"""Room on the disk of a tree, looked up at most once a second, by threads that may hang there."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rankdumpd.agent.policy import Space

SAMPLE_S = 1.0
PATIENCE_S = 0.1
"""What a disk is waited for; one that takes longer is left to its thread."""
SILENT_S = 5.0
"""People hear of a disk that says nothing for so long."""
_MOST_ROOTS = 4096

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Disk:
    """What is known of the disk of one root."""

    space: Space = field(default_factory=Space)
    """The last good one."""
    taken_s: float | None = None
    asked_s: float | None = None
    """Since when a thread waits for an answer; None when none does."""
    answered: threading.Event = field(default_factory=threading.Event)
    problem: str = ""


def look_up(root: Path) -> Space:
    """Return the space of a root's disk, or of what it will stand on; OSError."""
    while not root.exists() and root != root.parent:
        root = root.parent
    found = os.statvfs(root)
    unit = found.f_frsize
    return Space(found.f_bavail * unit, found.f_blocks * unit, found.f_favail, found.f_files)


class DiskGauge:
    """Space by root; safe to use from several threads.

    A disk that hangs holds up nobody: the last good sample stays, and grows old.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        look_up: Callable[[Path], Space] = look_up,
    ) -> None:
        self._clock, self._look_up = clock, look_up
        self._lock = threading.Lock()
        self._disks: dict[str, _Disk] = {}

    def space(self, root: Path) -> Space:
        """Return what the disk said, if it can be as of the last second."""
        name, now = str(root), self._clock()
        with self._lock:
            disk = self._known(name)
            if disk.taken_s is not None and now - disk.taken_s < SAMPLE_S:
                return disk.space
            if disk.asked_s is None:
                disk.asked_s = now
                disk.answered.clear()
                self._ask(root, disk)
            left_s = PATIENCE_S - (now - disk.asked_s)
        if left_s > 0:
            disk.answered.wait(left_s)
        return disk.space

    def findings(self) -> list[str]:
        """Return which disks do not say how much room there is, and for how long."""
        now = self._clock()
        with self._lock:
            disks = list(self._disks.items())
        return [said for name, disk in disks if (said := _complaint(name, disk, now))]

    def _known(self, name: str) -> _Disk:
        if name not in self._disks:
            if len(self._disks) >= _MOST_ROOTS:
                self._disks = {n: d for n, d in self._disks.items() if d.asked_s is not None}
            self._disks[name] = _Disk()
        return self._disks[name]

    def _ask(self, root: Path, disk: _Disk) -> None:
        # A thread each: who waits for one disk must not keep others from being asked.
        threading.Thread(
            target=self._sample, args=(root, disk), name="rankdumpd-disk", daemon=True
        ).start()

    def _sample(self, root: Path, disk: _Disk) -> None:
        space, problem = None, ""
        try:
            space = self._look_up(root)
        except OSError as error:
            problem = error.strerror or str(error)
            if problem != disk.problem:
                about = {"root": str(root)}
                _log.warning("cannot look up the room under %s: %s", root, error, extra=about)
        with self._lock:
            disk.space = space or disk.space
            # An error is not asked again at once either.
            disk.taken_s, disk.asked_s, disk.problem = self._clock(), None, problem
        disk.answered.set()


def _complaint(name: str, disk: _Disk, now: float) -> str:
    free_bytes, known = disk.space.free_bytes, disk.space.total_bytes
    before = f"{free_bytes} bytes were free when it last did" if known else "it never did"
    if disk.asked_s is not None and now - disk.asked_s >= SILENT_S:
        silent_s = now - disk.asked_s
        return f"disk of {name} does not say how much is free for {silent_s:.0f} s: {before}"
    if disk.problem:
        return f"disk of {name} does not say how much is free ({disk.problem}): {before}"
    return ""

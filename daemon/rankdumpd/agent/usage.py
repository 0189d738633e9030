"""What dumps of an agent take on disk, by job and by tree."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Taken:
    """What one session's tensors take, or do no longer."""

    job_id: str
    root: str
    byte_count: int


class Usage:
    """Bytes of tensors that are in trees; safe to use from several threads.

    A tensor that is a link takes nothing, tables and manifests are not counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total = 0
        self._jobs: Counter[str] = Counter()
        self._roots: Counter[str] = Counter()
        self._retired: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """What all take."""
        return max(0, self._total)

    def restore(self, taken: Iterable[Taken], retired: Mapping[str, int]) -> None:
        """Begin with what an earlier process left; `retired` counts iterations by job."""
        for each in taken:
            self.add(each)
        self._retired.update(retired)

    def add(self, taken: Taken) -> None:
        """Count what tensors take more; less where it is negative."""
        if taken.byte_count:
            with self._lock:
                self._total += taken.byte_count
                self._jobs[taken.job_id] += taken.byte_count
                self._roots[taken.root] += taken.byte_count

    def retired(self, job_id: str) -> None:
        """Count an iteration of a rank that was removed."""
        with self._lock:
            self._retired[job_id] += 1

    def of_job(self, job_id: str) -> int:
        """Return what the dump of a job takes."""
        return max(0, self._jobs[job_id])

    def of_root(self, root: str) -> int:
        """Return what is in a tree."""
        return max(0, self._roots[root])

    def jobs(self) -> list[tuple[str, int, int]]:
        """Return what each job takes that takes anything, and how many iterations it lost."""
        with self._lock:
            return [
                (job_id, taken, self._retired[job_id])
                for job_id, taken in self._jobs.items()
                if taken > 0
            ]

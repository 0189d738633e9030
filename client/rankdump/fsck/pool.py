"""Files read and checked on several threads: reading, unpacking and hashing let others run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.fsck.elements import check
from rankdump.fsck.scan import read
from rankdump.fsck.values import Checked, Job

MOST_BYTES = 512 << 20
"""In memory at once; a file that alone needs more is checked alone."""


def checked(root: Path, jobs: Iterable[Job], workers: int) -> Iterator[Checked]:
    """Yield what became of each file, as they come."""
    left = deque(jobs)
    running: dict[Future[Checked], int] = {}
    with ThreadPoolExecutor(workers, thread_name_prefix="rankdump-fsck") as pool:
        try:
            while left or running:
                while left and _fits(left[0], running, workers):
                    job = left.popleft()
                    running[pool.submit(_check, root, job)] = _room(job)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    del running[future]
                    yield future.result()
        finally:
            for future in running:
                future.cancel()


def _check(root: Path, job: Job) -> Checked:
    try:
        return check(job, read(root, job.paths[0]))
    except DamagedError as error:
        return Checked(job, str(error))


def _fits(job: Job, running: dict[Future[Checked], int], workers: int) -> bool:
    if len(running) >= 2 * workers:
        return False
    return not running or sum(running.values()) + _room(job) <= MOST_BYTES


def _room(job: Job) -> int:
    # Packed, unpacked, and packed once more.
    return 2 * job.size_bytes + 2 * job.plain_bytes

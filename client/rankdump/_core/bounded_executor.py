"""Jobs on a pool of threads, with a limit of the bytes that running jobs hold together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import TypeVar

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def execute_bounded(
    pool: ThreadPoolExecutor,
    work: Callable[[_Job], _Result],
    jobs: Iterable[_Job],
    count_bytes: Callable[[_Job], int],
    max_bytes: int,
    max_jobs: int = sys.maxsize,
) -> Iterator[_Result]:
    """Yield the result of each job, in the order in which the jobs finish.

    At most `max_jobs` jobs are on the pool at once; a job that exceeds `max_bytes` runs alone. When
    the caller takes no more results, jobs that have not begun are cancelled.
    """
    running: dict[Future[_Result], int] = {}
    finished: SimpleQueue[Future[_Result]] = SimpleQueue()
    used_bytes = 0
    try:
        for job in jobs:
            byte_count = count_bytes(job)
            while len(running) >= max_jobs or (running and used_bytes + byte_count > max_bytes):
                future = finished.get()
                used_bytes -= running.pop(future)
                yield future.result()
            future = pool.submit(work, job)
            running[future] = byte_count
            used_bytes += byte_count
            future.add_done_callback(finished.put)
        while running:
            future = finished.get()
            del running[future]
            yield future.result()
    finally:
        for future in running:
            future.cancel()

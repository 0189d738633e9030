"""Files on their way through the threads: as many bytes at once as they may be."""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from rankdumpd.ingest.values import Candidate, Left, Taken, Why

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A file that is to be taken."""

    candidate: Candidate
    before: Taken | None
    """What was taken of that path earlier."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Result:
    """What became of it."""

    job: Job
    file: Taken | Left


class Pool:
    """Threads that take files; nothing ends one but `stop`."""

    def __init__(
        self,
        threads: int,
        queue_bytes: int,
        take: Callable[[Candidate, Taken | None], Taken | Left],
    ) -> None:
        self._take, self._queue_bytes = take, queue_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="rankdumpd-ingest")
        self._done: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Yield what becomes of each, in the order in which they are done.

        One that exceeds the limit runs alone.
        """
        in_flight = size_bytes = 0
        for job in jobs:
            while in_flight and size_bytes + job.size_bytes > self._queue_bytes:
                result = self._done.get()
                in_flight, size_bytes = in_flight - 1, size_bytes - result.job.size_bytes
                yield result
            in_flight, size_bytes = in_flight + 1, size_bytes + job.size_bytes
            self._threads.submit(self._work, job)
        for _ in range(in_flight):
            yield self._done.get()

    def stop(self) -> None:
        """Finish what has begun, and end the threads."""
        self._threads.shutdown(cancel_futures=True)

    def _work(self, job: Job) -> None:
        path = job.candidate.path
        file: Taken | Left = Left(path, Why.FAILED, "an error of this program")
        try:
            file = self._take(job.candidate, job.before)
        except MemoryError:
            file = Left(path, Why.FAILED, f"no memory for its {job.size_bytes} bytes")
        except Exception:
            _log.exception("%s", path)
        finally:
            self._done.put(Result(job, file))

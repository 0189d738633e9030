"""All files: one after the other, or in as many processes as the work is worth."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from rankdump.contract.errors import DamagedError
from rankdump.convert import out
from rankdump.convert.file import convert_file
from rankdump.convert.request import Failure, Job, Outcome, Request, Summary
from rankdump.convert.sources import Found

_BYTES_EACH = 256 << 20
_FILES_EACH = 2000
"""What one more process must have to do: its start takes as long, half a second and more."""
_DIED = "a process that converted died, perhaps for want of memory"


def convert(
    found: Found,
    root: Path,
    request: Request,
    *,
    jobs: int,
    done: Callable[[Outcome], None] = lambda outcome: None,
) -> Summary:
    """Convert the files into folders below a root; `done` hears of each.

    Memory is that of one tensor and its conversion for each process.
    """
    ready, refused = _with_folders(found.jobs, root)
    outcomes = [Outcome(each.path, failures=(each,)) for each in (*found.problems, *refused)]
    workers = _workers(ready, jobs)
    results = _in_turn(ready, request) if workers == 1 else _in_pool(ready, request, workers)
    for outcome in results:
        done(outcome)
        outcomes.append(outcome)
    return Summary(tuple(outcomes))


def _with_folders(jobs: Sequence[Job], root: Path) -> tuple[list[Job], list[Failure]]:
    """Make the folders of the output; return the files that have one, and the others."""
    refusals: dict[Path, str] = {}
    for folder in dict.fromkeys(job.folder for job in jobs):
        try:
            out.make_folder(root, folder)
        except OSError as error:
            refusals[folder] = f"{folder}: cannot be made: {error.strerror}"
        except DamagedError as error:
            refusals[folder] = str(error)
    ready = [job for job in jobs if job.folder not in refusals]
    return ready, [Failure(j.path, refusals[j.folder]) for j in jobs if j.folder in refusals]


def _workers(jobs: Sequence[Job], most: int) -> int:
    worth = max(sum(job.bytes_stored for job in jobs) // _BYTES_EACH, len(jobs) // _FILES_EACH)
    return max(1, min(most, len(jobs), worth))


def _in_turn(jobs: Iterable[Job], request: Request) -> Iterator[Outcome]:
    return (convert_file(job, request) for job in jobs)


def _in_pool(jobs: Sequence[Job], request: Request, workers: int) -> Iterator[Outcome]:
    """Convert in processes; no more files are handed out than those are busy with, and as many."""
    # Started anew: a copy of this process would have its threads' locks.
    context = multiprocessing.get_context("spawn")
    left = deque(jobs)
    running: dict[Future[Outcome], Job] = {}
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        while left or running:
            while left and len(running) < 2 * workers:
                with _uninterrupted():
                    future = pool.submit(convert_file, left[0], request)
                running[future] = left.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                outcome = future.result()
                del running[future]
                yield outcome
    except BrokenProcessPool:
        for job in (*running.values(), *left):
            yield Outcome(job.path, failures=(Failure(job.path, _DIED),))
    finally:
        with _uninterrupted():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _uninterrupted() -> Generator[None, None, None]:
    """Let an interrupt wait: a pool that is half made, or half gone, never ends.

    Processes that start in here inherit it, and finish the file they have in hand.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

"""Conversion of bin files, in this process or, for enough work, in several. A failure is part of
the outcome of its file and is never raised.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

from rankdump._analysis.convert import folders, tensor_file
from rankdump._analysis.convert.folders import ConversionSources
from rankdump._analysis.convert.request import (
    ConversionFailure,
    ConversionJob,
    ConversionOutcome,
    ConversionRequest,
    ConversionSummary,
    ShortenedName,
)
from rankdump._analysis.convert.tensor_file import is_selected, make_output_file
from rankdump._binfile.bin_file import BinFile, BinPayload, open_bin_file
from rankdump.errors import CorruptedError, EmptyFileError, PermanentError

_BYTES_PER_PROCESS = 256 << 20
_FILES_PER_PROCESS = 2000
"""Least work for another process: its start takes half a second and more."""
_PROCESS_DIED = "a conversion process died, possibly because memory ran out"


def convert_file(job: ConversionJob, request: ConversionRequest) -> ConversionOutcome:
    """Convert one file into an existing folder."""
    outcome = ConversionOutcome(job.path)
    try:
        opened = open_bin_file(job.path)
    except EmptyFileError:
        outcome.empty = True
        return outcome
    except (PermanentError, MemoryError) as error:
        outcome.add_failure(_describe_error(error, job))
        return outcome
    held = [payload for payload in opened.payloads if is_selected(job.path.name, payload, request)]
    for payload in held:
        _convert_payload(outcome, job, opened, payload, request)
    if request.side and not held:
        outcome.add_failure(f"the file has no {request.side} {request.index}")
    return outcome


def _convert_payload(
    outcome: ConversionOutcome,
    job: ConversionJob,
    opened: BinFile,
    payload: BinPayload,
    request: ConversionRequest,
) -> None:
    where = f"{payload.kind} {payload.index}: "
    try:
        result = make_output_file(job.path.name, payload, opened.read_payload(payload), request)
        name = tensor_file.shorten_name(result.name)
        outcome.bytes_written += folders.write_output(job.folder, name, result.content_parts)
    except (PermanentError, MemoryError, OSError) as error:
        outcome.add_failure(where + _describe_error(error, job))
        return
    outcome.tensors += 1
    if name != result.name:
        outcome.shortened_names.append(ShortenedName(job.folder, name, result.name))
    if result.warning:
        outcome.warnings.append(ConversionFailure(job.path, where + result.warning))


def _describe_error(error: Exception, job: ConversionJob) -> str:
    if isinstance(error, MemoryError):
        return "not enough memory to convert it"
    if isinstance(error, OSError):
        return f"cannot be written: {error.strerror}"
    return str(error).removeprefix(f"{job.path}: ")


def convert_files(
    found: ConversionSources,
    root: Path,
    request: ConversionRequest,
    *,
    jobs: int,
    done: Callable[[ConversionOutcome], None] = lambda outcome: None,
) -> ConversionSummary:
    """Convert the files into folders below a root; `done` is called with each outcome.

    Each process needs memory for one tensor and its conversion.
    """
    ready, rejected = _make_folders(found.jobs, root)
    outcomes = [
        ConversionOutcome(each.path, failures=[each]) for each in (*found.problems, *rejected)
    ]
    workers = _count_processes(ready, jobs)
    results = (
        (convert_file(job, request) for job in ready)
        if workers == 1
        else _convert_in_pool(ready, request, workers)
    )
    for outcome in results:
        done(outcome)
        outcomes.append(outcome)
    return ConversionSummary(tuple(outcomes))


def _make_folders(
    jobs: Sequence[ConversionJob], root: Path
) -> tuple[list[ConversionJob], list[ConversionFailure]]:
    """Make the output folders; return the jobs whose folder exists, and failures for the others."""
    reasons: dict[Path, str] = {}
    for folder in dict.fromkeys(job.folder for job in jobs):
        try:
            folders.make_output_folder(root, folder)
        except OSError as error:
            reasons[folder] = f"{folder}: cannot be created: {error.strerror}"
        except CorruptedError as error:
            reasons[folder] = str(error)
    ready = [job for job in jobs if job.folder not in reasons]
    return ready, [
        ConversionFailure(j.path, reasons[j.folder]) for j in jobs if j.folder in reasons
    ]


def _count_processes(jobs: Sequence[ConversionJob], most: int) -> int:
    worth = max(
        sum(job.bytes_stored for job in jobs) // _BYTES_PER_PROCESS, len(jobs) // _FILES_PER_PROCESS
    )
    return max(1, min(most, len(jobs), worth))


def _convert_in_pool(
    jobs: Sequence[ConversionJob], request: ConversionRequest, workers: int
) -> Iterator[ConversionOutcome]:
    """Convert in processes; at most two files per process are submitted at a time."""
    # Spawned: a forked copy of this process would inherit locks held by its threads.
    context = multiprocessing.get_context("spawn")
    left = deque(jobs)
    running: dict[Future[ConversionOutcome], ConversionJob] = {}
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        while left or running:
            while left and len(running) < 2 * workers:
                with _block_interrupts():
                    future = pool.submit(convert_file, left[0], request)
                running[future] = left.popleft()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                outcome = future.result()
                del running[future]
                yield outcome
    except BrokenProcessPool:
        for job in (*running.values(), *left):
            yield ConversionOutcome(job.path, failures=[ConversionFailure(job.path, _PROCESS_DIED)])
    finally:
        with _block_interrupts():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _block_interrupts() -> Generator[None, None, None]:
    """Delay interrupts: a pool interrupted while it starts or stops would never end.

    Processes started meanwhile inherit the mask, and finish the file that they convert.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

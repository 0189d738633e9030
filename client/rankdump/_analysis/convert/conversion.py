"""Conversion of bin files, one after the other or in as many processes as the work is worth. What
fails is part of the outcome of its file, and is never raised.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _OutcomeBuilder:
    """Outcome of a file while it is converted."""

    job: ConversionJob
    tensors: int = 0
    bytes_written: int = 0
    failures: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    warnings: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    mapped: list[ShortenedName] = field(default_factory=list[ShortenedName])

    def add_failure(self, where: str, error: Exception) -> None:
        """Note what went wrong, without the path that the line has anyway."""
        self.failures.append(
            ConversionFailure(self.job.path, where + _describe_error(error, self.job))
        )

    def make_outcome(self, *, empty: bool = False) -> ConversionOutcome:
        """Return it as a value."""
        return ConversionOutcome(
            self.job.path,
            self.tensors,
            self.bytes_written,
            empty,
            tuple(self.failures),
            tuple(self.warnings),
            tuple(self.mapped),
        )


def convert_file(job: ConversionJob, request: ConversionRequest) -> ConversionOutcome:
    """Convert one file; its folder is there."""
    builder = _OutcomeBuilder(job)
    try:
        opened = open_bin_file(job.path)
    except EmptyFileError:
        return builder.make_outcome(empty=True)
    except (PermanentError, MemoryError) as error:
        builder.add_failure("", error)
        return builder.make_outcome()
    held = [payload for payload in opened.payloads if is_selected(job.path.name, payload, request)]
    for payload in held:
        _convert_payload(builder, opened, payload, request)
    if request.side and not held:
        builder.failures.append(
            ConversionFailure(job.path, f"the file has no {request.side} {request.index}")
        )
    return builder.make_outcome()


def _convert_payload(
    builder: _OutcomeBuilder, opened: BinFile, payload: BinPayload, request: ConversionRequest
) -> None:
    job, where = builder.job, f"{payload.kind} {payload.index}: "
    try:
        result = make_output_file(job.path.name, payload, opened.read_payload(payload), request)
        name = tensor_file.shorten_name(result.name)
        builder.bytes_written += folders.write_output(job.folder, name, result.content_parts)
    except (PermanentError, MemoryError, OSError) as error:
        builder.add_failure(where, error)
        return
    builder.tensors += 1
    if name != result.name:
        builder.mapped.append(ShortenedName(job.folder, name, result.name))
    if result.warning:
        builder.warnings.append(ConversionFailure(job.path, where + result.warning))


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
    """Convert the files into folders below a root; `done` hears of each.

    Memory is that of one tensor and its conversion for each process.
    """
    ready, refused = _make_folders(found.jobs, root)
    outcomes = [
        ConversionOutcome(each.path, failures=(each,)) for each in (*found.problems, *refused)
    ]
    workers = _count_processes(ready, jobs)
    results = (
        _convert_in_turn(ready, request)
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
    """Make the folders of the output; return the files that have one, and the others."""
    refusals: dict[Path, str] = {}
    for folder in dict.fromkeys(job.folder for job in jobs):
        try:
            folders.make_output_folder(root, folder)
        except OSError as error:
            refusals[folder] = f"{folder}: cannot be created: {error.strerror}"
        except CorruptedError as error:
            refusals[folder] = str(error)
    ready = [job for job in jobs if job.folder not in refusals]
    return ready, [
        ConversionFailure(j.path, refusals[j.folder]) for j in jobs if j.folder in refusals
    ]


def _count_processes(jobs: Sequence[ConversionJob], most: int) -> int:
    worth = max(
        sum(job.bytes_stored for job in jobs) // _BYTES_PER_PROCESS, len(jobs) // _FILES_PER_PROCESS
    )
    return max(1, min(most, len(jobs), worth))


def _convert_in_turn(
    jobs: Iterable[ConversionJob], request: ConversionRequest
) -> Iterator[ConversionOutcome]:
    return (convert_file(job, request) for job in jobs)


def _convert_in_pool(
    jobs: Sequence[ConversionJob], request: ConversionRequest, workers: int
) -> Iterator[ConversionOutcome]:
    """Convert in processes; no more files are handed out than those are busy with, and as many."""
    # Started anew: a copy of this process would have its threads' locks.
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
            yield ConversionOutcome(
                job.path, failures=(ConversionFailure(job.path, _PROCESS_DIED),)
            )
    finally:
        with _block_interrupts():
            pool.shutdown(cancel_futures=True)


@contextmanager
def _block_interrupts() -> Generator[None, None, None]:
    """Delay interrupts: a pool that is half started or half stopped would never end.

    Processes that start in here inherit it, and finish the file they have in hand.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

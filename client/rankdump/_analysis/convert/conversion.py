"""Conversion of bin files in this process or, if there is enough work, in several processes. A
failure is part of a file's outcome and is never raised. Output files have the names that msaccucmp
(Ascend/msprobe) gives them.
"""

from __future__ import annotations

import csv
import hashlib
import io
import multiprocessing
import os
import signal
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rankdump._analysis.convert import folders
from rankdump._analysis.convert.folders import (
    ConversionFailure,
    ConversionJob,
    ConversionSources,
    escape_line,
    write_output,
)
from rankdump._binfile.bin_file import (
    BinFile,
    BinPayload,
    get_type_name,
    open_bin_file,
    read_payload_array,
)
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._binfile.overflow_record import convert_overflow_to_json
from rankdump._core import npy_format
from rankdump._core.cann_types import FormatWord, split_format_word
from rankdump._layout.device_formats import (
    FLAT_ORDERS,
    ConvertedTensor,
    OriginalLayout,
    convert_format,
)
from rankdump._layout.file_name import OVERFLOW_PREFIX, PACKED_SUFFIX
from rankdump._layout.tree_paths import MAPPING_FILE
from rankdump.errors import CorruptedError, EmptyFileError, PermanentError, UnsupportedError

FAILED_LIST_FILE = "convert_failed_file_list.txt"
_BYTES_PER_PROCESS = 256 << 20
_FILES_PER_PROCESS = 2000
"""Number of files for which one more process is started; its start takes half a second or more."""
_PROCESS_DIED = "a conversion process died, possibly because memory ran out"


@dataclass(frozen=True, slots=True)
class ConversionRequest:
    """Parameters of a conversion."""

    target: str = ""
    """Tensor format to convert to; empty to keep the format of the device."""
    kind: str = "npy"
    """`npy`, or `bin` for files with elements only."""
    shape: tuple[int, ...] = ()
    """Shape that replaces the original shape in the header; empty to keep the latter."""
    side: str = ""
    """`input` or `output`, to convert only the tensor `index` of this side; empty for
    all tensors.
    """
    index: int = 0


@dataclass(frozen=True, slots=True)
class ShortenedName:
    """An output name that was too long, with the shortened name on disk."""

    folder: Path
    name: str
    full_name: str


@dataclass(slots=True)
class ConversionOutcome:
    """Outcome of the conversion of one file."""

    path: Path
    tensors: int = 0
    bytes_written: int = 0
    empty: bool = False
    failures: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    warnings: list[ConversionFailure] = field(default_factory=list[ConversionFailure])
    shortened_names: list[ShortenedName] = field(default_factory=list[ShortenedName])

    def add_failure(self, reason: str) -> None:
        """Add a failure of this file."""
        self.failures.append(ConversionFailure(self.path, reason))


@dataclass(frozen=True, slots=True)
class ConversionSummary:
    """Outcomes of all converted files."""

    outcomes: tuple[ConversionOutcome, ...]

    @property
    def tensors(self) -> int:
        """Number of tensors, buffers and workspaces that were written."""
        return sum(outcome.tensors for outcome in self.outcomes)

    @property
    def bytes_written(self) -> int:
        """Bytes of all outputs."""
        return sum(outcome.bytes_written for outcome in self.outcomes)

    @property
    def empty(self) -> list[Path]:
        """Files without content."""
        return sorted(outcome.path for outcome in self.outcomes if outcome.empty)

    @property
    def failures(self) -> list[ConversionFailure]:
        """All failures, sorted by path."""
        return _sort_failures(found for outcome in self.outcomes for found in outcome.failures)

    @property
    def failed(self) -> list[Path]:
        """Files that were not converted, or not completely."""
        return sorted({failure.path for failure in self.failures})

    @property
    def warnings(self) -> list[ConversionFailure]:
        """Warnings about tensors that were converted, sorted by path."""
        return _sort_failures(found for outcome in self.outcomes for found in outcome.warnings)


def _sort_failures(found: Iterable[ConversionFailure]) -> list[ConversionFailure]:
    return sorted(found, key=lambda each: (each.path, each.reason))


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
        name = shorten_name(result.name)
        outcome.bytes_written += write_output(job.folder, name, result.content_parts)
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
    """Create the output folders; return the jobs whose folder exists, and failures for
    all others.
    """
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
    """Convert files in several processes; at most two files per process are submitted at a time."""
    # Processes are spawned, because a forked copy of this process would inherit locks that its
    # threads hold.
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
    """Delay interrupts during the block, because a pool that is interrupted while it starts or
    stops would never end.

    Processes that are started in the block inherit the signal mask, and finish the file that they
    convert.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_TYPES_UNKNOWN_TO_NUMPY = {
    "BF16": "bfloat16",
    "HIFLOAT8": "hifloat8",
    "FLOAT8_E5M2": "float8_e5m2",
    "FLOAT8_E4M3FN": "float8_e4m3fn",
}
MAX_NAME_LENGTH = 255
"""Length from which on names are shortened, as in msaccucmp, although a file name could be that
long.
"""

TensorArray: TypeAlias = npt.NDArray[Any]


def shorten_name(name: str) -> str:
    """Return the name on disk; if the name is too long, a digest of it with its suffix."""
    if max(len(name), len(os.fsencode(name))) < MAX_NAME_LENGTH:
        return name
    return hash_name(name) + name[name.rindex(".") :]


def hash_name(name: str) -> str:
    """Return `uuid.uuid3` of a name, even if the name has bytes that are not valid text."""
    content = uuid.NAMESPACE_DNS.bytes + os.fsencode(name)
    found = hashlib.md5(content, usedforsecurity=False).digest()
    return uuid.UUID(bytes=found, version=3).hex


def _element_type(part: OpInput | OpOutput, tensor: TensorArray) -> str:
    """Return the element type for the file name; for a float type that numpy lacks, the original
    type.
    """
    return _TYPES_UNKNOWN_TO_NUMPY.get(get_type_name(part.data_type)) or str(tensor.dtype)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One output file with its content."""

    name: str
    content_parts: tuple[bytes | memoryview, ...]
    warning: str = ""


def is_selected(file_name: str, payload: BinPayload, request: ConversionRequest) -> bool:
    """Return whether a payload is converted; placeholders of slots without a tensor are not."""
    part = payload.part
    if not isinstance(part, OpInput | OpOutput):
        return not request.target and not file_name.startswith(OVERFLOW_PREFIX) and not request.side
    if file_name.startswith(OVERFLOW_PREFIX):
        return payload.kind == "output"
    if request.side and (payload.kind, payload.index) != (request.side, request.index):
        return False
    return not part.is_placeholder


def make_output_file(
    file_name: str, payload: BinPayload, data: memoryview, request: ConversionRequest
) -> OutputFile:
    """Return the output file for a payload; raise an error if the payload cannot be converted."""
    part = payload.part
    stem = f"{file_name.removesuffix(PACKED_SUFFIX)}.{payload.kind}.{payload.index}"
    if not isinstance(part, OpInput | OpOutput):
        return OutputFile(f"{stem}.bin", (data,))
    if file_name.startswith(OVERFLOW_PREFIX):
        return OutputFile(f"{stem}.json", (convert_overflow_to_json(bytes(data)).encode(),))
    word = split_format_word(part.format)
    tensor = read_payload_array(part, data)
    if not request.target:
        if request.kind == "bin":
            stem += f".{tensor.size}.{_element_type(part, tensor)}.{word.name}"
        return OutputFile(f"{stem}.{request.kind}", _file_parts(tensor, request.kind))
    found = _convert_tensor(tensor, part, word, request)
    stem += "." + ("_" if request.kind == "bin" else "x").join(map(str, found.array.shape))
    if request.kind == "bin":
        shown = word.name if found.has_padding else request.target
        stem += f".{_element_type(part, found.array)}.{shown}"
    parts = _file_parts(found.array, request.kind)
    return OutputFile(f"{stem}.{request.kind}", parts, _crop_warning(found, part, request))


def _convert_tensor(
    tensor: TensorArray, part: OpInput | OpOutput, word: FormatWord, request: ConversionRequest
) -> ConvertedTensor:
    groups = part.sub_format or word.groups
    origin = OriginalLayout(_original_shape(part, request), groups, word.c0)
    if word.name not in FLAT_ORDERS or tensor.ndim == len(word.name):
        return convert_format(tensor, word.name, request.target, origin)
    try:
        return convert_format(tensor, "ND", request.target, origin)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{word.name} of shape {tensor.shape} is converted as ND: {error}"
        ) from None


def _original_shape(part: OpInput | OpOutput, request: ConversionRequest) -> tuple[int, ...]:
    return request.shape or (part.original_shape.dim if part.original_shape else ())


def _crop_warning(
    found: ConvertedTensor, part: OpInput | OpOutput, request: ConversionRequest
) -> str:
    if not found.has_padding:
        return ""
    original = _original_shape(part, request)
    shape = f"{found.array.shape} in {request.target}"
    return f"{shape} is not cropped: the original shape {original} does not fit"


def _file_parts(tensor: TensorArray, kind: str) -> tuple[bytes | memoryview, ...]:
    flat = cast("TensorArray", np.ascontiguousarray(tensor).reshape(-1))
    elements, descr = flat.view(np.uint8).data, cast("str", tensor.dtype.str)
    return (
        (npy_format.format_npy_header(descr, tensor.shape), elements)
        if kind == "npy"
        else (elements,)
    )


def write_result_lists(root: Path, summary: ConversionSummary, *, listing: bool) -> None:
    """Write the lists of shortened names and, with `listing`, the list of failed files."""
    _write_shortened_names(summary)
    if listing:
        _write_failed_list(root, summary.failed)


def _write_shortened_names(summary: ConversionSummary) -> None:
    """Add names to the `mapping.csv` files of their folders, except for names that these already
    have.
    """
    rows: dict[Path, dict[bytes, None]] = {}
    for outcome in summary.outcomes:
        for mapped in outcome.shortened_names:
            rows.setdefault(mapped.folder, {})[_mapping_row(mapped)] = None
    for folder, found in rows.items():
        path = folder / MAPPING_FILE
        before = path.read_bytes() if path.is_file() else b""
        new = tuple(row for row in found if row not in before)
        if new:
            write_output(folder, MAPPING_FILE, (before, *new))


def _write_failed_list(root: Path, failed: Sequence[Path]) -> None:
    """Write the list of files that were not converted; if there are none, remove an old list."""
    if failed:
        # There is one path per line, so line breaks in a path are escaped as in a Python string.
        lines = tuple(os.fsencode(escape_line(str(path.absolute()))) + b"\n" for path in failed)
        write_output(root, FAILED_LIST_FILE, lines)
    else:
        (root / FAILED_LIST_FILE).unlink(missing_ok=True)


def _mapping_row(mapped: ShortenedName) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow((mapped.name, mapped.full_name))
    return os.fsencode(text.getvalue())

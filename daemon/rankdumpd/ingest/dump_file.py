"""Dump files in an ingest: their kind by name and content, the frozen values that describe them,
and the reasons to skip one. Pure; never unpickles, and checks sizes in headers before using them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import xxhash

from rankdump._binfile.bin_file import BinFile, parse_bin_file
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._codec.zstd_frames import ByteBuffer
from rankdump._core.cann_types import DATA_TYPES
from rankdump._core.npy_format import read_npy_form
from rankdump._core.tree_root import STATE_FOLDER
from rankdump._layout.file_name import PACKED_SUFFIX, is_numbered_name
from rankdump._layout.statistic_tables import OPERATOR_COLUMNS
from rankdumpd.agent.records import FileStamp

INGEST_STATE_FOLDER = STATE_FOLDER
"""Hidden folder of a tree with the state of an ingest."""


class DumpFileKind(str, Enum):
    """How a file is ingested, by its content."""

    NPY = "npy"
    BIN = "bin"
    """CANN's binary file with all tensors of an operator."""
    PACKED = "packed"
    """File that its writer has compressed; copied as it is."""
    PLAIN = "plain"
    """Any other file, including every file that may still be appended to; copied as it is."""

    @property
    def holds_tensors(self) -> bool:
        """Whether the file holds tensors, and is complete once its writer has closed it."""
        return self is not DumpFileKind.PLAIN


class SkipReason(str, Enum):
    """Why a file was not ingested in this attempt."""

    WRITTEN = "written"
    """A process has the file open for writing, or changed it while it was read."""
    YOUNG = "young"
    """The kernel cannot tell whether the file is being written, so it has to stay unchanged for a
    while.
    """
    GONE = "gone"
    DAMAGED = "damaged"
    FAILED = "failed"
    """The file could not be read, or its copy could not be written."""


@dataclass(frozen=True, slots=True)
class IngestTask:
    """Source, target and options of an ingest."""

    source: Path
    tree: Path
    delete: bool = False
    """Whether each tensor is removed from the source once its copy is committed."""
    clear: bool = False
    """Whether all other files and empty folders are removed from the source at the end."""
    codec: str = "zstd"
    threads: int = 1
    queue_bytes: int = 512 << 20
    """Largest number of bytes that are read and packed at the same time."""


@dataclass(frozen=True, slots=True)
class CandidateFile:
    """A file that may be ready to be ingested."""

    path: str
    """Path relative to the source folder, with `/`."""
    closed: bool = False
    """Whether a file system event reported that its writer has closed the file."""
    aged: bool = False
    """Whether the file has stayed unchanged for the settle time."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file, with the fields that its entry in the manifest needs."""

    name: str
    """Side and slot such as `input.0`, if the file contains several tensors; else empty."""
    op_name: str
    """Operator name from the header of the file; empty if only the file's name contains it."""
    dtype: str
    shape: tuple[int, ...]
    bytes_in: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileContent:
    """Content of a file, with its digest and its tensors."""

    kind: DumpFileKind
    digest: str
    """Digest of the whole file."""
    frames: Sequence[ByteBuffer]
    """The file in pieces, each of which is compressed separately."""
    members: tuple[FileTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class IngestedFile:
    """A file whose copy is in the tree."""

    path: str
    kind: DumpFileKind
    source: FileStamp
    digest: str
    target: str
    """Path of the copy, relative to the tree."""
    stored: FileStamp
    linked: bool
    """Whether the copy is a hard link to a file with the same bytes."""
    members: tuple[FileTensor, ...]
    removed: bool = False
    """Whether the source file was removed after the commit."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that was not ingested."""

    path: str
    why: SkipReason
    text: str = ""
    stamp: FileStamp | None = None


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """Counts of one run of an ingest."""

    files: int = 0
    """Number of ingested files."""
    bytes_in: int = 0
    bytes_stored: int = 0
    linked: int = 0
    skipped: int = 0
    """Number of files that an earlier run ingested, and of links to files that are ingested
    themselves.
    """
    failed: int = 0
    removed: int = 0
    """Number of removed source files."""
    found: int = 0
    """Number of files in the source at the start; 0 when the folder is followed."""


_TABLE_START = ",".join(OPERATOR_COLUMNS).encode()


def classify_file(name: str) -> DumpFileKind:
    """Return how a file with this name is ingested."""
    if name.endswith(".npy"):
        return DumpFileKind.NPY
    if name.endswith(PACKED_SUFFIX):
        return DumpFileKind.PACKED
    return DumpFileKind.BIN if is_numbered_name(name) else DumpFileKind.PLAIN


def examine_file(name: str, data: memoryview) -> FileContent:
    """Return the content of a whole file; CorruptedError when it is damaged."""
    kind = classify_file(name)
    if kind is DumpFileKind.NPY:
        return _examine_npy(data)
    if kind is DumpFileKind.BIN and bytes(data[: len(_TABLE_START)]) != _TABLE_START:
        return _examine_bin(data)
    # A number in place of a long name may stand for a bin file or for a table of an operator; the
    # first bytes have shown that this file is a table.
    kind = DumpFileKind.PLAIN if kind is DumpFileKind.BIN else kind
    return FileContent(kind, xxhash.xxh3_128_hexdigest(data), (data,))


def _examine_npy(data: memoryview) -> FileContent:
    form = read_npy_form(data)
    elements = data[form.header.data_offset : form.data_end]
    member = FileTensor(
        name="",
        op_name="",
        dtype=form.dtype,
        shape=form.header.shape,
        bytes_in=len(elements),
        digest=xxhash.xxh3_128_hexdigest(elements),
    )
    return FileContent(DumpFileKind.NPY, xxhash.xxh3_128_hexdigest(data), (data,), (member,))


def _examine_bin(data: memoryview) -> FileContent:
    found = parse_bin_file(data)
    first = found.payloads[0].offset if found.payloads else len(data)
    frames = [data[:first], *(found.read_payload(payload) for payload in found.payloads)]
    # No reader uses the bytes after the last payload, but the copy has to equal the source.
    frames.append(data[sum(map(len, frames)) :])
    return FileContent(
        DumpFileKind.BIN,
        xxhash.xxh3_128_hexdigest(data),
        [frame for frame in frames if len(frame)],
        tuple(_iter_bin_tensors(found)),
    )


def _iter_bin_tensors(found: BinFile) -> Iterator[FileTensor]:
    for payload in found.payloads:
        part = payload.part
        if isinstance(part, OpInput | OpOutput) and not part.is_placeholder:
            known = DATA_TYPES.get(part.data_type)
            yield FileTensor(
                name=f"{payload.kind}.{payload.index}",
                op_name=found.header.op_name,
                dtype=(known.element or known.name) if known else str(part.data_type),
                shape=part.shape.dim if part.shape else (),
                bytes_in=part.size,
                digest=xxhash.xxh3_128_hexdigest(found.read_payload(payload)),
            )

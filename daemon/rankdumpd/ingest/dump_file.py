"""Dump files on their way through an ingest: what a file is by its name and its bytes, the frozen
values that describe it, and why one is skipped. Pure; never unpickles, and believes no size
before it has checked it.
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
from rankdumpd.agent.records import FileStamp

INGEST_STATE_FOLDER = STATE_FOLDER
"""Hidden folder of a tree that holds what an ingest remembers."""


class DumpFileKind(str, Enum):
    """What a file is taken as."""

    NPY = "npy"
    BIN = "bin"
    """CANN's, with all tensors of an operator."""
    PACKED = "packed"
    """Packed by whoever wrote it; copied as it is."""
    PLAIN = "plain"
    """Anything else, and all that may still be appended to; copied as it is."""

    @property
    def holds_tensors(self) -> bool:
        """Whether its writer is done with it once it is closed."""
        return self is not DumpFileKind.PLAIN


class SkipReason(str, Enum):
    """Why a file could not be taken now."""

    WRITTEN = "written"
    """Somebody has it open for writing, or changed it while it was read."""
    YOUNG = "young"
    """Nobody can tell whether it is still being written: it has to stay the same for a while."""
    GONE = "gone"
    DAMAGED = "damaged"
    FAILED = "failed"
    """It could not be read or written."""


@dataclass(frozen=True, slots=True)
class IngestTask:
    """What is wanted of an ingest."""

    source: Path
    tree: Path
    delete: bool = False
    """Tensors are removed from the source, each behind the commit of its copy."""
    clear: bool = False
    """At the end, so is all that may be appended to, and folders that are empty then."""
    codec: str = "zstd"
    threads: int = 1
    queue_bytes: int = 512 << 20
    """Bytes that are read and packed at once."""


@dataclass(frozen=True, slots=True)
class CandidateFile:
    """A file that may be there for the taking."""

    path: str
    """Relative to the folder that is taken over, with `/`."""
    closed: bool = False
    """Its writer was seen closing it."""
    aged: bool = False
    """It has stayed the same for as long as one waits where nobody can tell."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file, as a manifest will tell it."""

    name: str
    """Side and slot, `input.0`, in a file that holds several; else empty."""
    op_name: str
    """Raw where the file itself says it; else empty, and the file's name does."""
    dtype: str
    shape: tuple[int, ...]
    bytes_in: int
    digest: str


@dataclass(frozen=True, slots=True)
class FileContent:
    """What a file was found to hold."""

    kind: DumpFileKind
    digest: str
    """Of the whole file."""
    frames: Sequence[ByteBuffer]
    """The file in the pieces that are packed each for itself."""
    members: tuple[FileTensor, ...] = ()


@dataclass(frozen=True, slots=True)
class IngestedFile:
    """A file that stands in the tree."""

    path: str
    kind: DumpFileKind
    source: FileStamp
    digest: str
    target: str
    """Relative to the tree."""
    stored: FileStamp
    linked: bool
    """Stored as one more name of a file with the same bytes."""
    members: tuple[FileTensor, ...]
    removed: bool = False
    """Its source was removed, behind the commit."""


@dataclass(frozen=True, slots=True)
class SkippedFile:
    """A file that was not taken."""

    path: str
    why: SkipReason
    text: str = ""
    stamp: FileStamp | None = None


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """How an ingest stands; what this run did."""

    files: int = 0
    """Taken."""
    bytes_in: int = 0
    bytes_stored: int = 0
    linked: int = 0
    skipped: int = 0
    """Taken by an earlier run, or links that lead to files that are taken themselves."""
    failed: int = 0
    removed: int = 0
    """Sources that were removed."""
    found: int = 0
    """Files there were at the beginning; 0 where that is not the end of it."""


def classify_file(name: str) -> DumpFileKind:
    """Return what a file of that name is taken as."""
    if name.endswith(".npy"):
        return DumpFileKind.NPY
    if name.endswith(PACKED_SUFFIX):
        return DumpFileKind.PACKED
    return DumpFileKind.BIN if is_numbered_name(name) else DumpFileKind.PLAIN


def examine_file(name: str, data: memoryview) -> FileContent:
    """Return what a whole file holds."""
    kind = classify_file(name)
    if kind is DumpFileKind.NPY:
        return _examine_npy(data)
    if kind is DumpFileKind.BIN:
        return _examine_bin(data)
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
    # What stands behind the last payload nobody reads, but it is the source's.
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

"""Content and size of a finished tree."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import rankdump
from rankdump import reader
from rankdump._core import npy_format


@dataclass(frozen=True, slots=True)
class TreeSize:
    """Bytes of the tensor files of one tree."""

    tensors: int
    files: int
    """Names that link to one file count once."""
    stored_bytes: int
    plain_bytes: int
    """The same tensors as npy files, each by itself, not packed."""
    distinct_plain_bytes: int
    """The same, of each different tensor once."""
    distinct_stored_bytes: int
    """Bytes as stored, of each different tensor once."""


def check_complete(tree: Path) -> None:
    """RuntimeError when a tensor was lost: a benchmark of what was not done counts for nothing."""
    iterations = reader.status(tree).iterations
    if not iterations:
        raise RuntimeError(f"{tree}: no iteration")
    for each in iterations:
        if not (each.complete and each.is_balanced and each.expected) or any(each.dropped.values()):
            raise RuntimeError(f"{tree}: {each}")


def size_of(tree: Path) -> TreeSize:
    """Return the sizes of a complete tree; every tensor is read."""
    dump = rankdump.open(tree)
    inodes: dict[tuple[int, int], int] = {}
    distinct: dict[tuple[str, tuple[int, ...], bytes], tuple[int, int]] = {}
    plain_bytes = tensors = 0
    for entry in dump.tensors():
        array, stat = dump.load(entry), entry.path.stat()
        inodes[stat.st_dev, stat.st_ino] = stat.st_size
        size = len(npy_format.format_npy_header(array.dtype.str, array.shape)) + array.nbytes
        digest = hashlib.blake2b(array.tobytes(), digest_size=16).digest()
        distinct.setdefault((array.dtype.str, array.shape, digest), (size, stat.st_size))
        plain_bytes += size
        tensors += 1
    return TreeSize(
        tensors=tensors,
        files=len(inodes),
        stored_bytes=sum(inodes.values()),
        plain_bytes=plain_bytes,
        distinct_plain_bytes=sum(plain for plain, _ in distinct.values()),
        distinct_stored_bytes=sum(stored for _, stored in distinct.values()),
    )

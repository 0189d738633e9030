"""Elements of many files at once, within a budget of memory: small files are read whole, others in
blocks. Packed files that are large together are unpacked to temporary ones first.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rankdump._analysis.reader.tensor_loader import (
    CLOSED_FILE,
    FileElements,
    Opened,
    find_file_elements,
    limit_file_bytes,
    load,
    opened,
)
from rankdump._analysis.reader.tree import Entry
from rankdump._codec.file_codec import unpack_stream
from rankdump.errors import CorruptedError

_PACKED_SUFFIX = ".npy.zst"
_SMALL_BYTES = 512 << 10
"""Opening files takes longer than loading as much."""
_MAX_OPEN_FILES = 256
"""More files than that are opened for each block: a process may hold 1024."""


@contextmanager
def opened_parts(
    entries: Sequence[Entry], *, budget_bytes: int
) -> Generator[list[Opened], None, None]:
    """Open the elements of tensors; packed ones are arrays if all need no more than the budget.

    Raises the errors of `load`.
    """
    size = sum(max(entry.bytes_in or 0, entry.stored_bytes) for entry in entries)
    with ExitStack() as files:
        if size <= _SMALL_BYTES:
            yield [load(entry) for entry in entries]
            return
        is_held, is_loaded = len(entries) <= _MAX_OPEN_FILES, size <= budget_bytes
        yield [_open_part(entry, files, is_held=is_held, is_loaded=is_loaded) for entry in entries]


def _open_part(entry: Entry, files: ExitStack, *, is_held: bool, is_loaded: bool) -> Opened:
    if not entry.member and entry.relative.endswith(_PACKED_SUFFIX):
        found = None if is_loaded else _unpack(entry, files)
        return load(entry) if found is None else found
    if is_held:
        return files.enter_context(opened(entry))
    with opened(entry) as found:
        return replace(found, descriptor=CLOSED_FILE) if isinstance(found, FileElements) else found


def _unpack(entry: Entry, files: ExitStack) -> FileElements | None:
    """Return the elements of a packed file in a temporary one; None where `load` has to read it."""
    try:
        unpacked = tempfile.TemporaryFile(prefix="rankdump-")  # noqa: SIM115 - lasts as `files`
        files.callback(unpacked.close)
        with entry.path.open("rb") as packed:
            unpack_stream(packed, unpacked.write, limit_bytes=limit_file_bytes(entry))
        unpacked.flush()
    except (OSError, CorruptedError):
        return None
    return find_file_elements(entry, unpacked.fileno())

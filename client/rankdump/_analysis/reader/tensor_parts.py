"""Elements of many files at once, within a budget of memory: files that together are small are
read whole, others in blocks. A packed file is unpacked to a temporary one first.
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
_MAX_OPEN_FILES = 256
"""More files than that are opened for each block: a process may hold 1024."""


@contextmanager
def opened_parts(
    entries: Sequence[Entry], *, budget_bytes: int
) -> Generator[list[Opened], None, None]:
    """Open the elements of tensors, as arrays if all of them together need no more than the budget.

    Raises the errors of `load`.
    """
    size = sum(max(entry.bytes_in or 0, entry.stored_bytes) for entry in entries)
    with ExitStack() as files:
        if size <= budget_bytes:
            yield [load(entry) for entry in entries]
        else:
            is_held = len(entries) <= _MAX_OPEN_FILES
            yield [_open_part(entry, files, is_held=is_held) for entry in entries]


def _open_part(entry: Entry, files: ExitStack, *, is_held: bool) -> Opened:
    if not entry.member and entry.relative.endswith(_PACKED_SUFFIX):
        found = _unpack(entry, files)
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

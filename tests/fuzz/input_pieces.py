"""Splitting of one fuzzer input into several values, and files for readers from bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_LENGTH_BYTES = 2
_MOST_PIECES = 64


def joined(parts: Sequence[bytes]) -> bytes:
    """Return one input of several parts, each behind its length."""
    return b"".join(len(part).to_bytes(_LENGTH_BYTES, "little") + part for part in parts)


def pieces(data: bytes) -> Iterator[bytes]:
    """Yield the parts of an input; the last may be shorter than it says, and only so many count."""
    at = 0
    for _ in range(_MOST_PIECES):
        if at >= len(data):
            return
        begin = at + _LENGTH_BYTES
        at = begin + int.from_bytes(data[at:begin], "little")
        yield data[begin:at]


def chosen(data: bytes, count: int) -> tuple[int, bytes]:
    """Return which of several decoders an input is for, and what is left of it."""
    return (data[0] if data else 0) % count, data[1:]


def file_of(data: bytes, name: str) -> Path:
    """Return a file of that name with these bytes; the next of that name replaces it."""
    path = _folder() / name
    path.write_bytes(data)
    return path


@cache
def _folder() -> Path:
    held = tempfile.TemporaryDirectory(prefix="rankdump-fuzz-")
    _held.append(held)
    return Path(held.name)


_held: list[tempfile.TemporaryDirectory[str]] = []
"""Removed when the interpreter ends."""

"""Headers of npy files, byte for byte as MindSpore writes them, and a reader that never unpickles.
Pure.

The format is that of NumPy's NEP 1. MindSpore's text differs from numpy's own (a comma after every
dimension, no blanks inside the shape) and is padded to multiples of 64 bytes; `numpy.load` reads
both. Two forms of MindSpore's files that numpy rejects are handled in this module only: raw
bfloat16 under a type string that numpy does not know, and an empty tensor followed by stray bytes
of one element.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.errors import CorruptedError

_NPY_MAGIC = b"\x93NUMPY"
_HEADER_ALIGNMENT = 64
MAX_DIMENSIONS = 64
# This is numpy's own limit: parsing the text takes a hundred times as much memory as the text.
_MAX_HEADER_BYTES = 10_000
_MAX_REMEMBERED_BYTES = 1 << 10
_MAX_SHOWN_CHARACTERS = 60
_FOREIGN_HEADER = re.compile(rb"\\|[0-9][A-Za-z_]")
"""Text that no valid header contains, and for which Python's parser emits warnings."""
_DESCR_PATTERN = re.compile(r"[<>|=]?(?:b1|[iu][1248]|f[248]|c8|c16)")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """Header of an npy file."""

    descr: str
    fortran_order: bool
    shape: tuple[int, ...]
    data_offset: int
    """Offset in bytes of the first element in the file."""

    @property
    def data_bytes(self) -> int:
        """Number of bytes of all elements."""
        return math.prod(self.shape) * np.dtype(self.descr).itemsize


@lru_cache(maxsize=1024)
def format_npy_header(descr: str, shape: tuple[int, ...]) -> bytes:
    """Return the header for elements in C order; its length is a multiple of 64."""
    return _format_header(f"'{descr}'", shape)


def format_row_header(fields: Sequence[tuple[object, ...]], rows: int) -> bytes:
    """Return the header of a file of rows with named fields, which `numpy.load` reads."""
    return _format_header(repr(list(fields)), (rows,))


def _format_header(descr: str, shape: tuple[int, ...]) -> bytes:
    extents = "".join(f"{extent}," for extent in shape)
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': ({extents}), }}"
    total = _pad_length(10 + len(text) + 1)
    if total - 10 <= 0xFFFF:
        prefix = _NPY_MAGIC + b"\x01\x00" + (total - 10).to_bytes(2, "little")
    else:
        total = _pad_length(12 + len(text) + 1)
        prefix = _NPY_MAGIC + b"\x02\x00" + (total - 12).to_bytes(4, "little")
    return prefix + text.encode("ascii") + b" " * (total - len(prefix) - len(text) - 1) + b"\n"


def _pad_length(length: int) -> int:
    # An aligned length still gets 64 blanks, because MindSpore pads by 1 to 64 bytes.
    return (length // _HEADER_ALIGNMENT + 1) * _HEADER_ALIGNMENT


def compute_npy_sizes(descr: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of bytes of the header and of the elements of a file."""
    elements = math.prod(shape) * np.dtype(descr).itemsize
    return len(format_npy_header(descr, shape)), elements


def parse_npy_header(data: bytes | memoryview) -> NpyHeader:
    """Return the header at the start of `data`; CorruptedError if there is none."""
    start, end = locate_header_text(data)
    parsed = _parse_remembered_header if end <= _MAX_REMEMBERED_BYTES else _parse_header_text
    return parsed(bytes(data[start:end]), end)


def _parse_header_text(text: bytes, end: int) -> NpyHeader:
    try:
        if _FOREIGN_HEADER.search(text):
            raise ValueError
        fields = ast.literal_eval(text.decode("latin-1").strip())
        descr: object = fields["descr"]
        fortran: object = fields["fortran_order"]
        extents: list[object] = list(fields["shape"])
    except (ValueError, SyntaxError, KeyError, TypeError, MemoryError, RecursionError):
        raise CorruptedError(
            "damaged: its npy header is not a dictionary of descr, fortran_order and shape"
        ) from None
    if not (
        isinstance(descr, str) and _DESCR_PATTERN.fullmatch(descr) and isinstance(fortran, bool)
    ):
        found = f"descr {descr!r:.60}, fortran_order {fortran!r:.60}"
        raise CorruptedError(
            f"damaged: npy header with {found}; allowed are a type such as '<f4', and True or False"
        )
    shape = tuple(n for n in extents if isinstance(n, int) and _is_extent(n))
    if len(shape) < len(extents) or len(shape) > MAX_DIMENSIONS:
        raise CorruptedError(
            f"damaged: npy header with the shape {_format_extents(extents)}; allowed are at most "
            f"{MAX_DIMENSIONS} extents below 2**63"
        )
    return NpyHeader(descr, fortran, shape, end)


# Headers are remembered by their text, because thousands of tensors share a shape.
_parse_remembered_header = lru_cache(maxsize=1024)(_parse_header_text)


def locate_header_text(data: bytes | memoryview) -> tuple[int, int]:
    """Return start and end of the header's text in `data`; CorruptedError if it is incomplete."""
    head = bytes(data[:12])
    if head[:6] != _NPY_MAGIC or head[6:7] not in (b"\x01", b"\x02", b"\x03"):
        raise CorruptedError(f"not an npy file: it starts with {head[:8]!r}")
    start, width = (10, 2) if head[6] == 1 else (12, 4)
    end = start + int.from_bytes(head[8 : 8 + width], "little")
    if end > _MAX_HEADER_BYTES:
        raise CorruptedError(
            f"damaged: its first {start} bytes declare an npy header of {end} bytes, at most "
            f"{_MAX_HEADER_BYTES} are allowed"
        )
    if end > len(data):
        raise CorruptedError(
            f"damaged: its first {start} bytes declare an npy header of {end} bytes, "
            f"but the file has {len(data)}"
        )
    return start, end


def _format_extents(extents: list[object]) -> str:
    text = ", ".join(map(repr, extents[: MAX_DIMENSIONS + 1]))
    return (
        f"({text if len(text) <= _MAX_SHOWN_CHARACTERS else f'{text[:_MAX_SHOWN_CHARACTERS]}...'})"
    )


def _is_extent(number: int) -> bool:
    return not isinstance(number, bool) and 0 <= number < 1 << 63


def view_array_behind_header(head: NpyHeader, data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array in the bytes of a whole npy file whose header was read."""
    check_npy_size(head, len(data))
    flat = np.frombuffer(data, dtype=head.descr, offset=head.data_offset)
    try:
        return flat.reshape(head.shape, order="F" if head.fortran_order else "C")
    except (ValueError, OverflowError):
        raise CorruptedError(
            f"damaged: npy file of shape {head.shape}, which no array can have"
        ) from None


def check_npy_size(head: NpyHeader, file_bytes: int) -> None:
    """Raise CorruptedError unless a file of this size has all elements and nothing after them."""
    found = file_bytes - head.data_offset
    if found != head.data_bytes:
        raise CorruptedError(
            f"damaged: npy file with {found} bytes of elements, "
            f"but its header declares {head.data_bytes}"
        )


_MAX_STRAY_BYTES = 8
"""Maximum number of stray bytes after an empty tensor: one element."""
_BFLOAT16_DESCR = re.compile(rb"('descr': *')<[ETh]2'")
"""Type string of bfloat16 in MindSpore: `<h2` in 2.2, `<T2` in 2.3, `<E2` in 2.6 and later."""


@dataclass(frozen=True, slots=True)
class NpyFileForm:
    """Header, element type and end of the elements of an npy file."""

    header: NpyHeader
    """Header of the file, with two-byte integers in the place of bfloat16."""
    bfloat16: bool
    data_end: int
    """Offset in bytes of the end of the elements; only stray bytes follow."""

    @property
    def dtype(self) -> str:
        """Common name of the element type."""
        return "bfloat16" if self.bfloat16 else str(np.dtype(self.header.descr))


def read_npy_form(data: bytes | memoryview, file_bytes: int | None = None) -> NpyFileForm:
    """Return the form of a file, given its bytes, or the bytes at its start and its size.

    CorruptedError if its size does not agree with its header.
    """
    _, end = locate_header_text(data)
    words, renamed = _BFLOAT16_DESCR.subn(rb"\1<u2'", bytes(data[:end]), count=1)
    header = parse_npy_header(words)
    size = len(data) if file_bytes is None else file_bytes
    stray = size - header.data_offset if header.data_bytes == 0 else 0
    if 0 < stray <= _MAX_STRAY_BYTES:
        size = header.data_offset
    check_npy_size(header, size)
    return NpyFileForm(header, renamed > 0, size)

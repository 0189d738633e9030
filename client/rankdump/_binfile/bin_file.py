"""CANN's `bin` files: the length of the header, the header, and then the payloads without gaps; and
the bytes of a payload as an array. No size in a file is trusted before it is checked.

Payloads are in the order inputs, outputs, buffers, workspaces, although the header has outputs
first (CANN, `dump_data.proto` and msaccucmp). A file packed with `zstd` is one frame for everything
before the payloads and one frame for each payload, so `zstd -d` gives the plain file, and a payload
can be read alone. The file is opened for each reading, so nothing has to be closed and values can
be passed to other processes; a file that has changed in between counts as corrupted.

Three defects of msaccucmp are not copied: 0x7F and 0xFF of FLOAT8_E4M3FN are NaN and not 480,
infinities keep their sign, and an empty tensor keeps its element type.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._binfile.header import parse_bin_header, serialize_bin_header
from rankdump._binfile.header_parts import DumpData, OpBuffer, OpInput, OpOutput, Workspace
from rankdump._codec.file_codec import decompress_frame, decompress_start, select_codec
from rankdump._codec.zstd_frames import MAX_EXPANSION, RangeReader, ZstdFrame, iterate_zstd_frames
from rankdump._core.cann_types import DATA_TYPES
from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored
from rankdump._core.npy_format import MAX_DIMENSIONS
from rankdump.errors import CorruptedError, EmptyFileError, UnsupportedError

MAX_PLAIN_BYTES = 64 << 30
"""Maximum number of bytes that a packed file may unpack to."""
_MAX_START_BYTES = 16 << 20
"""If the first frame is larger than this, only this number of bytes is unpacked to read the header,
and the checksum of the frame is not verified.
"""


BinSource: TypeAlias = "MemorySource | DiskSource | PackedSource"
"""Source of the bytes of a plain file, with the size of the file or an upper bound of it."""


@dataclass(frozen=True, slots=True)
class MemorySource:
    """A plain file in memory with its size, or the start of a file with an upper bound
    of its size.
    """

    data: memoryview
    size: int

    def read(self, start: int, end: int) -> memoryview:
        """Return a range of bytes as a view."""
        return self.data[start:end]


@dataclass(frozen=True, slots=True)
class DiskSource:
    """A file on disk, with its state when it was first examined."""

    path: Path
    size: int
    changed_ns: int
    inode: int

    @contextmanager
    def open(self) -> Generator[BinaryIO, None, None]:
        """Open the file; CorruptedError if it has changed since."""
        with self.path.open("rb") as file:
            if _examine_file(self.path, os.fstat(file.fileno())) != self:
                raise CorruptedError("changed while it was read")
            yield file

    def read(self, start: int, end: int) -> memoryview:
        """Return a range of bytes, read from the disk."""
        with self.open() as file:
            return memoryview(bytes(_make_reader(file)(start, end - start)))


class PackedSource:
    """A packed file, which unpacks the frames that are read and keeps the last one."""

    def __init__(self, disk: DiskSource, found: tuple[ZstdFrame, ...]) -> None:
        self._disk, self._frames = disk, found
        self._last: tuple[ZstdFrame, bytes] | None = None

    @property
    def size(self) -> int:
        """Size of the plain file in bytes."""
        return self._frames[-1].content_end

    def read(self, start: int, end: int) -> memoryview:
        """Return a range of bytes; bytes within one frame are not copied."""
        touched = [f for f in self._frames if f.content_offset < end and start < f.content_end]
        parts = [
            memoryview(self._content(f))[max(start - f.content_offset, 0) : end - f.content_offset]
            for f in touched
        ]
        return parts[0] if len(parts) == 1 else memoryview(b"".join(parts))

    def _content(self, frame: ZstdFrame) -> bytes:
        last = self._last
        if last is None or last[0] != frame:
            self._last = None  # frees the content before the next frame is unpacked
            packed = self._disk.read(frame.start, frame.end)
            self._last = last = frame, decompress_frame(frame, packed)
        return last[1]


def open_source(path: Path) -> BinSource:
    """Return the source of a file, which its suffix says is packed or not; its frames
    are checked.
    """
    disk = _examine_file(path, path.stat())
    if not select_codec(path.name).suffix:
        return disk
    with disk.open() as file:
        return PackedSource(disk, tuple(_iterate_frames(file, disk)))


def open_start(path: Path) -> BinSource:
    """Return a source with the start of a file; the rest of a packed file is not read."""
    disk = _examine_file(path, path.stat())
    if not select_codec(path.name).suffix:
        return disk
    with disk.open() as file:
        first = next(_iterate_frames(file, disk))
        file.seek(first.start)
        if first.content_bytes <= _MAX_START_BYTES:
            held = decompress_frame(first, file.read(first.end - first.start))
        else:
            held = decompress_start(file, _MAX_START_BYTES)
    behind = (disk.size - first.end) * MAX_EXPANSION
    return MemorySource(memoryview(held), first.content_bytes + behind)


def _iterate_frames(file: BinaryIO, disk: DiskSource) -> Iterator[ZstdFrame]:
    return iterate_zstd_frames(_make_reader(file), disk.size, limit_bytes=MAX_PLAIN_BYTES)


def _examine_file(path: Path, found: os.stat_result) -> DiskSource:
    if not stat.S_ISREG(found.st_mode):
        raise CorruptedError("not a regular file")
    return DiskSource(path, found.st_size, found.st_mtime_ns, found.st_ino)


def _make_reader(file: BinaryIO) -> RangeReader:
    def read(at: int, count: int) -> bytes:
        file.seek(at)
        return file.read(count)

    return read


HEADER_LENGTH_BYTES = 8

BinPart = OpInput | OpOutput | OpBuffer | Workspace


@dataclass(frozen=True, slots=True)
class BinPayload:
    """One tensor, buffer or workspace, and the place of its bytes."""

    kind: str
    """Kind of the payload in the words of converted files' names: `input`, `output`, `l1buffer` or
    `space`.
    """
    index: int
    part: BinPart
    offset: int
    """Offset in bytes from the start of the plain file."""

    @property
    def end(self) -> int:
        """Offset after the last byte of the payload."""
        return self.offset + self.part.size


@dataclass(frozen=True, slots=True)
class BinFile:
    """Header of a file, and its payloads, which are read on demand."""

    header: DumpData
    payloads: tuple[BinPayload, ...]
    """Payloads in the order of the file: inputs, outputs, buffers, workspaces."""
    source: BinSource
    path: Path | None = None

    def read_payload(self, payload: BinPayload) -> memoryview:
        """Return the unpacked bytes of a payload; CorruptedError if they cannot be read."""
        if not payload.part.size:
            return memoryview(b"")
        with _name_corrupted_file(self.path):
            return self.source.read(payload.offset, payload.end)


def serialize_bin_head(header: DumpData) -> bytes:
    """Return the bytes of a file before the payloads: the header with its length."""
    body = serialize_bin_header(header)
    return len(body).to_bytes(HEADER_LENGTH_BYTES, "little") + body


def open_bin_file(path: Path) -> BinFile:
    """Open a file, packed or not; CorruptedError names what is wrong with it.

    This reads the header and, for a packed file, the places of its frames. Payloads are read one by
    one, on demand.
    """
    with _name_corrupted_file(path):
        return _parse_source(open_source(path), path)


def read_bin_header(path: Path) -> DumpData:
    """Read only the header: the first bytes of a file, or the first frame of a packed one.

    The sizes in the header are checked as in `open_bin_file`, but for a packed file only against
    the maximum that the rest of the file can hold.
    """
    with _name_corrupted_file(path):
        source = open_start(path)
        held = len(source.data) if isinstance(source, MemorySource) else source.size
        if held < source.size and (held <= HEADER_LENGTH_BYTES or held < _find_header_end(source)):
            source = open_source(path)
        return _parse_source(source, path).header


def parse_bin_file(data: memoryview) -> BinFile:
    """Return the parts of a plain file; CorruptedError if its lengths do not add up."""
    return _parse_source(MemorySource(data, len(data)), None)


def _parse_source(source: BinSource, path: Path | None) -> BinFile:
    at = _find_header_end(source)
    header = parse_bin_header(source.read(HEADER_LENGTH_BYTES, at))
    payloads: list[BinPayload] = []
    for kind, index, part in _iterate_parts(header):
        payloads.append(BinPayload(kind, index, part, at))
        at += part.size
        if at > source.size:
            raise CorruptedError(
                f"damaged: according to its header, {kind} {index} of {part.size} bytes ends at "
                f"byte {at}, the file has {source.size}"
            )
    return BinFile(header, tuple(payloads), source, path)


def _find_header_end(source: BinSource) -> int:
    if source.size <= HEADER_LENGTH_BYTES:
        raise EmptyFileError(f"empty: {source.size} bytes, the length of the header alone takes 8")
    length = int.from_bytes(source.read(0, HEADER_LENGTH_BYTES), "little")
    if HEADER_LENGTH_BYTES + length > source.size:
        raise CorruptedError(
            f"damaged, or not a bin file: its first {HEADER_LENGTH_BYTES} bytes declare a header "
            f"of {length} bytes, but only {source.size - HEADER_LENGTH_BYTES} follow"
        )
    return HEADER_LENGTH_BYTES + length


def _iterate_parts(header: DumpData) -> Iterator[tuple[str, int, BinPart]]:
    groups = (
        ("input", header.input),
        ("output", header.output),
        ("l1buffer", header.buffer),
        ("space", header.space),
    )
    return chain.from_iterable(
        ((kind, index, part) for index, part in enumerate(parts)) for kind, parts in groups
    )


@contextmanager
def _name_corrupted_file(path: Path | None) -> Generator[None, None, None]:
    """Put the path before the text of an error; a file that cannot be read counts as corrupted."""
    where = f"{path}: " if path else ""
    try:
        yield
    except OSError as error:
        raise CorruptedError(f"{where}cannot be read: {error.strerror}") from None
    except CorruptedError as error:
        raise type(error)(f"{where}{error}") from None


PayloadArray = npt.NDArray[Any]
_PACKED_TYPE_BITS = {"INT4": 4, "UINT1": 1}
"""Bits of one element, for types of which several elements share a byte."""
_HIFLOAT8_NAN, _HIFLOAT8_INFINITY = 0x80, 0x6F
# Dot field of HiFloat8 -> number of bits of its exponent; the mantissa follows the exponent.
_DOT_WIDTHS = {"11": 4, "10": 3, "01": 2, "001": 1, "0001": 0}


def read_payload_array(part: OpInput | OpOutput, data: bytes | memoryview) -> PayloadArray:
    """Return a tensor as a read-only array, without converting its format.

    Types that numpy lacks are widened: bfloat16 and 8-bit floats to float32, INT4 to int8, UINT1 to
    uint8; UNDEFINED becomes bytes, whatever the shape. UnsupportedError for elements that are not
    numbers or have an unknown form, CorruptedError if there are too few bytes for the shape.
    """
    name = get_type_name(part.data_type)
    flat = _read_elements(part.data_type, name, memoryview(data))
    dims = part.shape.dim if part.shape else ()
    shape = (len(flat),) if name == "UNDEFINED" or not dims else dims
    if len(shape) > MAX_DIMENSIONS:
        raise CorruptedError(
            f"damaged: a shape of {len(shape)} extents, at most {MAX_DIMENSIONS} are allowed"
        )
    count = math.prod(shape)
    if count > len(flat):
        raise CorruptedError(
            f"damaged: {len(data)} bytes of {name} are {len(flat)} elements, too few for the shape "
            f"{shape}"
        )
    try:
        tensor = flat[:count].reshape(shape)
    except (ValueError, OverflowError):
        raise CorruptedError(f"damaged: shape {shape}, which no array can have") from None
    tensor.flags.writeable = False
    return tensor


def get_type_name(number: int) -> str:
    """Return CANN's name of an element type, without the prefix; the number of the type if it has
    no name.
    """
    known = DATA_TYPES.get(number)
    return known.name if known else str(number)


def _read_elements(number: int, name: str, data: memoryview) -> PayloadArray:
    """Return all complete elements in the bytes; an incomplete last element is left out."""
    if name == "UNDEFINED":
        return np.frombuffer(data, dtype=np.int8)
    if name == "HIFLOAT8":
        return _make_hifloat8_table()[np.frombuffer(data, dtype=np.uint8)]
    if name in _PACKED_TYPE_BITS:
        return _unpack_bits(np.frombuffer(data, dtype=np.uint8), _PACKED_TYPE_BITS[name])
    known = DATA_TYPES.get(number)
    if known is None or not known.element:
        raise UnsupportedError(f"elements of type {name} cannot be read as numbers")
    element = ELEMENT_TYPES[known.element]
    whole = data[: len(data) // element.item_bytes * element.item_bytes]
    return np.frombuffer(convert_to_stored(element.name, whole), dtype=element.descr)


def _unpack_bits(held: npt.NDArray[np.uint8], bits: int) -> PayloadArray:
    if bits == 1:
        return np.unpackbits(held)  # the first element is in the highest bit
    nibbles = np.stack((held & 0xF, held >> 4), axis=-1).reshape(-1).astype(np.int8)
    return np.where(nibbles > 7, nibbles - 16, nibbles).astype(np.int8)


@cache
def _make_hifloat8_table() -> npt.NDArray[np.float32]:
    """Return the 256 values of HiFloat8, indexed by the code."""
    return np.array([_decode_hifloat8(byte) for byte in range(256)], dtype="<f4")


def _decode_hifloat8(byte: int) -> float:
    """Return the value of one code, which consists of sign, dot, exponent and mantissa (arXiv
    2409.16626, table 2).

    The exponent is stored as sign and magnitude, without the highest bit, which is always one. If
    the dot field is 0000, the mantissa M stands for 2 ** (M - 23).
    """
    if byte == _HIFLOAT8_NAN:
        return math.nan
    sign, rest = (-1.0 if byte & 0x80 else 1.0), byte & 0x7F
    if rest == _HIFLOAT8_INFINITY:
        return sign * math.inf
    bits = f"{rest:07b}"
    for dot, width in _DOT_WIDTHS.items():
        if bits.startswith(dot):
            exponent, mantissa = bits[len(dot) : len(dot) + width], bits[len(dot) + width :]
            fraction = int(mantissa, 2) / (1 << len(mantissa))
            return sign * (1 + fraction) * 2.0 ** _decode_exponent(exponent)
    return sign * 2.0 ** (rest - 23) if rest else 0.0


def _decode_exponent(bits: str) -> int:
    if not bits:
        return 0
    magnitude = int("1" + bits[1:], 2)
    return -magnitude if bits[0] == "1" else magnitude

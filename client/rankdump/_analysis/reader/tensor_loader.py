"""Arrays of the tensors in npy and bin files, whole or block by block, and what the header of a bin
file says of each tensor. Never unpickles, and never trusts a size that it has not checked.

Blocks are read into memory that is used again: memory of the size of the tensor would have to be
found, cleared, written and read, which takes longer than copying the file. A listing reads only
the header of a bin file. Element types get the name that numpy has for them, else the name that
CANN has.
"""

from __future__ import annotations

import math
import os
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.tree import Described, Entry
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._codec.file_codec import select_codec
from rankdump._core import npy_format
from rankdump._core.cann_types import DATA_TYPES, split_format_word
from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored
from rankdump._core.manifest import ManifestRecord
from rankdump._core.npy_format import read_npy_form
from rankdump._core.record import TensorSide
from rankdump._layout.device_formats import convert_format
from rankdump._layout.tensor_tiles import OriginalLayout
from rankdump.errors import CorruptedError, UnsupportedError

_CANN_PREFIX = "DT_"
_BY_NAME = {kind.name: kind for kind in DATA_TYPES.values()}

_UNDEFINED_TYPE = 0
_MAX_CACHED_DESCRIPTIONS = 1 << 14
MAX_UNPACKED_BYTES = 64 << 30
"""Most a file may unpack to when no manifest says how large it is."""
_MAX_HEADER_BYTES = 4096
_UNPACKED_SUFFIX = ".npy"
_MAX_BLOCK_HEADER_BYTES = 4096
"""Longer headers are not read in blocks; nobody writes them."""
Opened: TypeAlias = "FileElements | npt.NDArray[Any]"


def name_element_type(number: int) -> str:
    """Return the name of an element type: numpy's where there is one, else CANN's."""
    known = DATA_TYPES.get(number)
    return (known.element or known.name.lower()) if known else f"type {number}"


def normalize_element_name(text: str) -> str:
    """Return the same for the text of a table, which has CANN's name or the framework's."""
    known = _BY_NAME.get(text.removeprefix(_CANN_PREFIX)) if text.startswith(_CANN_PREFIX) else None
    return name_element_type(known.number) if known else text


def described(path: Path) -> Iterator[tuple[TensorSide, int, Described]]:
    """Yield the tensors that a file's header names; CorruptedError when it cannot be read.

    Slots that were not dumped have a place and nothing in it.
    """
    # With protobuf, which a tree without bin files is read without.
    from rankdump._binfile import bin_file

    header = bin_file.read_bin_header(path)
    sides = (TensorSide.INPUT, header.input), (TensorSide.OUTPUT, header.output)
    for side, parts in sides:
        for slot, part in enumerate(parts):
            if not part.is_placeholder:
                dims = part.shape.dim if part.shape else ()
                original = part.original_shape.dim if part.original_shape else ()
                facts = part.data_type, dims, part.format, original, part.size, part.sub_format
                yield side, slot, _describe_tensor(header.op_name, *facts)


# The same operators come again in every iteration.
@lru_cache(maxsize=_MAX_CACHED_DESCRIPTIONS)
def _describe_tensor(
    op_name: str,
    data_type: int,
    shape: tuple[int, ...],
    word: int,
    original_shape: tuple[int, ...],
    size: int,
    groups: int,
) -> Described:
    dtype, laid = name_element_type(data_type), split_format_word(word)
    where = laid.name, original_shape, size, groups or laid.groups, laid.c0
    return Described(op_name, dtype, shape, *where)


def load_member(path: Path, member: str, record: ManifestRecord | None) -> npt.NDArray[Any]:
    """Return one tensor in the shape it had on the device.

    CorruptedError when it is not there or not what it should be, UnsupportedError for elements
    that are no numbers.
    """
    from rankdump._binfile import bin_file

    file = bin_file.open_bin_file(path)
    for payload in file.payloads:
        part = payload.part
        if f"{payload.kind}.{payload.index}" == member and isinstance(part, OpInput | OpOutput):
            data = file.read_payload(payload)
            try:
                return _member_array(part, data, record)
            except UnsupportedError as error:
                raise UnsupportedError(f"{path}: {member}: {error}") from None
            except (CorruptedError, ValueError) as error:
                raise CorruptedError(f"{path}: {member}: {error}") from None
    raise CorruptedError(f"{path}: the file has no tensor {member}")


def _member_array(
    part: OpInput | OpOutput, data: memoryview, record: ManifestRecord | None
) -> npt.NDArray[Any]:
    element = ELEMENT_TYPES.get(record.dtype) if record else None
    if record is not None and part.data_type == _UNDEFINED_TYPE and element is not None:
        # CANN has no number for this type; the manifest knows what the bytes are.
        tensor = np.frombuffer(convert_to_stored(record.dtype, data), dtype=element.descr)
        tensor.flags.writeable = False
        return tensor.reshape(record.shape)
    from rankdump._binfile import bin_file

    tensor = bin_file.read_payload_array(part, data)
    # CANN has no scalars.
    scalar = record is not None and record.shape == () and tensor.shape == (1,)
    return tensor.reshape(()) if scalar else tensor


def read_npy_array(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array, read-only, bfloat16 as float32; CorruptedError when it is none."""
    form = read_npy_form(data)
    array = npy_format.view_array_behind_header(form.header, data[: form.data_end])
    if not form.bfloat16:
        return array
    wide = np.frombuffer(convert_to_stored("bfloat16", _raw_bytes(array)), dtype="<f4").reshape(
        array.shape
    )
    wide.flags.writeable = False
    return wide


def _raw_bytes(raw: npt.NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(raw).view(np.uint8).reshape(-1).data


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a listing shows of a tensor."""

    dtype: str
    """Element type as the framework held it, where a manifest knows it."""
    shape: tuple[int, ...]
    bytes_in: int
    """Bytes of the elements as the framework held them."""
    tensor_format: str = ""
    """Format of that shape, where a bin file states it."""
    original_shape: tuple[int, ...] = ()
    """Shape in the format that the operator itself speaks, where a bin file says it."""


def load(
    entry: Entry, *, tensor_format: str = "", limit_bytes: int = MAX_UNPACKED_BYTES
) -> npt.NDArray[Any]:
    """Return a tensor as a read-only array, of a bin file in the shape it had on the device.

    With a format it is converted to that, its padding cropped where the original shape is known.
    CorruptedError when the file is not what it should be, UnsupportedError for elements that are no
    numbers, such as strings, and for a format that there is no way to.
    """
    record = entry.record
    limit = limit_bytes
    if record is not None and record.dtype in ELEMENT_TYPES:
        item_bytes = np.dtype(ELEMENT_TYPES[record.dtype].descr).itemsize
        limit = min(limit, math.prod(record.shape) * item_bytes + _MAX_HEADER_BYTES)
    if entry.member:
        tensor = load_member(entry.path, entry.member, record)
    else:
        tensor = load_file(entry.path, limit_bytes=limit)
    check_shape(entry, tensor.shape)
    return _convert_format(entry, tensor, tensor_format) if tensor_format else tensor


def check_shape(entry: Entry, shape: tuple[int, ...]) -> None:
    """Raise CorruptedError when a manifest states another shape than the file has."""
    record = entry.record
    if record is not None and shape != record.shape:
        raise CorruptedError(f"{entry.path}: shape {shape}, but its manifest has {record.shape}")


def _convert_format(entry: Entry, tensor: npt.NDArray[Any], wanted: str) -> npt.NDArray[Any]:
    source, origin = entry.key.tensor_format, OriginalLayout()
    said = read_description(entry)
    if said is not None:
        source, origin = (
            said.tensor_format,
            OriginalLayout(said.original_shape, said.groups, said.c0),
        )
    try:
        array = convert_format(tensor, source, wanted, origin).array
    except (CorruptedError, UnsupportedError) as error:
        raise type(error)(f"{entry.path}: {error}") from None
    array.flags.writeable = False
    return array


def read_description(entry: Entry) -> Described | None:
    """Return what the header of a bin file says of a member; None for any other tensor."""
    if entry.described is not None or not entry.member:
        return entry.described
    every = ((f"{side.value}.{slot}", said) for side, slot, said in described(entry.path))
    return next((said for member, said in every if member == entry.member), None)


def load_file(path: Path, *, limit_bytes: int = MAX_UNPACKED_BYTES) -> npt.NDArray[Any]:
    """Return the array of any npy file, packed or not, in a tree or not."""
    try:
        data = select_codec(path.name).decode(_read_file(path), limit_bytes=limit_bytes)
        return read_npy_array(memoryview(data))
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None
    except (CorruptedError, TypeError, ValueError) as error:
        # numpy refuses a type string that looks right and is not, such as `<f3`, in its own words.
        raise CorruptedError(f"{path}: {error}") from None


def _read_file(path: Path) -> memoryview:
    """Return what stands in a file, in memory of numpy's: that has large pages, of which few fault.

    Reading into `bytes` takes nearly twice as long.
    """
    with path.open("rb", buffering=0) as file:
        held = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8).data
        filled = 0
        while count := file.readinto(held[filled:]):
            filled += count
    return held[:filled].toreadonly()


def facts(entry: Entry) -> Facts:
    """Return what a listing says of a tensor; opens the file only when no manifest knows it."""
    record, said = entry.record, entry.described
    laid = (said.tensor_format, said.original_shape) if said is not None else ("", ())
    if record is not None:
        return Facts(record.dtype, record.shape, record.bytes_in, *laid)
    if said is not None:
        return Facts(said.dtype, said.shape, said.data_bytes, *laid)
    return facts_of(entry, load(entry))


def facts_of(entry: Entry | None, tensor: npt.NDArray[Any]) -> Facts:
    """Return the same of a tensor that is loaded already, in a tree or not."""
    if entry is not None and (entry.record is not None or entry.described is not None):
        return facts(entry)
    # Names of 2.4 and later say the type; a widened one is seen nowhere else.
    element = entry.key.element.lower() if entry is not None else ""
    held = ELEMENT_TYPES.get(element)
    if held is not None and held.is_widened:
        return Facts(element, tensor.shape, tensor.size * held.item_bytes)
    return Facts(str(tensor.dtype), tensor.shape, tensor.nbytes)


@dataclass(frozen=True, slots=True)
class FileElements:
    """The elements of an open file, in C order."""

    entry: Entry
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    descriptor: int
    data_offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def part(self, at: int, count: int, buffer: memoryview) -> npt.NDArray[Any]:
        """Read as many elements from `at` on into memory for bytes, and return them there.

        CorruptedError where the file ends before.
        """
        item_bytes = self.dtype.itemsize
        buffer = buffer[: count * item_bytes]
        offset = self.data_offset + at * item_bytes
        filled = 0
        try:
            while filled < len(buffer):
                found = os.preadv(self.descriptor, [buffer[filled:]], offset + filled)
                if not found:
                    raise CorruptedError(
                        f"{self.entry.path}: the file was truncated while it was read"
                    )
                filled += found
        except OSError as error:
            raise CorruptedError(f"{self.entry.path}: cannot be read: {error.strerror}") from None
        return np.frombuffer(buffer, dtype=self.dtype)


@contextmanager
def opened(entry: Entry) -> Generator[Opened, None, None]:
    """Open the elements of a tensor: the file where it holds them unchanged, else an array.

    Raises what `load` raises.
    """
    with ExitStack() as files:
        found = (
            None
            if entry.member or not entry.relative.endswith(_UNPACKED_SUFFIX)
            else _open_elements(entry, files)
        )
        yield load(entry) if found is None else found


def _open_elements(entry: Entry, files: ExitStack) -> FileElements | None:
    try:
        path = f"{entry.root}/{entry.relative}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, descriptor)
        start = os.pread(descriptor, _MAX_BLOCK_HEADER_BYTES, 0)
        form = read_npy_form(start, os.fstat(descriptor).st_size)
    except (OSError, CorruptedError, TypeError, ValueError):
        # Whoever loads it says what is wrong with it, if anything is.
        return None
    header = form.header
    if form.bfloat16 or header.fortran_order:
        return None
    check_shape(entry, header.shape)
    where = descriptor, header.data_offset
    return FileElements(entry, np.dtype(header.descr), header.shape, *where)

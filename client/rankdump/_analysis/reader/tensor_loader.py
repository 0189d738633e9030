"""Arrays of the tensors in npy, bin and pt files, loaded as a whole or in blocks, from one file or
from many, and descriptions of tensors in the headers of bin files. Never unpickles, and never
trusts a size that it has not checked.

Blocks are read into memory that is reused, because allocating, clearing and filling memory for the
whole tensor takes longer than copying the file. A listing reads only the header of a bin file.
Element types have numpy's name if it has one, else CANN's.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankdump._analysis.reader.baseline_files import check_content, find_tensor_file
from rankdump._analysis.reader.file_errors import named_errors
from rankdump._analysis.reader.tree import Described, Entry
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._codec.file_codec import select_codec, unpack_stream
from rankdump._core import npy_format
from rankdump._core.cann_types import name_element_type, split_format_word
from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored
from rankdump._core.manifest import ManifestRecord
from rankdump._core.npy_format import read_npy_form
from rankdump._core.record import TensorSide
from rankdump._layout.device_formats import OriginalLayout, convert_format
from rankdump._torchfile.tensor_archive import StoredTensor, TensorArchive, open_tensor_archive
from rankdump.errors import CorruptedError, UnsupportedError

_UNDEFINED_TYPE = 0
_MAX_CACHED_DESCRIPTIONS = 1 << 14
_NO_FORMAT = "DefaultFormat"
"""Word in a file name for the format that the arrays of a framework have."""
MAX_UNPACKED_BYTES = 64 << 30
"""Largest unpacked size in bytes of a file whose size is in no manifest."""
_MAX_HEADER_BYTES = 4096
_UNPACKED_SUFFIX = ".npy"
TORCH_SUFFIX = ".pt"
"""Suffix of the archives of `torch.save`."""
_MAX_BLOCK_HEADER_BYTES = 4096
"""Size in bytes above which files with such long headers, which no tool writes, are not read in
blocks.
"""
CLOSED_FILE = -1
Opened: TypeAlias = "FileElements | npt.NDArray[Any]"


def described(path: Path) -> Iterator[tuple[TensorSide, int, Described]]:
    """Yield the tensors that the header of a bin file describes; CorruptedError when it cannot be
    read.

    Placeholders for slots that were not dumped are skipped.
    """
    # Imported on use, because a tree without bin files is read without protobuf.
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


# Cached, because the same operators occur in every iteration.
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
    """Return one tensor of a bin file in its shape on the device.

    CorruptedError when the tensor is missing or damaged, UnsupportedError for elements that are not
    numbers.
    """
    if path.name.endswith(TORCH_SUFFIX):
        return _load_archived(path, member, MAX_UNPACKED_BYTES)
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
        # CANN has no number for this element type, so it is taken from the manifest.
        tensor = np.frombuffer(convert_to_stored(record.dtype, data), dtype=element.descr)
        tensor.flags.writeable = False
        return tensor.reshape(record.shape)
    from rankdump._binfile import bin_file

    tensor = bin_file.read_payload_array(part, data)
    # CANN stores a scalar as a tensor with one element.
    scalar = record is not None and record.shape == () and tensor.shape == (1,)
    return tensor.reshape(()) if scalar else tensor


def read_npy_array(data: bytes | memoryview) -> npt.NDArray[Any]:
    """Return the array read-only, with bfloat16 as float32; CorruptedError for invalid data."""
    form = read_npy_form(data)
    array = npy_format.view_array_behind_header(form.header, data[: form.data_end])
    if not form.bfloat16:
        return array
    raw = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
    wide = np.frombuffer(convert_to_stored("bfloat16", raw), "<f4").reshape(array.shape)
    wide.flags.writeable = False
    return wide


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts about a tensor in a listing."""

    dtype: str
    """Element type in the framework, if a manifest has it; else that of the file."""
    shape: tuple[int, ...]
    bytes_in: int
    """Bytes of the elements in the framework."""
    tensor_format: str = ""
    """Format of `shape`, from the header of a bin file."""
    original_shape: tuple[int, ...] = ()
    """Shape in the original format of the operator, from the header of a bin file."""


def load(
    entry: Entry, *, tensor_format: str = "", limit_bytes: int = MAX_UNPACKED_BYTES
) -> npt.NDArray[Any]:
    """Return a tensor as a read-only array; a tensor of a bin file has its shape on the device.

    With a format, the tensor is converted, and its padding is cropped if the original shape is
    known. CorruptedError when the file is damaged, UnsupportedError for elements that are not
    numbers, such as strings, and for unsupported formats.
    """
    record, limit = entry.record, limit_file_bytes(entry, limit_bytes)
    path = find_tensor_file(entry)
    if entry.member:
        tensor = load_member(path, entry.member, record)
    else:
        tensor = load_file(path, limit_bytes=limit)
    check_shape(entry, tensor.shape)
    check_content(entry, path, tensor)
    return _convert_format(entry, tensor, tensor_format) if tensor_format else tensor


def limit_file_bytes(entry: Entry, most: int = MAX_UNPACKED_BYTES) -> int:
    """Return the largest size in bytes that the unpacked file of a tensor may have."""
    record = entry.record
    if record is None or record.dtype not in ELEMENT_TYPES:
        return most
    item_bytes = np.dtype(ELEMENT_TYPES[record.dtype].descr).itemsize
    return min(most, math.prod(record.shape) * item_bytes + _MAX_HEADER_BYTES)


def check_shape(entry: Entry, shape: tuple[int, ...]) -> None:
    """Raise a CorruptedError when the shape in the manifest differs from that of the file."""
    record = entry.record
    if record is not None and shape != record.shape:
        raise CorruptedError(f"{entry.path}: shape {shape}, but its manifest has {record.shape}")


def _convert_format(entry: Entry, tensor: npt.NDArray[Any], wanted: str) -> npt.NDArray[Any]:
    source, origin = entry.key.tensor_format, OriginalLayout()
    header = read_description(entry)
    if header is not None:
        source = header.tensor_format
        origin = OriginalLayout(header.original_shape, header.groups, header.c0)
    if source == _NO_FORMAT:
        raise UnsupportedError(
            f"{entry.path}: an npy file has no device format: it cannot be converted to {wanted}"
        )
    try:
        array = convert_format(tensor, source, wanted, origin).array
    except (CorruptedError, UnsupportedError) as error:
        raise type(error)(f"{entry.path}: {error}") from None
    array.flags.writeable = False
    return array


def read_description(entry: Entry) -> Described | None:
    """Return the description of a member in the header of a bin file; None for other tensors."""
    if entry.described is not None or not entry.member:
        return entry.described
    file = find_tensor_file(entry)
    every = ((f"{side.value}.{slot}", each) for side, slot, each in described(file))
    return next((each for member, each in every if member == entry.member), None)


def list_archived(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors in an archive of `torch.save` by name; the name is empty if there is only
    one.
    """
    with _open_archive(path) as archive:
        return dict(archive.tensors)


def _load_archived(path: Path, name: str, limit_bytes: int) -> npt.NDArray[Any]:
    with _open_archive(path) as archive:
        return archive.load(name, limit_bytes=limit_bytes)


@contextmanager
def _open_archive(path: Path) -> Generator[TensorArchive, None, None]:
    """Open an archive of `torch.save`; errors name the file."""
    try:
        with path.open("rb") as file, open_tensor_archive(file) as archive:
            yield archive
    except OSError as error:
        raise CorruptedError(f"{path}: cannot be read: {error.strerror}") from None
    except (CorruptedError, UnsupportedError) as error:
        raise type(error)(f"{path}: {error}") from None


def load_file(path: Path, *, limit_bytes: int = MAX_UNPACKED_BYTES) -> npt.NDArray[Any]:
    """Return the array in an npy file, packed or not, or in a pt file with one tensor."""
    if path.name.endswith(TORCH_SUFFIX):
        return _load_archived(path, "", limit_bytes)
    with named_errors(path):
        try:
            data = select_codec(path.name).decode(_read_file(path), limit_bytes=limit_bytes)
            return read_npy_array(memoryview(data))
        except (TypeError, ValueError) as error:
            # numpy raises TypeError for a type string that is only formally valid, such as `<f3`.
            raise CorruptedError(str(error)) from None


def _read_file(path: Path) -> memoryview:
    """Return the bytes of a file in memory from numpy, whose large pages cause few page faults.

    Reading into `bytes` takes nearly twice as long.
    """
    with path.open("rb", buffering=0) as file:
        held = np.empty(os.fstat(file.fileno()).st_size, dtype=np.uint8).data
        filled = 0
        while count := file.readinto(held[filled:]):
            filled += count
    return held[:filled].toreadonly()


def facts(entry: Entry) -> Facts:
    """Return the facts about a tensor; the file is opened only if there is no record or
    description.
    """
    record, header = entry.record, entry.described
    formats = (header.tensor_format, header.original_shape) if header is not None else ("", ())
    if record is not None:
        return Facts(record.dtype, record.shape, record.bytes_in, *formats)
    if header is not None:
        return Facts(header.dtype, header.shape, header.data_bytes, *formats)
    return facts_of(entry, load(entry))


def facts_of(entry: Entry | None, tensor: npt.NDArray[Any]) -> Facts:
    """Return the facts about a tensor that is already loaded, whether it is in a tree or not."""
    if entry is not None and (entry.record is not None or entry.described is not None):
        return facts(entry)
    # File names of MindSpore 2.4 and later have the element type; for a widened type, only the name
    # tells it.
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
    """Descriptor; CLOSED_FILE for a file that is opened anew for each part."""
    data_offset: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def part(self, at: int, count: int, buffer: memoryview) -> npt.NDArray[Any]:
        """Read `count` elements from position `at` on into `buffer`, and return them as an array.

        CorruptedError if the file is too short.
        """
        item_bytes = self.dtype.itemsize
        buffer = buffer[: count * item_bytes]
        with named_errors(self.entry.path):
            if self.descriptor != CLOSED_FILE:
                self._read(self.descriptor, buffer, at * item_bytes)
            else:
                with self.entry.path.open("rb", buffering=0) as file:
                    self._read(file.fileno(), buffer, at * item_bytes)
        return np.frombuffer(buffer, dtype=self.dtype)

    def _read(self, descriptor: int, buffer: memoryview, at_byte: int) -> None:
        offset, filled = self.data_offset + at_byte, 0
        while filled < len(buffer):
            found = os.preadv(descriptor, [buffer[filled:]], offset + filled)
            if not found:
                raise CorruptedError("the file was truncated while it was read")
            filled += found


@contextmanager
def opened(entry: Entry) -> Generator[Opened, None, None]:
    """Open the elements of a tensor: as a file if it stores them unchanged, else as an array.

    Raises the same errors as `load`.
    """
    with ExitStack() as files:
        is_own = not (entry.member or entry.is_same_as_baseline)
        is_plain = is_own and entry.relative.endswith((_UNPACKED_SUFFIX, TORCH_SUFFIX))
        found = _open_elements(entry, files) if is_plain else None
        yield load(entry) if found is None else found


def _open_elements(entry: Entry, files: ExitStack) -> FileElements | None:
    try:
        path = f"{entry.root}/{entry.relative}"
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        files.callback(os.close, descriptor)
        if path.endswith(TORCH_SUFFIX):
            return _find_archived(entry, descriptor)
    except (OSError, CorruptedError, UnsupportedError):
        # `load` raises the error, if there is one.
        return None
    return find_file_elements(entry, descriptor)


def find_file_elements(entry: Entry, descriptor: int) -> FileElements | None:
    """Return the elements of an open npy file. None if the file does not store them unchanged, or
    is damaged, which `load` reports.

    CorruptedError if its manifest has another shape.
    """
    try:
        start = os.pread(descriptor, _MAX_BLOCK_HEADER_BYTES, 0)
        form = read_npy_form(start, os.fstat(descriptor).st_size)
    except (OSError, CorruptedError, TypeError, ValueError):
        return None
    header = form.header
    if form.bfloat16 or header.fortran_order:
        return None
    check_shape(entry, header.shape)
    where = descriptor, header.data_offset
    return FileElements(entry, np.dtype(header.descr), header.shape, *where)


def _find_archived(entry: Entry, descriptor: int) -> FileElements | None:
    """Return the elements of a tensor that its archive stores unchanged; None for any
    other tensor.
    """
    with open(descriptor, "rb", closefd=False) as file, open_tensor_archive(file) as archive:
        position = archive.find_position()
        tensor = archive.tensors[""]
    check_shape(entry, tensor.shape)
    if position is None:
        return None
    dtype = np.dtype(ELEMENT_TYPES[tensor.dtype].descr)
    return FileElements(entry, dtype, tensor.shape, descriptor, position)


_PACKED_SUFFIX = ".npy.zst"
_SMALL_BYTES = 512 << 10
"""Size in bytes below which opening files takes longer than loading them."""
_MAX_OPEN_FILES = 256
"""Number of files above which files are opened anew for each block, because a process may have only
1024 open.
"""
MAX_LOADED_BYTES = 64 << 20
"""Total size in bytes above which packed files are not loaded, but unpacked to temporary files."""


@contextmanager
def opened_parts(entries: Sequence[Entry]) -> Generator[list[Opened], None, None]:
    """Open the elements of tensors. Packed ones become arrays if all together are at most
    MAX_LOADED_BYTES; else they are unpacked into temporary files.

    Raises the same errors as `load`.
    """
    size = sum(max(entry.bytes_in or 0, entry.stored_bytes) for entry in entries)
    with ExitStack() as files:
        if size <= _SMALL_BYTES:
            yield [load(entry) for entry in entries]
            return
        is_held, is_loaded = len(entries) <= _MAX_OPEN_FILES, size <= MAX_LOADED_BYTES
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
    """Return the elements of a packed file, unpacked into a temporary file; None if `load` has to
    read it.
    """
    try:
        unpacked = tempfile.TemporaryFile(prefix="rankdump-")  # noqa: SIM115 - lasts as `files`
        files.callback(unpacked.close)
        with entry.path.open("rb") as packed:
            unpack_stream(packed, unpacked.write, limit_bytes=limit_file_bytes(entry))
        unpacked.flush()
    except (OSError, CorruptedError):
        return None
    return find_file_elements(entry, unpacked.fileno())

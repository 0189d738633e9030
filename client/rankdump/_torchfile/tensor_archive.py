"""Tensors in an archive that `torch.save` wrote (torch 1.6 and later): a zip file with one pickle,
and one uncompressed file for each storage. Nothing is unpickled, inflated or extracted.

    {archive}/data.pkl     what was saved: a tensor, or tensors in dictionaries, lists and tuples
    {archive}/data/{key}   the elements of a storage
    {archive}/byteorder    `little` or `big`; absent in older files

A view of a storage is checked against the size of the storage before any element is read. Elements
of a type that numpy lacks are float32 in the arrays, as in npy files.
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from rankdump._core.element_types import ELEMENT_TYPES, convert_to_stored
from rankdump._torchfile.pickle_values import (
    PickledCall,
    PickledName,
    PickledReference,
    read_pickle_values,
)
from rankdump.errors import CorruptedError, UnsupportedError

PICKLE_NAME = "data.pkl"
MAX_PICKLE_BYTES = 64 << 20
MAX_VIEW_BYTES = 64 << 30
"""Maximum size in bytes of the array of a view, whatever the size of its storage: an expanded view
repeats elements.
"""
_MAX_NUMBER = 1 << 62
_MAX_MEMBERS, _MAX_DEPTH, _MAX_DIMENSIONS = 1 << 20, 32, 64
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_LOCAL_MAGIC = b"PK\x03\x04"
_STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
_UNTYPED_STORAGE = "torch.storage.UntypedStorage"
_TENSOR_CALLS = {"torch._utils._rebuild_tensor_v2": 6, "torch._utils._rebuild_tensor_v3": 7}
"""Number of arguments of each call, to which metadata may be added; the seventh is the element
type.
"""
_PARAMETER = "torch._utils._rebuild_parameter"
_ALLOWED_NAMES = frozenset(
    (
        *(*_TENSOR_CALLS, _PARAMETER, _UNTYPED_STORAGE, "collections.OrderedDict"),
        *(f"torch.{name}" for name in _STORAGE_TYPES),
        *(f"torch.{name}" for name in ELEMENT_TYPES),
    )
)
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    NotImplementedError,
    RuntimeError,
    EOFError,
    ValueError,
    struct.error,
    OverflowError,
)
"""Errors of `zipfile` for a file that is not an archive or has unsupported features."""


class StoredTensor(NamedTuple):
    """Description of one tensor in an archive; the elements stay in the file."""

    dtype: str
    """Element type that torch used."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """Strides in elements."""
    offset: int
    """Index of the first element in the storage."""
    storage: str
    """Key of the tensor's storage."""
    conjugated: bool = False
    negated: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie without gaps in C order."""
        expected = 1
        for extent, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return not (self.conjugated or self.negated)


@dataclass(frozen=True, slots=True)
class TensorArchive:
    """An open archive, with its tensors by name.

    A name is the path in the saved value, such as `model.0.weight`; it is empty for an archive of
    one tensor.
    """

    tensors: Mapping[str, StoredTensor]
    _file: IO[bytes]
    _archive: zipfile.ZipFile
    _storages: Mapping[str, zipfile.ZipInfo]
    _is_big_endian: bool

    def load(self, name: str = "", *, limit_bytes: int = MAX_VIEW_BYTES) -> npt.NDArray[Any]:
        """Return a tensor as a read-only array; CorruptedError if it is not in the file.

        Elements of the array may share memory, if torch had expanded the tensor.
        """
        tensor = self._find(name)
        element = ELEMENT_TYPES[tensor.dtype]
        needed = tensor.size * np.dtype(element.descr).itemsize
        if needed > limit_bytes:
            raise CorruptedError(f"the tensor would take {needed:,} bytes, of {limit_bytes:,}")
        if tensor.size == 0:
            return _make_empty(tensor.shape, element.descr)
        data = _read_member(self._archive, self._storages[tensor.storage])
        if self._is_big_endian and element.item_bytes > 1:
            data = _swap_bytes(data, tensor.dtype)
        stored = convert_to_stored(tensor.dtype, memoryview(data))
        flat = np.frombuffer(stored, dtype=element.descr)
        strides = tuple(stride * flat.itemsize for stride in tensor.strides)
        array = np.ndarray(tensor.shape, flat.dtype, flat, tensor.offset * flat.itemsize, strides)
        # The result is made an array again, because numpy returns a scalar for an array without
        # dimensions.
        array = np.asarray(np.conj(array)) if tensor.conjugated else array
        array = np.asarray(np.negative(array)) if tensor.negated else array
        array.flags.writeable = False
        return array

    def find_position(self, name: str = "") -> int | None:
        """Return the offset in the file at which the elements of a tensor begin, in C order.

        The result is None if the file has the elements in another order than the array, or not
        widened.
        """
        tensor = self._find(name)
        element = ELEMENT_TYPES[tensor.dtype]
        if (
            not tensor.is_contiguous
            or tensor.size == 0
            or element.is_widened
            or self._is_big_endian
        ):
            return None
        start = self._storages[tensor.storage].header_offset
        self._file.seek(start)
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(self._file.read(_LOCAL_HEADER.size))
        if magic != _LOCAL_MAGIC:
            raise CorruptedError("the archive is damaged: a storage has no header")
        start += _LOCAL_HEADER.size + name_bytes + extra_bytes
        return start + tensor.offset * element.item_bytes

    def _find(self, name: str) -> StoredTensor:
        if name not in self.tensors:
            raise CorruptedError(f"the file has no tensor {name!r}" if name else _NOT_ONE_SENTENCE)
        return self.tensors[name]


_NO_ARCHIVE = "not an archive of torch.save, or damaged"
_NOT_ONE_SENTENCE = "the file does not hold one tensor, but a container"


@contextmanager
def open_tensor_archive(file: IO[bytes]) -> Generator[TensorArchive, None, None]:
    """Open the archive in a seekable file.

    CorruptedError for a damaged file, UnsupportedError for content that cannot be read, such as
    sparse tensors, objects of classes, and files of torch before 1.6.
    """
    try:
        archive = zipfile.ZipFile(file)
    except _ZIP_ERRORS as error:
        if _is_old_form(file):
            raise UnsupportedError(
                "a file in the form of torch before 1.6, which is no archive: save it again"
            ) from None
        raise CorruptedError(f"{_NO_ARCHIVE}: {error}") from None
    with archive:
        yield _describe_archive(file, archive)


def _is_old_form(file: IO[bytes]) -> bool:
    file.seek(0)
    return file.read(2) in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


def _describe_archive(file: IO[bytes], archive: zipfile.ZipFile) -> TensorArchive:
    members = _list_members(archive)
    pickles = [name for name in members if name.count("/") == 1 and name.endswith(PICKLE_NAME)]
    if len(pickles) != 1:
        raise CorruptedError(f"{_NO_ARCHIVE}: it has {len(pickles)} {PICKLE_NAME}")
    base = pickles[0].removesuffix(PICKLE_NAME)
    if members[pickles[0]].file_size > MAX_PICKLE_BYTES:
        raise CorruptedError(f"{PICKLE_NAME} is larger than {MAX_PICKLE_BYTES:,} bytes")
    value = read_pickle_values(_read_member(archive, members[pickles[0]]), _ALLOWED_NAMES)
    places = f"{base}data/"
    storages = {n.removeprefix(places): m for n, m in members.items() if n.startswith(places)}
    tensors: dict[str, StoredTensor] = {}
    for name, part in _iterate_tensors(value, "", 0):
        if name in tensors or len(tensors) >= _MAX_MEMBERS:
            raise UnsupportedError(f"two tensors {name!r}, or more than {_MAX_MEMBERS:,}")
        tensors[name] = _describe_tensor(part, storages)
    order = members.get(f"{base}byteorder")
    is_big = order is not None and order.file_size < 16 and _read_member(archive, order) == b"big"
    return TensorArchive(tensors, file, archive, storages, is_big)


def _list_members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    found: dict[str, zipfile.ZipInfo] = {}
    for member in archive.infolist():
        if member.filename in found:
            raise CorruptedError(f"the archive has {member.filename[:80]!r} twice")
        if member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size:
            raise CorruptedError(
                f"{member.filename[:80]!r} is compressed, which torch.save never does"
            )
        found[member.filename] = member
    return found


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    try:
        with archive.open(member) as file:
            data = file.read()
    except _ZIP_ERRORS as error:
        raise CorruptedError(f"{_NO_ARCHIVE}: {error}") from None
    if len(data) != member.file_size:
        raise CorruptedError(f"the file was truncated in {member.filename[:80]!r}")
    return data


def _iterate_tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, PickledCall]]:
    """Yield the calls that create tensors in the saved value; other values are left out."""
    if depth > _MAX_DEPTH:
        raise UnsupportedError(f"containers in it are nested more than {_MAX_DEPTH} deep")
    if isinstance(value, PickledCall):
        yield name, value
        return
    parts: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        parts = list(cast("dict[str, Any]", value).items())
    elif isinstance(value, (list, tuple)) and not isinstance(value, PickledName):
        parts = [(str(at), part) for at, part in enumerate(cast("list[Any]", value))]
    for key, part in parts:
        yield from _iterate_tensors(part, f"{name}.{key}" if name else key, depth + 1)


def _describe_tensor(call: PickledCall, storages: Mapping[str, zipfile.ZipInfo]) -> StoredTensor:
    arguments = call.arguments
    if str(call.name) == _PARAMETER and len(arguments) == 3:
        inner = arguments[0]
        if not isinstance(inner, PickledCall) or str(inner.name) == _PARAMETER:
            raise CorruptedError("a parameter in it holds no tensor")
        return _describe_tensor(inner, storages)
    known = _TENSOR_CALLS.get(str(call.name), 0)
    if not known or len(arguments) not in (known, known + 1):
        raise UnsupportedError(f"a call of {call.name} with {len(arguments)} arguments is not read")
    key, dtype, count = _describe_storage(arguments[0])
    if known == 7:
        dtype = arguments[6].name if isinstance(arguments[6], PickledName) else "unknown"
    if key not in storages:
        raise CorruptedError(f"the storage {key[:80]!r} of a tensor is not in the archive")
    if dtype not in ELEMENT_TYPES:
        raise UnsupportedError(f"elements of type {dtype[:80]!r} are not read")
    item_bytes = ELEMENT_TYPES[dtype].item_bytes
    held = storages[key].file_size // item_bytes
    if count is not None and count * item_bytes != storages[key].file_size:
        raise CorruptedError(
            f"the storage {key[:80]!r} has {storages[key].file_size:,} bytes, "
            f"but {count:,} elements of {dtype}"
        )
    offset, shape, strides = arguments[1], arguments[2], arguments[3]
    _check_view(shape, strides, offset, held)
    flags = _read_metadata(arguments[known] if len(arguments) > known else None)
    return StoredTensor(dtype, shape, strides, offset, key, **flags)


def _describe_storage(reference: Any) -> tuple[str, str, int | None]:
    """Return key, element type and number of elements of a storage; the number is None for a
    storage of bytes.
    """
    content = reference.content if isinstance(reference, PickledReference) else None
    if not (isinstance(content, tuple) and len(cast("tuple[Any, ...]", content)) == 5):
        raise CorruptedError("a tensor in it has no storage")
    kind, name, key, _, count = cast("tuple[Any, ...]", content)
    if kind != "storage" or not isinstance(key, str) or not _is_number(count):
        raise CorruptedError("the storage of a tensor is not described as torch does it")
    if not isinstance(name, PickledName):
        raise CorruptedError("the storage of a tensor has no type")
    if str(name) == _UNTYPED_STORAGE:
        return key, "uint8", None
    return key, _STORAGE_TYPES.get(name.name, name.name), count


def _read_metadata(metadata: Any) -> dict[str, bool]:
    if metadata is not None and not isinstance(metadata, dict):
        raise CorruptedError("the marks of a tensor are no dictionary")
    marks = cast("dict[str, Any]", metadata or {})
    return {"conjugated": marks.get("conj") is True, "negated": marks.get("neg") is True}


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_NUMBER


def _check_view(shape: Any, strides: Any, offset: Any, held: int) -> None:
    """Raise CorruptedError unless a view lies within its storage."""
    for extents in (shape, strides):
        if type(extents) is not tuple or not all(map(_is_number, cast("tuple[Any, ...]", extents))):
            raise CorruptedError("shape or strides of a tensor are not numbers of 0 or more")
    if len(shape) != len(strides) or len(shape) > _MAX_DIMENSIONS or not _is_number(offset):
        raise CorruptedError("shape, strides and offset of a tensor contradict each other")
    if 0 in shape:
        return
    last = offset + sum((e - 1) * s for e, s in zip(shape, strides, strict=True))
    if last >= held:
        raise CorruptedError(
            f"a tensor of shape {shape} and strides {strides} from element {offset} on "
            f"does not lie in its storage of {held:,} elements"
        )


def _make_empty(shape: tuple[int, ...], descr: str) -> npt.NDArray[Any]:
    try:
        array = np.empty(shape, descr)
    except ValueError as error:
        raise CorruptedError(f"a tensor of shape {shape}: {error}") from None
    array.flags.writeable = False
    return array


def _swap_bytes(data: bytes, dtype: str) -> bytes:
    width = ELEMENT_TYPES[dtype].item_bytes // (2 if dtype.startswith("complex") else 1)
    return np.frombuffer(data, dtype=f">u{width}").astype(f"<u{width}").tobytes()

"""An entry to its array. Never unpickles, never trusts a size it has not checked."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankdump.codec import codec_of
from rankdump.contract.dtypes import ELEMENT_TYPES
from rankdump.contract.errors import DamagedError, UnsupportedError
from rankdump.contract.formats import Origin, convert
from rankdump.reader import npy_file
from rankdump.reader.bins import described, load_member
from rankdump.reader.entry import Described, Entry

LIMIT_BYTES = 64 << 30
"""Most a file may unpack to when no manifest says how large it is."""
_HEADER_ROOM_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Facts:
    """What a listing says of a tensor."""

    dtype: str
    """Element type as the framework held it, where a manifest knows it."""
    shape: tuple[int, ...]
    bytes_in: int
    """Bytes of the elements as the framework held them."""
    tensor_format: str = ""
    """How the elements lie in that shape, where a bin file says it."""
    original_shape: tuple[int, ...] = ()
    """Shape in the format that the operator itself speaks, where a bin file says it."""


def load(
    entry: Entry, *, tensor_format: str = "", limit_bytes: int = LIMIT_BYTES
) -> npt.NDArray[Any]:
    """Return a tensor as a read-only array, of a bin file in the shape it had on the device.

    With a format it is converted to that, its padding cropped where the original shape is known.
    DamagedError when the file is not what it should be, UnsupportedError for elements that are no
    numbers, such as strings, and for a format that there is no way to.
    """
    record = entry.record
    limit = limit_bytes
    if record is not None and record.dtype in ELEMENT_TYPES:
        item_bytes = np.dtype(ELEMENT_TYPES[record.dtype].descr).itemsize
        limit = min(limit, math.prod(record.shape) * item_bytes + _HEADER_ROOM_BYTES)
    if entry.member:
        tensor = load_member(entry.path, entry.member, record)
    else:
        tensor = load_file(entry.path, limit_bytes=limit)
    check_shape(entry, tensor.shape)
    return _converted(entry, tensor, tensor_format) if tensor_format else tensor


def check_shape(entry: Entry, shape: tuple[int, ...]) -> None:
    """Raise DamagedError unless a file has the shape that its manifest says, where there is one."""
    record = entry.record
    if record is not None and shape != record.shape:
        raise DamagedError(f"{entry.path}: shape {shape}, its manifest says {record.shape}")


def _converted(entry: Entry, tensor: npt.NDArray[Any], wanted: str) -> npt.NDArray[Any]:
    source, origin = entry.key.tensor_format, Origin()
    said = described_of(entry)
    if said is not None:
        source, origin = said.tensor_format, Origin(said.original_shape, said.groups, said.c0)
    try:
        array = convert(tensor, source, wanted, origin).array
    except (DamagedError, UnsupportedError) as error:
        raise type(error)(f"{entry.path}: {error}") from None
    array.flags.writeable = False
    return array


def described_of(entry: Entry) -> Described | None:
    """Return what the header of a bin file says of a member; None for any other tensor."""
    if entry.described is not None or not entry.member:
        return entry.described
    every = ((f"{side.value}.{slot}", said) for side, slot, said in described(entry.path))
    return next((said for member, said in every if member == entry.member), None)


def load_file(path: Path, *, limit_bytes: int = LIMIT_BYTES) -> npt.NDArray[Any]:
    """Return the array of any npy file, packed or not, in a tree or not."""
    try:
        data = codec_of(path.name).decode(_bytes_of(path), limit_bytes=limit_bytes)
        return npy_file.read(memoryview(data))
    except OSError as error:
        raise DamagedError(f"{path}: cannot be read: {error.strerror}") from None
    except (DamagedError, TypeError, ValueError) as error:
        # numpy refuses a type string that looks right and is not, such as `<f3`, in its own words.
        raise DamagedError(f"{path}: {error}") from None


def _bytes_of(path: Path) -> memoryview:
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
    if held is not None and held.widened:
        return Facts(element, tensor.shape, tensor.size * held.item_bytes)
    return Facts(str(tensor.dtype), tensor.shape, tensor.nbytes)

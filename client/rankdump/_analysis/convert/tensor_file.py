"""Output file of one payload of a bin file: its name, as msaccucmp (Ascend/msprobe) gives it, and
its bytes in the requested tensor format. Pure: no disk.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rankdump._analysis.convert.request import ConversionRequest
from rankdump._binfile.bin_file import BinPayload, get_type_name, read_payload_array
from rankdump._binfile.header_parts import OpInput, OpOutput
from rankdump._binfile.overflow_record import convert_overflow_to_json
from rankdump._core import npy_format
from rankdump._core.cann_types import FormatWord, split_format_word
from rankdump._layout.device_formats import FLAT_ORDERS, ConvertedTensor, convert_format
from rankdump._layout.file_name import OVERFLOW_PREFIX, PACKED_SUFFIX
from rankdump._layout.tensor_tiles import OriginalLayout
from rankdump.errors import UnsupportedError

_TYPES_UNKNOWN_TO_NUMPY = {
    "BF16": "bfloat16",
    "HIFLOAT8": "hifloat8",
    "FLOAT8_E5M2": "float8_e5m2",
    "FLOAT8_E4M3FN": "float8_e4m3fn",
}
MAX_NAME_LENGTH = 255
"""msaccucmp shortens a name of this length, though a file could have it."""

TensorArray: TypeAlias = npt.NDArray[Any]


def strip_packing_suffix(file_name: str) -> str:
    """Return the name of a bin file without the suffix of its packing."""
    return file_name.removesuffix(PACKED_SUFFIX)


def name_device_tensor(
    name: str, payload: BinPayload, array: npt.NDArray[Any], kind: str, device: str
) -> str:
    """Return the name of a tensor that keeps its shape on the device."""
    stem = f"{name}.{payload.kind}.{payload.index}"
    if kind == "npy":
        return f"{stem}.npy"
    return f"{stem}.{array.size}.{_element_type(payload, array)}.{device}.bin"


def name_converted_tensor(
    name: str, payload: BinPayload, array: npt.NDArray[Any], kind: str, shown: str
) -> str:
    """Return the name of a tensor that was brought into a format."""
    stem = f"{name}.{payload.kind}.{payload.index}"
    if kind == "npy":
        return f"{stem}.{_join_extents('x', array.shape)}.npy"
    return f"{stem}.{_join_extents('_', array.shape)}.{_element_type(payload, array)}.{shown}.bin"


def name_raw_payload(name: str, payload: BinPayload) -> str:
    """Return the name of a buffer or a workspace."""
    return f"{name}.{payload.kind}.{payload.index}.bin"


def name_overflow_record(name: str, payload: BinPayload) -> str:
    """Return the name of what an overflow was."""
    return f"{name}.{payload.kind}.{payload.index}.json"


def shorten_name(name: str) -> str:
    """Return the name that a folder can take: a digest with its suffix where it is too long."""
    if max(len(name), len(os.fsencode(name))) < MAX_NAME_LENGTH:
        return name
    return hash_name(name) + name[name.rindex(".") :]


def hash_name(name: str) -> str:
    """Return `uuid.uuid3` of a name, which that function would take only if it were text."""
    content = uuid.NAMESPACE_DNS.bytes + os.fsencode(name)
    found = hashlib.md5(content, usedforsecurity=False).digest()
    return uuid.UUID(bytes=found, version=3).hex


def _element_type(payload: BinPayload, array: npt.NDArray[Any]) -> str:
    """Return the type's word: of a float that numpy lacks, its own, though float32 is written."""
    number = payload.part.data_type if isinstance(payload.part, OpInput | OpOutput) else 0
    return _TYPES_UNKNOWN_TO_NUMPY.get(get_type_name(number)) or str(array.dtype)


def _join_extents(mark: str, shape: Sequence[int]) -> str:
    return mark.join(map(str, shape))


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write."""

    name: str
    content_parts: tuple[bytes | memoryview, ...]
    warning: str = ""


def is_selected(file_name: str, payload: BinPayload, request: ConversionRequest) -> bool:
    """Whether a payload becomes a file; placeholders of slots that were not dumped do not."""
    part = payload.part
    if not isinstance(part, OpInput | OpOutput):
        return not request.target and not file_name.startswith(OVERFLOW_PREFIX) and not request.side
    if file_name.startswith(OVERFLOW_PREFIX):
        return payload.kind == "output"
    if request.side and (payload.kind, payload.index) != (request.side, request.index):
        return False
    return not part.is_placeholder


def make_output_file(
    file_name: str, payload: BinPayload, data: memoryview, request: ConversionRequest
) -> OutputFile:
    """Return the file of a payload; an error says why there is none."""
    part, name = payload.part, strip_packing_suffix(file_name)
    if not isinstance(part, OpInput | OpOutput):
        return OutputFile(name_raw_payload(name, payload), (data,))
    if file_name.startswith(OVERFLOW_PREFIX):
        return OutputFile(
            name_overflow_record(name, payload), (convert_overflow_to_json(bytes(data)).encode(),)
        )
    word = split_format_word(part.format)
    tensor = read_payload_array(part, data)
    if not request.target:
        named = name_device_tensor(name, payload, tensor, request.kind, word.name)
        return OutputFile(named, _file_parts(tensor, request.kind))
    found = _convert_tensor(tensor, part, word, request)
    shown = word.name if found.has_padding else request.target
    named = name_converted_tensor(name, payload, found.array, request.kind, shown)
    return OutputFile(
        named, _file_parts(found.array, request.kind), _crop_warning(found, part, request)
    )


def _convert_tensor(
    tensor: TensorArray, part: OpInput | OpOutput, word: FormatWord, request: ConversionRequest
) -> ConvertedTensor:
    groups = part.sub_format or word.groups
    origin = OriginalLayout(_original_shape(part, request), groups, word.c0)
    if word.name not in FLAT_ORDERS or tensor.ndim == len(word.name):
        return convert_format(tensor, word.name, request.target, origin)
    try:
        return convert_format(tensor, "ND", request.target, origin)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{word.name} of shape {tensor.shape} is converted as ND: {error}"
        ) from None


def _original_shape(part: OpInput | OpOutput, request: ConversionRequest) -> tuple[int, ...]:
    return request.shape or (part.original_shape.dim if part.original_shape else ())


def _crop_warning(
    found: ConvertedTensor, part: OpInput | OpOutput, request: ConversionRequest
) -> str:
    if not found.has_padding:
        return ""
    original = _original_shape(part, request)
    shape = f"{found.array.shape} in {request.target}"
    return f"{shape} is not cropped: the original shape {original} does not fit"


def _file_parts(tensor: TensorArray, kind: str) -> tuple[bytes | memoryview, ...]:
    flat = cast("TensorArray", np.ascontiguousarray(tensor).reshape(-1))
    elements, descr = flat.view(np.uint8).data, cast("str", tensor.dtype.str)
    return (
        (npy_format.format_npy_header(descr, tensor.shape), elements)
        if kind == "npy"
        else (elements,)
    )

"""Output file of one payload of a bin file: its name, as msaccucmp (Ascend/msprobe) gives it, and
its bytes in the requested tensor format. Pure: no disk.
"""

from __future__ import annotations

import hashlib
import os
import uuid
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
"""Names of this length are shortened, as in msaccucmp, although a file could have them."""

TensorArray: TypeAlias = npt.NDArray[Any]


def shorten_name(name: str) -> str:
    """Return the name on disk: a digest with the suffix where the name is too long."""
    if max(len(name), len(os.fsencode(name))) < MAX_NAME_LENGTH:
        return name
    return hash_name(name) + name[name.rindex(".") :]


def hash_name(name: str) -> str:
    """Return `uuid.uuid3` of a name, which may have bytes that are not valid text."""
    content = uuid.NAMESPACE_DNS.bytes + os.fsencode(name)
    found = hashlib.md5(content, usedforsecurity=False).digest()
    return uuid.UUID(bytes=found, version=3).hex


def _element_type(part: OpInput | OpOutput, tensor: TensorArray) -> str:
    """Return the element type in file names: for a float that numpy lacks, the original type."""
    return _TYPES_UNKNOWN_TO_NUMPY.get(get_type_name(part.data_type)) or str(tensor.dtype)


@dataclass(frozen=True, slots=True)
class OutputFile:
    """One file to write."""

    name: str
    content_parts: tuple[bytes | memoryview, ...]
    warning: str = ""


def is_selected(file_name: str, payload: BinPayload, request: ConversionRequest) -> bool:
    """Return whether a payload is written; placeholders of slots without a dump are not."""
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
    """Return the output file of a payload; raises an error where it cannot be converted."""
    part = payload.part
    stem = f"{file_name.removesuffix(PACKED_SUFFIX)}.{payload.kind}.{payload.index}"
    if not isinstance(part, OpInput | OpOutput):
        return OutputFile(f"{stem}.bin", (data,))
    if file_name.startswith(OVERFLOW_PREFIX):
        return OutputFile(f"{stem}.json", (convert_overflow_to_json(bytes(data)).encode(),))
    word = split_format_word(part.format)
    tensor = read_payload_array(part, data)
    if not request.target:
        if request.kind == "bin":
            stem += f".{tensor.size}.{_element_type(part, tensor)}.{word.name}"
        return OutputFile(f"{stem}.{request.kind}", _file_parts(tensor, request.kind))
    found = _convert_tensor(tensor, part, word, request)
    stem += "." + ("_" if request.kind == "bin" else "x").join(map(str, found.array.shape))
    if request.kind == "bin":
        shown = word.name if found.has_padding else request.target
        stem += f".{_element_type(part, found.array)}.{shown}"
    parts = _file_parts(found.array, request.kind)
    return OutputFile(f"{stem}.{request.kind}", parts, _crop_warning(found, part, request))


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

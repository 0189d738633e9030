"""One payload of a bin file as the file it becomes. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from rankdump.contract import npy
from rankdump.contract.dump_types import FormatWord, format_word
from rankdump.contract.dumpdata import OpInput, OpOutput
from rankdump.contract.errors import UnsupportedError
from rankdump.contract.formats import Converted, Origin, convert
from rankdump.contract.formats.lettered import FLAT
from rankdump.contract.layout.file_name import OVERFLOW_START
from rankdump.contract.opdebug import opdebug_json
from rankdump.convert import names
from rankdump.convert.request import Request
from rankdump.dumpdata import Payload, array

Array: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Made:
    """One file to write."""

    name: str
    parts: tuple[bytes | memoryview, ...]
    warning: str = ""


def wanted(file_name: str, payload: Payload, request: Request) -> bool:
    """Whether a payload becomes a file; placeholders of slots that were not dumped do not."""
    part = payload.part
    if not isinstance(part, OpInput | OpOutput):
        return not request.target and not file_name.startswith(OVERFLOW_START) and not request.side
    if file_name.startswith(OVERFLOW_START):
        return payload.kind == "output"
    if request.side and (payload.kind, payload.index) != (request.side, request.index):
        return False
    return not part.placeholder


def made(file_name: str, payload: Payload, data: memoryview, request: Request) -> Made:
    """Return the file of a payload; an error says why there is none."""
    part, name = payload.part, names.plain_name(file_name)
    if not isinstance(part, OpInput | OpOutput):
        return Made(names.as_bytes(name, payload), (data,))
    if file_name.startswith(OVERFLOW_START):
        return Made(names.as_json(name, payload), (opdebug_json(bytes(data)).encode(),))
    word = format_word(part.format)
    tensor = array(part, data)
    if not request.target:
        named = names.as_dumped(name, payload, tensor, request.kind, word.name)
        return Made(named, _parts(tensor, request.kind))
    found = _converted(tensor, part, word, request)
    shown = word.name if found.whole else request.target
    named = names.as_converted(name, payload, found.array, request.kind, shown)
    return Made(named, _parts(found.array, request.kind), _warning(found, part, request))


def _converted(
    tensor: Array, part: OpInput | OpOutput, word: FormatWord, request: Request
) -> Converted:
    groups = part.sub_format or word.groups
    origin = Origin(_original(part, request), groups, word.c0)
    if word.name not in FLAT or tensor.ndim == len(word.name):
        return convert(tensor, word.name, request.target, origin)
    try:
        return convert(tensor, "ND", request.target, origin)
    except UnsupportedError as error:
        raise UnsupportedError(f"{word.name} of shape {tensor.shape} is ND: {error}") from None


def _original(part: OpInput | OpOutput, request: Request) -> tuple[int, ...]:
    return request.shape or (part.original_shape.dim if part.original_shape else ())


def _warning(found: Converted, part: OpInput | OpOutput, request: Request) -> str:
    if not found.whole:
        return ""
    original = _original(part, request)
    return f"{original} is no part of {found.array.shape} in {request.target}: it is not cropped"


def _parts(tensor: Array, kind: str) -> tuple[bytes | memoryview, ...]:
    flat = cast("Array", np.ascontiguousarray(tensor).reshape(-1))
    elements, descr = flat.view(np.uint8).data, cast("str", tensor.dtype.str)
    return (npy.header(descr, tensor.shape), elements) if kind == "npy" else (elements,)

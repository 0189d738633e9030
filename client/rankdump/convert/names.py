"""Names of converted files, as msaccucmp gives them. Pure.

Source: ascend-formats.md 3.2 and 2.3.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from rankdump.contract.dumpdata import OpInput, OpOutput
from rankdump.contract.layout.file_name import PACKED
from rankdump.dumpdata import Payload, type_name

_LACKING = {
    "BF16": "bfloat16",
    "HIFLOAT8": "hifloat8",
    "FLOAT8_E5M2": "float8_e5m2",
    "FLOAT8_E4M3FN": "float8_e4m3fn",
}
LIMIT = 255
"""msaccucmp shortens a name of this length, though a file could have it."""


def plain_name(file_name: str) -> str:
    """Return the name of a bin file without the suffix of its packing."""
    return file_name.removesuffix(PACKED)


def as_dumped(name: str, payload: Payload, array: npt.NDArray[Any], kind: str, device: str) -> str:
    """Return the name of a tensor that keeps its shape on the device."""
    stem = f"{name}.{payload.kind}.{payload.index}"
    if kind == "npy":
        return f"{stem}.npy"
    return f"{stem}.{array.size}.{_type(payload, array)}.{device}.bin"


def as_converted(
    name: str, payload: Payload, array: npt.NDArray[Any], kind: str, shown: str
) -> str:
    """Return the name of a tensor that was brought into a format."""
    stem = f"{name}.{payload.kind}.{payload.index}"
    if kind == "npy":
        return f"{stem}.{_joined('x', array.shape)}.npy"
    return f"{stem}.{_joined('_', array.shape)}.{_type(payload, array)}.{shown}.bin"


def as_bytes(name: str, payload: Payload) -> str:
    """Return the name of a buffer or a workspace."""
    return f"{name}.{payload.kind}.{payload.index}.bin"


def as_json(name: str, payload: Payload) -> str:
    """Return the name of what an overflow was."""
    return f"{name}.{payload.kind}.{payload.index}.json"


def on_disk(name: str) -> str:
    """Return the name that a folder can take: a digest with its suffix where it is too long."""
    if max(len(name), len(os.fsencode(name))) < LIMIT:
        return name
    return digest(name) + name[name.rindex(".") :]


def digest(name: str) -> str:
    """Return `uuid.uuid3` of a name, which that function would take only if it were text."""
    content = uuid.NAMESPACE_DNS.bytes + os.fsencode(name)
    found = hashlib.md5(content, usedforsecurity=False).digest()
    return uuid.UUID(bytes=found, version=3).hex


def _type(payload: Payload, array: npt.NDArray[Any]) -> str:
    """Return the type's word: of a float that numpy lacks, its own, though float32 is written."""
    number = payload.part.data_type if isinstance(payload.part, OpInput | OpOutput) else 0
    return _LACKING.get(type_name(number)) or str(array.dtype)


def _joined(mark: str, shape: Sequence[int]) -> str:
    return mark.join(map(str, shape))
